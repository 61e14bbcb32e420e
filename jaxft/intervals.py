"""How long to wait between saves: Daly's optimum, and a failure rate that learns.

World: host-only. Floor: the lowest, beside `fingerprints`: managers in anybody's loop
and the simulator use the same arithmetic. Read `jaxft/save_costs.py` next, which
measures what goes in, and `jaxft/checkpoint/auto_interval.py`, which acts on it.

All functions take numbers or arrays of one shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

# Above this share of the time for saves a person is told.
COSTLY_OVERHEAD = 0.01
# The expected time between failures is a guess, wrong by a factor of five either way
# in one standard deviation. Two scales a decade, seven deviations.
_DECADES = np.arange(-10, 11) / 2
_WEIGHTS = np.exp(-((_DECADES / 0.7) ** 2) / 2)

Number = Any  # float or array


def optimal_secs(cost_secs: Number, mtbf_secs: Number) -> Number:
    """Work between two saves that makes a run end first, in seconds.

    The higher-order estimate of J. T. Daly, A higher order estimate of the optimum
    checkpoint interval for restart dumps, Future Generation Computer Systems 22 (2006)
    303-312, equation 37. The time of a restart is not in it: what a failure costs
    whatever the interval is does not move the optimum.

    Args:
        cost_secs: what a save takes from the work.
        mtbf_secs: mean time between failures.
    """
    cost, mtbf = np.asarray(cost_secs, float), np.asarray(mtbf_secs, float)
    ratio = np.sqrt(cost / (2 * mtbf))
    estimate = np.sqrt(2 * cost * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - cost
    return np.where(cost < 2 * mtbf, estimate, mtbf)


def goodput(
    work_secs: Number, *, cost_secs: Number, mtbf_secs: Number, restart_secs: Number
) -> Number:
    """Share of the time that is lasting work, with failures of a constant rate.

    Equation 20 of the same paper, as a share: a period of work and save is repeated
    until no failure falls into it, a restart as well.

    Args:
        work_secs: work between two saves.
        cost_secs: what a save takes from the work.
        mtbf_secs: mean time between failures.
        restart_secs: from a failure until the work goes on.
    """
    mtbf = np.asarray(mtbf_secs, float)
    work_secs = np.maximum(work_secs, 1e-9)  # Where a save is free it may be none.
    # A period or restart far beyond the time between failures never ends.
    with np.errstate(over="ignore"):
        period = np.expm1((work_secs + cost_secs) / mtbf)
        return work_secs / (mtbf * np.exp(np.asarray(restart_secs) / mtbf) * period)


def failure_rate(
    expected_secs: float, *, num_failures: Number, secs: Number
) -> np.ndarray:
    """Failures a second, from what was expected and what was seen.

    The prior is a mixture of Gamma distributions of shape 1 over many scales: one
    Gamma alone would outweigh a hundred failures within a few minutes by the day that
    it stands for. The posterior is again such a mixture. Its mean is taken of the
    logarithm: what a wrong interval costs goes by its ratio to the best one, and the
    mean itself would be that of the few rates that a quiet hour rules out.

    Args:
        expected_secs: between failures, before any was seen.
        num_failures: that were seen.
        secs: for how long somebody looked.
    """
    # Of its scales the prior's mean logarithm is that of the rate expected.
    scales = expected_secs * 10.0**_DECADES * np.exp(_digamma(np.ones(1)))
    num = np.asarray(num_failures, float)[..., None]
    seen = scales + np.asarray(secs, float)[..., None]
    # Of a scale s: weight s / (s + secs)^(1 + num), then Gamma(1 + num, s + secs).
    logs = np.log(_WEIGHTS) + np.log(scales) - (1 + num) * np.log(seen)
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    means = _digamma(1 + num) - np.log(seen)
    return np.exp(np.sum(shares * means, axis=-1) / np.sum(shares, axis=-1))


def _digamma(x: np.ndarray) -> np.ndarray:
    """The derivative of log Gamma, for x of at least 1, within 0.002."""
    return np.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one save costs.

    Attributes:
        blocking_secs: the loop waits for it.
        write_secs: it goes on in the background, from there to its commit.
        slowdown: how much longer a step takes meanwhile; 0.2 is a fifth.
    """

    blocking_secs: float
    write_secs: float = 0.0
    slowdown: float = 0.0

    @property
    def slow_secs(self) -> float:
        """Work that the slow-down takes."""
        return self.write_secs * self.slowdown / (1 + self.slowdown)

    @property
    def lost_secs(self) -> float:
        """Work that a save takes, all in all."""
        return self.blocking_secs + self.slow_secs


def plan_secs(cost: SaveCost, mtbf_secs: Number) -> Number:
    """Seconds from the end of one save's blocking to the begin of the next one.

    Never shorter than a save takes, and whatever share of the time that costs: longer
    would cost more.
    """
    work_secs = optimal_secs(cost.lost_secs, mtbf_secs)
    return np.maximum(work_secs + cost.slow_secs, cost.write_secs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
    """What is known of failures and saves before a run measures anything itself.

    Attributes:
        expected_hours: between failures, positive; a guess, see `failure_rate`.
        num_failures: that were seen earlier.
        secs: for how long the run was looked at then.
        restart_secs: mean time from a failure until the work went on; 0.0 for unknown.
        cost: of a save; None for unknown.

    Raises:
        ValueError: the expected hours are none.
    """

    expected_hours: float = 24.0
    num_failures: int = 0
    secs: float = 0.0
    restart_secs: float = 0.0
    cost: SaveCost | None = None

    def __post_init__(self) -> None:
        if not 0 < self.expected_hours < np.inf:
            problem = f"must be a positive number, is {self.expected_hours!r}"
            raise ValueError(f"expected_hours {problem}")
