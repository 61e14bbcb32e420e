"""The goodput benchmark: its prediction, reckoned by hand."""

import pytest

from jaxft.goodput.simulator import Costs, EverySecs
from jaxft.intervals import SaveCost


def test_a_kill_costs_a_restart_and_what_was_not_saved(bench):
    """Ten steps stay and half of one does not, 5 s of restart, 4.5 steps more."""
    costs = Costs(step_secs=1.0, save=SaveCost(blocking_secs=0.0), restart_secs=5.0)
    found, own, drawn = bench.predict(
        EverySecs(1.0), costs, kills=[10.5], secs=20.0, mean_secs=20.0
    )
    assert own == pytest.approx(14.5 / 20)
    assert found.lost_secs[0] == pytest.approx(0.5)
    assert found.restart_secs[0] == pytest.approx(10.0)
    assert len(drawn) == 200
    assert drawn.min() < own < drawn.max()


def test_steps_beside_a_save_count_as_long_as_they_took(bench):
    """Always writing at half the pace, without a kill: all of it is steps."""
    save = SaveCost(blocking_secs=0.0, write_secs=10.0, slowdown=1.0)
    costs = Costs(step_secs=1.0, save=save, restart_secs=0.0)
    _, own, _ = bench.predict(
        EverySecs(10.0), costs, kills=[], secs=1000.0, mean_secs=1e4
    )
    assert own == pytest.approx(1.0, abs=0.01)
