"""What a save costs the work beside it, from how long steps take with and without.

World: host-only. Floor: the lowest, above `intervals`. Read `jaxft/intervals.py`
before; `jaxft/checkpoint/auto_interval.py` feeds it while a run lives, and
`jaxft/goodput/history.py` with the history of one that may be over.

The time that a save call takes says too little and too much: steps are slower while
the arrays are written, and a call that waits for the step before it takes nothing from
the work. So a save costs what its steps took longer than those without a save.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from jaxft.intervals import SaveCost

# Times far above the usual are something else: an evaluation, a stall.
_MAX_TIMES = 5.0
_NUM_QUIET = 64
_NUM_SAVES = 16
_NUM_REMEMBERED = 4
# Where a save is always in flight, so many are taken together.
_MAX_OPEN = 8
# A call that took no more than that from the work would be luck.
_MIN_SHARE = 0.1


class SaveCosts:
    """Adds up stretches of steps and the saves beside them.

    A stretch is any number of steps in a row and the time they took all together, with
    what the loop did besides.

    Attributes:
        num_known: saves, or groups of them, whose cost is known by now.
    """

    def __init__(self) -> None:
        self.num_known = 0
        self._quiet: collections.deque[_Stretch]
        self._quiet = collections.deque(maxlen=_NUM_QUIET)
        # Of the saves since the last quiet stretch: blocking and writing seconds.
        self._open: list[tuple[float, float | None]] = []
        self._beside: list[_Stretch] = []
        self._blocking_secs = 0.0  # in the stretch that goes on
        self._saves: collections.deque[_Save]
        self._saves = collections.deque(maxlen=_NUM_SAVES)
        self._first: _Save | None = None

    def stretch(self, secs: float, *, num_steps: int) -> None:
        """Some steps are over.

        Args:
            secs: that they took.
            num_steps: how many, at least 1.
        """
        one = _Stretch(secs, num_steps, self._blocking_secs)
        self._blocking_secs = 0.0
        if not self._open:
            self._quiet.append(one)
            return
        self._beside.append(one)
        if not self.is_writing or len(self._open) > _MAX_OPEN:
            self._close()

    def begin(self, blocking_secs: float) -> None:
        """A save has begun, in the stretch that goes on; one at a time."""
        self._blocking_secs += blocking_secs
        self._open.append((blocking_secs, None))

    def commit(self, secs: float) -> None:
        """It has committed, `secs` after it began, in the stretch that goes on."""
        if self.is_writing:
            self._open[-1] = (self._open[-1][0], secs)

    def give_up(self) -> None:
        """It will not commit: what was measured beside it is of no use."""
        self._open, self._beside = [], []

    def remember(self, cost: SaveCost) -> None:
        """What an earlier process has measured: as good as some saves of this one."""
        save = _Save(
            blocking_secs=cost.blocking_secs,
            write_secs=cost.write_secs,
            lost_secs=cost.lost_secs,
        )
        self._saves.extend([save] * _NUM_REMEMBERED)

    @property
    def is_writing(self) -> bool:
        """Whether a save has begun and not committed."""
        return bool(self._open) and self._open[-1][1] is None

    @property
    def step_secs(self) -> float:
        """Mean time of a step without a save; 0.0 while none is known."""
        usual = _usual(list(self._quiet))
        num_steps = sum(one.num_steps for one in usual)
        return sum(one.secs for one in usual) / num_steps if num_steps else 0.0

    def cost(self) -> SaveCost | None:
        """The mean of the last saves; None before one is known.

        The first one of a process counts only as long as nothing else is known:
        whatever happens once happens in it.
        """
        saves = list(self._saves) or ([self._first] if self._first else [])
        if not saves:
            return None
        blocking_secs = statistics.fmean(save.blocking_secs for save in saves)
        write_secs = statistics.fmean(save.write_secs for save in saves)
        # Signed, for the noise of the steps to go out.
        lost_secs = statistics.fmean(save.lost_secs for save in saves)
        # A call waits for one step at most; beyond that it takes from the work.
        surely = max(blocking_secs - self.step_secs, _MIN_SHARE * blocking_secs)
        lost_secs = max(lost_secs, surely)
        blocking_secs = min(blocking_secs, lost_secs)
        return SaveCost(
            blocking_secs=blocking_secs,
            write_secs=write_secs,
            slowdown=_slowdown(lost_secs - blocking_secs, write_secs),
        )

    def _close(self) -> None:
        """No save is in flight: what the steps since the first took longer."""
        saves = [(block, secs) for block, secs in self._open if secs is not None]
        blocking_secs = statistics.fmean(block for block, _ in saves)
        lost_secs = blocking_secs
        if (step_secs := self.step_secs) > 0:
            total_secs = sum(one.excess_secs(step_secs) for one in self._beside)
            lost_secs = total_secs / len(saves)
        save = _Save(
            blocking_secs=blocking_secs,
            write_secs=statistics.fmean(secs for _, secs in saves),
            lost_secs=lost_secs,
        )
        if self._first is None:
            self._first = save
        else:
            self._saves.append(save)
        self.num_known += 1
        self._open, self._beside = self._open[len(saves) :], []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Save:
    blocking_secs: float
    write_secs: float
    lost_secs: float


@dataclasses.dataclass(frozen=True)
class _Stretch:
    secs: float
    num_steps: int
    blocking_secs: float

    def excess_secs(self, step_secs: float) -> float:
        """How much longer it took than its steps do without a save."""
        # A save's call is no stall, however long it is.
        rest_secs = max(0.0, self.secs - self.blocking_secs)
        if rest_secs > _MAX_TIMES * step_secs * self.num_steps:
            return self.blocking_secs
        return self.blocking_secs + rest_secs - self.num_steps * step_secs


def _usual(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    """Those whose steps do not take a multiple of the median."""
    if not stretches:
        return []
    median = statistics.median(one.secs / one.num_steps for one in stretches)
    return [one for one in stretches if one.secs <= _MAX_TIMES * median * one.num_steps]


def _slowdown(slow_secs: float, write_secs: float) -> float:
    """The relative slow-down that takes `slow_secs` of work in `write_secs`."""
    # Work that the steps lose cannot be all of the time they take.
    share = min(slow_secs / write_secs, 0.9) if write_secs > 0 else 0.0
    return share / (1 - share)
