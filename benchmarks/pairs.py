"""What the benchmarks have in common: the ratio of pairs, and how sure it is."""

from __future__ import annotations

import numpy as np


def ratio(
    secs: np.ndarray, base: np.ndarray, *, seed: int = 0
) -> tuple[float, float, float]:
    """Median of the paired ratios, and its 95 % bootstrap interval.

    Args:
        secs: what one variant took in each round, [num_rounds].
        base: the same of the other.
        seed: of the draws.
    """
    ratios = secs / base
    draws = np.random.default_rng(seed).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)
