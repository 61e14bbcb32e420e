"""What to do with the time that a request to stop leaves: save, wait, or leave.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/faults/preemption.py`, which says how much time is left, before this file and
`Loop._leave` in `jaxft/loop.py`, which acts on the answer, after it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Saves get faster and slower with the disk's other users: older ones say little.
NUM_REMEMBERED = 5


class StopAction(enum.StrEnum):
    """What a stop does next."""

    SAVE = "save"
    WAIT = "wait"
    LEAVE = "leave"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopQuestion:
    """What is known at a border where the run is to stop.

    Attributes:
        left_secs: time left for work; infinity where nobody set a limit.
        is_committed: whether the state of this border is on disk already.
        in_flight_secs: age of the save in flight; None when there is none.
        save_secs: how long the last saves took, from call to commit; empty before
            any was measured.
    """

    left_secs: float
    is_committed: bool
    in_flight_secs: float | None
    save_secs: Sequence[float] = ()


def plan_stop(question: StopQuestion) -> StopAction:
    """The next act; asked again after each.

    A save in flight is given up only if not even the fastest of the last ones would
    end in time: it costs nothing but the wait. A new one is begun only if the median
    of them would: what overruns is cut off, and the grace time was for nothing. As
    long as none was measured, both are tried: the deadline holds in any case.
    """
    if question.is_committed or question.left_secs <= 0:
        return StopAction.LEAVE
    known = question.save_secs
    if question.in_flight_secs is not None:
        fits = not known or min(known) - question.in_flight_secs <= question.left_secs
        return StopAction.WAIT if fits else StopAction.LEAVE
    fits = not known or statistics.median(known) <= question.left_secs
    return StopAction.SAVE if fits else StopAction.LEAVE


class SaveTimes:
    """How long saves take, from the events that tell of them.

    Args:
        timer: seconds that never go back.
    """

    def __init__(self, *, timer: Callable[[], float] = time.monotonic):
        self._timer = timer
        self._lock = threading.Lock()
        self._started: tuple[int, float] = (-1, 0.0)
        self._last: collections.deque[float] = collections.deque(maxlen=NUM_REMEMBERED)

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes in an event of any kind; safe to be called from any thread."""
        with self._lock:
            if kind == "save_start":
                began = self._timer() - fields["blocking_secs"]
                self._started = fields["step"], began
            elif kind == "save_commit":
                step, began = self._started
                measured = fields["secs"]
                if step == fields["step"]:  # What the loop waited for counts as well.
                    measured = max(measured, self._timer() - began)
                self._last.append(measured)

    def age_secs(self, step: int) -> float:
        """Time since the save of `step` was asked for; 0 if it was not the last."""
        with self._lock:
            latest, began = self._started
            return self._timer() - began if latest == step else 0.0

    def last_secs(self) -> tuple[float, ...]:
        """The last saves that were committed, oldest first."""
        with self._lock:
            return tuple(self._last)
