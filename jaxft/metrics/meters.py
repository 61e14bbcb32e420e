"""Adds up steps between two step events: rates, waits, guarded steps.

World: host-only. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/metrics/writers.py` next.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(kw_only=True)
class StepMeter:
    """Collects finished steps and gives out one record for many.

    The first step is given out at once: it proves that the run moves.

    Args:
        min_secs: a later record covers at least this much time, unless it is forced.
        clock: monotonic seconds.
    """

    min_secs: float
    clock: Callable[[], float] = time.monotonic
    _first_step: int = -1
    _started: float = 0.0
    _data_secs: float = 0.0
    _num_skipped: int = 0
    _last: dict[str, Any] | None = None
    _is_first: bool = True

    def start(self) -> None:
        """Time from here on belongs to the next step."""
        self._started = self.clock()

    def observe(
        self, step: int, metrics: Mapping[str, float], *, finite: bool, data_secs: float
    ) -> None:
        """One step is finished; `step` counts it."""
        if self._last is None:
            self._first_step = step
        self._data_secs += data_secs
        self._num_skipped += not finite
        self._last = {"step": step, "metrics": dict(metrics)}

    def take(self, *, force: bool = False) -> dict[str, Any] | None:
        """Fields of a `step` event when one is due, else None."""
        if self._last is None:
            return None
        now = self.clock()
        secs = now - self._started
        if secs < self.min_secs and not force and not self._is_first:
            return None
        self._is_first = False
        record = self._last | {
            "first_step": self._first_step,
            "secs": secs,
            "data_secs": self._data_secs,
            "num_skipped": self._num_skipped,
        }
        self._last, self._started = None, now
        self._data_secs, self._num_skipped = 0.0, 0
        return record


def steps_per_sec(record: Mapping[str, Any]) -> float:
    """Rate over a `step` event."""
    num_steps = record["step"] - record["first_step"] + 1
    return num_steps / record["secs"] if record["secs"] > 0 else 0.0
