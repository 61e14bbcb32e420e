"""Daly's optimum and the failure rate, against what is true without them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft import intervals
from jaxft.intervals import Experience, SaveCost

_times = st.floats(1e-3, 1e7)


@pytest.mark.parametrize(
    ("cost_secs", "mtbf_secs"), [(0.01, 30), (1, 30), (5, 3600), (60, 11_000), (10, 60)]
)
def test_the_optimum_is_where_the_goodput_is_highest(cost_secs, mtbf_secs):
    """Against a search over a fine grid; the estimate is an expansion."""
    works = np.geomspace(cost_secs / 100, 10 * mtbf_secs, 20_000)
    reached = intervals.goodput(
        works, cost_secs=cost_secs, mtbf_secs=mtbf_secs, restart_secs=5.0
    )
    secs = intervals.optimal_secs(cost_secs, mtbf_secs)
    own = intervals.goodput(
        secs, cost_secs=cost_secs, mtbf_secs=mtbf_secs, restart_secs=5.0
    )
    assert own > reached.max() * (1 - 1e-3)
    assert 0.9 < secs / works[reached.argmax()] < 1.1


def test_rare_failures_give_the_first_order_estimate():
    assert intervals.optimal_secs(1.0, 1e6) == pytest.approx(np.sqrt(2e6), rel=1e-3)


def test_where_a_save_takes_longer_than_luck_lasts():
    assert intervals.optimal_secs(100.0, 50.0) == 50.0
    both = intervals.optimal_secs(np.array([1.0, 100.0]), np.array([1e6, 50.0]))
    assert both == pytest.approx([1413.5, 50.0], rel=1e-3)


def test_a_period_that_never_ends_has_no_goodput():
    share = intervals.goodput(1e9, cost_secs=1.0, mtbf_secs=1.0, restart_secs=1.0)
    assert share == 0.0


@given(_times, st.floats(0, 1e3), st.floats(0, 5), _times)
def test_a_plan_is_never_shorter_than_a_save(blocking, write, slowdown, mtbf):
    cost = SaveCost(blocking_secs=blocking, write_secs=write, slowdown=slowdown)
    assert intervals.plan_secs(cost, mtbf) >= write
    assert 0 <= cost.slow_secs <= write
    assert np.isfinite(intervals.plan_secs(cost, mtbf))


def test_without_any_experience_the_rate_is_the_expected_one():
    rate = intervals.failure_rate(86_400, num_failures=0, secs=0.0)
    assert 1 / rate == pytest.approx(86_400)


@pytest.mark.parametrize("mtbf_secs", [30.0, 600.0, 1e6])
def test_a_wrong_guess_is_soon_outweighed(mtbf_secs):
    """A guess that is wrong by a factor of up to thousands, after ten failures."""
    rate = intervals.failure_rate(86_400, num_failures=10, secs=10 * mtbf_secs)
    assert 0.7 < 1 / rate / mtbf_secs < 1.4
    rate = intervals.failure_rate(86_400, num_failures=500, secs=500 * mtbf_secs)
    assert 1 / rate == pytest.approx(mtbf_secs, rel=0.01)


@given(st.floats(1, 1e7), st.integers(0, 10_000), st.floats(0, 1e9))
def test_failures_make_it_higher_and_quiet_time_lower(expected, num, secs):
    rate = intervals.failure_rate(expected, num_failures=num, secs=secs)
    assert 0 < rate < np.inf
    assert intervals.failure_rate(expected, num_failures=num + 1, secs=secs) > rate
    assert (
        intervals.failure_rate(expected, num_failures=num, secs=secs + expected) < rate
    )


def test_quiet_time_is_learnt_from_too():
    day = 86_400.0
    rates = intervals.failure_rate(
        day, num_failures=np.zeros(3), secs=day * np.array([0.0, 10.0, 1000.0])
    )
    assert rates.shape == (3,)
    assert rates[0] / 40 < rates[1] < rates[0] / 5
    assert rates[2] < rates[0] / 100
    # And not before it means anything: an hour of an expected day.
    early = intervals.failure_rate(day, num_failures=0, secs=3600.0)
    assert early > 0.6 * rates[0]


@pytest.mark.parametrize("hours", [0.0, -1.0, float("inf"), float("nan")])
def test_no_time_between_failures_is_refused(hours):
    with pytest.raises(ValueError, match="expected_hours must be a positive number"):
        Experience(expected_hours=hours)
