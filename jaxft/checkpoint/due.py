"""When the next periodic save is due: the policy, and when the last one was.

World: host-only. Floor: checkpoint, above `auto_interval`. Read
`jaxft/checkpoint/policies.py` before and `jaxft/checkpoint/manager.py`, its one user,
after.

Several processes must answer alike. By the number of the step they do; clocks differ,
so of `secs` and `auto` only the primary process is asked, and it tells the others:
`jaxft/loop.py` by the control word.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxft import intervals, records
from jaxft.checkpoint import auto_interval, policies

# A border that was told of, and that all others hear of, is so many steps away.
_HEARD_STEPS = 2


class DueSaves:
    """Answers at every border whether a save is due.

    Args:
        text: the policy, see `policies.parse_save`.
        emit: the events of the run; use the attribute from here on.
        known: what `auto` goes by besides its own measurements.
        timer: seconds that never go back.
        num_processes: that ask at the same borders.
        is_told: whether the primary process tells the others what its clock says.

    Attributes:
        emit: where events are to go; `auto` listens.

    Raises:
        ConfigError: the policy cannot be used.
    """

    def __init__(
        self,
        text: str,
        *,
        emit: records.Emit,
        known: intervals.Experience | None,
        timer: Callable[[], float],
        num_processes: int,
        is_told: bool,
    ):
        policy, self.emit = auto_interval.make_policy(
            text,
            emit=emit,
            known=known,
            num_processes=1 if is_told else num_processes,
        )
        self._parts: tuple[records.SavePolicy | None, ...] = (policy, None)
        if num_processes > 1:
            self._parts = policies.split_by_clock(policy)
        self._timer = timer
        self._last_step = -1
        self._last_secs = timer()
        self._answered_step = -1
        self._told_step = -1 - _HEARD_STEPS

    def begun(self, step: int) -> None:
        """Step `step` is being saved, or was restored."""
        self._last_step, self._last_secs = step, self._timer()

    def skipped(self) -> None:
        """A save was not begun: not again at every border."""
        self._last_secs = self._timer()

    def at(self, step: int, *, retry: bool) -> bool:
        """Whether a save is due at this border; once a step at most.

        Args:
            step: of the border.
            retry: whether one is due in any case.
        """
        if step in (self._answered_step, self._last_step):
            return False
        if not retry and not self._asks(self._parts[0], step):
            return False
        self._answered_step = step
        return True

    def to_tell(self, step: int, *, retry: bool, by_clock: bool) -> bool:
        """Whether a border soon after this one is to save, for what is told to all.

        What it said is heard of two borders later; until then it says no.

        Args:
            step: of the border.
            retry: whether one is due in any case.
            by_clock: whether this process's clock counts.
        """
        is_due = (by_clock and self._asks(self._parts[1], step)) or retry
        if not is_due or step < self._told_step + _HEARD_STEPS:
            return False
        self._told_step = step
        return True

    def _asks(self, policy: records.SavePolicy | None, step: int) -> bool:
        if policy is None:
            return False
        question = records.SaveQuestion(
            step=step,
            now_secs=self._timer(),
            last_step=self._last_step,
            last_secs=self._last_secs,
        )
        return policy.should_save(question)
