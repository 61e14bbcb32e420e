"""The interval benchmark: what it compares, and that it needs a whole history."""

import pytest

from jaxft.goodput.simulator import Costs
from jaxft.intervals import SaveCost


@pytest.mark.parametrize(
    ("blocking", "write", "slowdown"),
    [
        (0.5, 5.0, 0.3),
        pytest.param(0.02, 0.3, 0.1, marks=pytest.mark.slow),
        pytest.param(5.0, 0.0, 0.0, marks=pytest.mark.slow),
    ],
)
def test_auto_is_at_most_a_percent_below_the_best_fixed(
    bench, blocking, write, slowdown
):
    """At the highest rate, where an estimate has it hardest."""
    cost = SaveCost(blocking_secs=blocking, write_secs=write, slowdown=slowdown)
    costs = Costs(step_secs=0.2, save=cost, restart_secs=5.0)
    row = bench.compare(costs, 30.0, num_seeds=20, seed=1, num_fixed=13)
    assert -0.001 < row["below"] < 0.01
    assert row["below"] < row["below_learnt"] < 0.03
    assert row["best_every_secs"] > 0.5


def test_a_history_without_a_restart_is_refused(bench, tmp_path):
    with pytest.raises(RuntimeError, match="lacks steps, saves or a restart"):
        bench.measure(tmp_path)
