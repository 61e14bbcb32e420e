"""The host's rule on losses that are finite, and far too high for several steps.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/faults/nonfinite.py` before this file and `jaxft/faults/rollback.py` after it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
from typing import Any

from jaxft.faults.nonfinite import BadStepsError
from jaxft.records import Fault, FaultKind

# A loss that hardly moves has hardly a deviation: less than this share of the median
# is no spike, whatever the factor.
_MIN_DEVIATION = 0.01


@dataclasses.dataclass(kw_only=True)
class SpikeRule:
    """Compares each loss with the median and the deviation of those before it.

    The deviation is the median of the distances from the median: a few high losses
    move neither. A high loss does not enter what the next ones are compared with. The
    window begins empty, goes into each checkpoint and comes back with it (without the
    loss of the very step, which is read only later), and says nothing before a quarter
    of it is full.

    Args:
        factor: high is above median + factor * deviation.
        window: losses that are compared with.
        num_steps: high ones in a row that are a spike.
    """

    factor: float
    window: int
    num_steps: int
    _losses: collections.deque[tuple[int, float]] = dataclasses.field(
        default_factory=collections.deque
    )
    _num_high: int = 0

    def observe(self, step: int, loss: float) -> None:
        """The loss of one finished step; one that is not finite is not ours.

        Raises:
            BadStepsError: of kind SPIKE.
        """
        if not math.isfinite(loss):
            return
        limit = self._limit()
        if loss <= limit:
            self._num_high = 0
            self._losses.append((step, loss))
            if len(self._losses) > self.window:
                self._losses.popleft()
            return
        self._num_high += 1
        if self._num_high >= self.num_steps:
            first = step - self._num_high + 1
            usual = statistics.median(loss for _, loss in self._losses)
            text = (
                f"loss above {limit:.4g} in steps {first} to {step}, {loss:.4g} in the "
                f"last; its median before was {usual:.4g}"
            )
            fault = Fault(kind=FaultKind.SPIKE, step=step, evidence=text)
            raise BadStepsError(fault, first_step=first)

    def get_state(self) -> list[list[float]]:
        """The window as JSON: pairs of step and loss."""
        return [[step, loss] for step, loss in self._losses]

    def set_state(self, pairs: Any) -> None:
        """Goes on from what a checkpoint holds; empty where it holds no window."""
        self._num_high = 0
        self._losses.clear()
        with contextlib.suppress(TypeError, ValueError):
            self._losses.extend((int(step), float(loss)) for step, loss in pairs)

    def _limit(self) -> float:
        if len(self._losses) < max(4, self.window // 4):
            return math.inf
        losses = [loss for _, loss in self._losses]
        median = statistics.median(losses)
        deviation = statistics.median(abs(loss - median) for loss in losses)
        return median + self.factor * max(deviation, _MIN_DEVIATION * abs(median))
