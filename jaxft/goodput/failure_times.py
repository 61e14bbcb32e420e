"""When hosts fail: many random histories, the same ones for every policy.

World: host-only. Floor: goodput. Read `jaxft/goodput/simulator.py` next.

A job fails when any of its hosts does. Of a Weibull distribution with a shape below 1 a
host fails most often when it is new, which after a repair it is again; a shape of 1 is
the exponential distribution, where age means nothing.
"""

from __future__ import annotations

import math

import numpy as np

# Beyond that a job does nothing but fail, and the histories fill the memory.
MAX_FAILURES = 2_000_000


def draw_failures(
    *,
    host_mtbf_secs: float,
    horizon_secs: float,
    num_hosts: int = 1,
    shape: float = 1.0,
    num_seeds: int = 200,
    seed: int = 0,
) -> np.ndarray:
    """Times of the failures of a job, a row for each history.

    Args:
        host_mtbf_secs: mean time between the failures of one host.
        horizon_secs: how far a history goes.
        num_hosts: of the job, all new at its start.
        shape: of the Weibull distribution of the time between them.
        num_seeds: how many histories.
        seed: of all of them; history i is the same however many there are.

    Returns:
        [num_seeds, most failures + 1] seconds from the start, ascending, float64; the
        end of each row is filled with inf.

    Raises:
        ValueError: more than `MAX_FAILURES` are to be expected in all of them.
    """
    expected = num_seeds * num_hosts * horizon_secs / host_mtbf_secs
    if expected > MAX_FAILURES:
        raise ValueError(
            f"{expected:.2g} failures are too many to draw: choose a shorter time or "
            "fewer seeds"
        )
    rows = []
    for number in range(num_seeds):
        rng = np.random.default_rng([seed, number])
        if shape == 1.0:
            # Hosts without memory are one host that fails as often as all of them.
            rows.append(
                _renewals(rng, host_mtbf_secs / num_hosts, 1.0, 1, horizon_secs)
            )
        else:
            rows.append(_renewals(rng, host_mtbf_secs, shape, num_hosts, horizon_secs))
    times = np.full((num_seeds, max(map(len, rows)) + 1), np.inf)
    for row, found in zip(times, rows, strict=True):
        row[: len(found)] = found
    return times


def _renewals(
    rng: np.random.Generator,
    mean_secs: float,
    shape: float,
    num_hosts: int,
    horizon_secs: float,
) -> np.ndarray:
    """Failures of some hosts in one history, sorted."""
    scale = mean_secs / math.gamma(1 + 1 / shape)
    usual = horizon_secs / mean_secs
    num_gaps = int(usual + 6 * math.sqrt(usual) + 8)
    last = np.zeros(num_hosts)
    parts = []
    while (alive := last < horizon_secs).any():
        gaps = scale * rng.weibull(shape, (int(alive.sum()), num_gaps))
        times = last[alive, None] + np.cumsum(gaps, axis=1)
        parts.append(times[times < horizon_secs])
        last[alive] = times[:, -1]
    return np.sort(np.concatenate(parts))
