"""What saves, restores and restarts cost.

World: host-only. Floor: goodput, above `lives`. Read `jaxft/goodput/lives.py` before
and `jaxft/goodput/account.py` after it.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import statistics

from jaxft.events import Event
from jaxft.goodput.ledger import MALFORMED
from jaxft.goodput.lives import Border, Turn


class Amounts:
    """Times of many like things: how many, median, largest, sum.

    Exact, at eight bytes each: a save every ten seconds is two megabytes a month.
    """

    def __init__(self) -> None:
        self._values = array.array("d")

    def add(self, secs: float) -> None:
        """One more."""
        self._values.append(secs)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def median(self) -> float:
        """In seconds; 0 for none."""
        return statistics.median(self._values) if self._values else 0.0

    @property
    def longest(self) -> float:
        """In seconds; 0 for none."""
        return max(self._values, default=0.0)

    @property
    def total(self) -> float:
        """In seconds."""
        return sum(self._values)


@dataclasses.dataclass(kw_only=True)
class Recovery:
    """The parts of one worker's way to its first step, in seconds.

    Attributes:
        attempt: as in its launch; -1 without a supervisor.
        at_secs: when it was launched, in seconds since the epoch.
        is_restart: whether another worker of the run was there before it.
        down_secs: from the end of the one before it, in the same command; else 0.
        imports_secs: interpreter and imports.
        build_secs: model, data, preflight; on a fresh start making the state, too.
        restore_secs: reading the checkpoint, without its verification.
        verify_secs: proving what was read.
        compile_secs: compiling, or reading the cache.
        is_cached: whether the compile cache served it.
        first_step_secs: from there to the end of its first step.
        other_secs: what lies between these.
        total_secs: all of them.
    """

    attempt: int
    at_secs: float
    is_restart: bool
    down_secs: float = 0.0
    imports_secs: float = 0.0
    build_secs: float = 0.0
    restore_secs: float = 0.0
    verify_secs: float = 0.0
    compile_secs: float = 0.0
    is_cached: bool = False
    first_step_secs: float = 0.0
    other_secs: float = 0.0
    total_secs: float = 0.0


class Costs:
    """Adds up costs over events in their order.

    Attributes:
        blocking: how long the loop waited for each save.
        saves: how long each committed save took, in the background and before.
        save_bytes: of all committed saves, as files; links count like bytes.
        linked_bytes: of those, bytes that were linked and not written.
        num_skipped_saves: not begun as one was in flight.
        num_failed_saves: that failed.
        restores: how long each restore took, with its verification.
        restore_bytes: read by all of them.
        recoveries: of each worker that reached its first step.
    """

    def __init__(self) -> None:
        self.blocking = Amounts()
        self.saves = Amounts()
        self.save_bytes = 0
        self.linked_bytes = 0
        self.num_skipped_saves = 0
        self.num_failed_saves = 0
        self.restores = Amounts()
        self.restore_bytes = 0
        self.recoveries: list[Recovery] = []
        self._way: Recovery | None = None
        self._mark = 0.0
        self._ended_at: float | None = None
        self._last_secs = 0.0

    def take(self, event: Event, *, at_secs: float, turn: Turn) -> None:
        """Takes in one event.

        Args:
            event: as it was written; one that is not made as it should be says nothing.
            at_secs: its time.
            turn: what it means for the life of a worker.
        """
        with contextlib.suppress(*MALFORMED):
            if turn.border is Border.BEGIN:
                self._begin(event, at_secs=at_secs, turn=turn)
            elif turn.border in (Border.EXIT, Border.LAST_WORD):
                # The last word comes first, and the exit is what counts.
                self._ended_at, self._way = at_secs, None
            taker = getattr(self, f"_take_{event['kind']}", None)
            if taker is not None:
                taker(event)
            if self._way is not None:
                self._follow(self._way, event, at_secs=at_secs)
        self._last_secs = at_secs

    def _begin(self, event: Event, *, at_secs: float, turn: Turn) -> None:
        ended_at = self._last_secs if turn.unseen else self._ended_at
        self._way = Recovery(
            attempt=int(event.get("attempt", -1)) if event["kind"] == "launch" else -1,
            at_secs=at_secs,
            is_restart=ended_at is not None,
        )
        if ended_at is not None and not turn.new_command:
            self._way.down_secs = max(0.0, at_secs - ended_at)
        self._mark = at_secs

    def _follow(self, way: Recovery, event: Event, *, at_secs: float) -> None:
        """One more stretch of the way to the first step is behind the worker."""
        passed = at_secs - self._mark
        match event["kind"]:
            case "start":
                way.imports_secs = passed
            case "phase" if event["name"] == "restore":
                way.build_secs = passed
            case "phase" if event["name"] == "init":
                self._mark = at_secs  # Nothing was there to be restored.
                return
            case "phase" if event["name"] == "compile" and not way.restore_secs:
                way.build_secs += passed
            case "restore":
                way.verify_secs = float(event["verify_secs"])
                way.restore_secs = float(event["secs"]) - way.verify_secs
            case "compile":
                way.compile_secs += float(event["secs"])
                way.is_cached = bool(event["cached"])
            case "step":
                way.first_step_secs = passed
                self._finish(way, at_secs=at_secs)
                return
            case "phase":
                pass
            case _:
                return
        self._mark = at_secs

    def _finish(self, way: Recovery, *, at_secs: float) -> None:
        way.total_secs = at_secs - way.at_secs + way.down_secs
        way.other_secs = way.total_secs - sum(
            getattr(way, field.name)
            for field in dataclasses.fields(way)
            if field.name.endswith("_secs")
            and field.name not in ("at_secs", "total_secs", "other_secs")
        )
        self.recoveries.append(way)
        self._way = None

    def _take_save_start(self, event: Event) -> None:
        self.blocking.add(float(event["blocking_secs"]))

    def _take_save_commit(self, event: Event) -> None:
        num_bytes, num_linked = int(event["num_bytes"]), int(event["linked_bytes"])
        self.saves.add(float(event["secs"]))
        self.save_bytes += num_bytes
        self.linked_bytes += num_linked

    def _take_save_skipped(self, event: Event) -> None:
        del event
        self.num_skipped_saves += 1

    def _take_save_failed(self, event: Event) -> None:
        del event
        self.num_failed_saves += 1

    def _take_restore(self, event: Event) -> None:
        num_bytes = int(event["num_bytes"])
        self.restores.add(float(event["secs"]))
        self.restore_bytes += num_bytes
