"""The simulation against a closed form, a simpler simulation and a known run."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft import intervals
from jaxft.goodput import simulator
from jaxft.goodput.failure_times import draw_failures
from jaxft.goodput.simulator import AutoSecs, Costs, Earliest, EverySecs, EverySteps
from jaxft.intervals import SaveCost

HOUR = 3600.0


def _simulate(plan, costs, *, mtbf, horizon, num_seeds=100, seed=0, **more):
    failures = draw_failures(
        host_mtbf_secs=mtbf,
        horizon_secs=horizon,
        num_seeds=num_seeds,
        seed=seed,
        **more,
    )
    return simulator.simulate(plan, costs, failures=failures, horizon_secs=horizon)


@pytest.mark.parametrize(
    ("blocking", "mtbf", "restart", "every"),
    [(5.0, 600.0, 30.0, 60.0), (1.0, 100.0, 20.0, 10.0), (10.0, 3600.0, 300.0, 900.0)],
)
def test_saves_that_only_block_are_dalys_closed_form(blocking, mtbf, restart, every):
    costs = Costs(
        step_secs=1e-3, save=SaveCost(blocking_secs=blocking), restart_secs=restart
    )
    horizon = 300 * mtbf
    found = _simulate(EverySecs(every), costs, mtbf=mtbf, horizon=horizon)
    expected = intervals.goodput(
        every, cost_secs=blocking, mtbf_secs=mtbf, restart_secs=restart
    )
    error = 4 * found.goodput.std() / math.sqrt(len(found.goodput))
    assert found.goodput.mean() == pytest.approx(expected, abs=error + 1e-3)
    assert error < 0.03


def _brute_force(rng, *, step, every, save, restart, mtbf, horizon):
    """One history, step by step, with nothing in common but the rules."""
    now, safe, done, commit, last = 0.0, 0, 0, None, 0.0
    fail = rng.expovariate(1 / mtbf)

    def wait(secs):  # False when a failure comes first.
        nonlocal now, fail
        if now + secs < fail:
            now += secs
            return True
        now, fail = fail, fail + rng.expovariate(1 / mtbf)
        return False

    while now < horizon:
        while not wait(restart):
            pass
        done, commit, last = safe, None, now
        while now < horizon:
            if now - last >= every and commit is None:
                if not wait(save.blocking_secs):
                    break
                commit, last = (now + save.write_secs, done), now
            if not wait(step * (1 + save.slowdown * (commit is not None))):
                if commit is not None and commit[0] <= now:
                    safe = commit[1]
                break
            done += 1
            if commit is not None and commit[0] <= now:
                safe, commit = commit[1], None
    return done * step / now


def test_a_write_in_the_background_is_as_the_brute_force_says():
    save = SaveCost(blocking_secs=0.4, write_secs=6.0, slowdown=0.5)
    given = {"step": 0.5, "every": 15.0, "restart": 10.0, "mtbf": 90.0}
    rng = random.Random(3)
    brute = [_brute_force(rng, save=save, horizon=4000.0, **given) for _ in range(200)]
    costs = Costs(step_secs=0.5, save=save, restart_secs=10.0)
    found = _simulate(
        EverySecs(15.0), costs, mtbf=90.0, horizon=4000.0, num_seeds=400
    ).goodput
    error = 4 * math.hypot(np.std(brute) / 200**0.5, found.std() / 400**0.5)
    assert found.mean() == pytest.approx(np.mean(brute), abs=error)
    assert error < 0.025
    # As wide as luck makes it, too.
    assert found.std() == pytest.approx(np.std(brute), rel=0.25)


def test_a_run_of_sixteen_thousand_accelerators():
    """54 days, 419 unexpected interruptions, over 90 % effective training time.

    The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4: figures of a job of
    16,384 accelerators, eight a host. What a save and a restart took is not told
    there: seconds and minutes.
    """
    num_hosts, days, num_interruptions = 16_384 // 8, 54, 419
    horizon = days * 24 * HOUR
    mtbf = horizon / num_interruptions * num_hosts
    cost = SaveCost(blocking_secs=3.0, write_secs=60.0, slowdown=0.02)
    plan = AutoSecs(24 * HOUR, cost)

    def run(restart_secs, plan=plan):
        costs = Costs(step_secs=5.0, save=cost, restart_secs=restart_secs)
        more = {"num_hosts": num_hosts, "num_seeds": 40}
        return _simulate(plan, costs, mtbf=mtbf, horizon=horizon, **more)

    found = run(8 * 60.0)
    assert found.num_failures.mean() == pytest.approx(419, abs=4 * 419**0.5 / 40**0.5)
    assert 0.90 < found.quantiles()[0] < found.quantiles()[2] < 0.96
    # Neither slow restarts nor rare saves would do.
    assert run(30 * 60.0).quantiles()[2] < 0.90
    assert run(8 * 60.0, EverySecs(2 * HOUR)).quantiles()[2] < 0.75


def test_hosts_without_memory_are_one_that_fails_as_often():
    costs = Costs(step_secs=1.0, save=SaveCost(blocking_secs=2.0), restart_secs=30.0)
    plan = EverySecs(60.0)
    one = _simulate(plan, costs, mtbf=HOUR, horizon=200 * HOUR)
    many = _simulate(plan, costs, mtbf=64 * HOUR, horizon=200 * HOUR, num_hosts=64)
    assert many.goodput.mean() == pytest.approx(one.goodput.mean(), abs=0.01)


def test_weibull_hosts_fail_early_and_keep_the_mean():
    given = {"host_mtbf_secs": 100 * HOUR, "num_hosts": 50, "num_seeds": 50}
    young = draw_failures(horizon_secs=20 * HOUR, shape=0.6, **given)
    plain = draw_failures(horizon_secs=20 * HOUR, shape=1.0, **given)
    assert np.isfinite(young).sum() > 1.5 * np.isfinite(plain).sum()
    old = draw_failures(horizon_secs=3000 * HOUR, shape=0.6, **given)
    assert np.isfinite(old).sum() / 50 == pytest.approx(50 * 30, rel=0.1)
    for row in young:
        assert np.all(np.diff(row[np.isfinite(row)]) >= 0)


def test_histories_do_not_depend_on_how_many_there_are():
    given = {"host_mtbf_secs": 50.0, "horizon_secs": 1000.0, "seed": 5}
    few, many = draw_failures(num_seeds=2, **given), draw_failures(num_seeds=9, **given)
    length = min(few.shape[1], many.shape[1])
    np.testing.assert_array_equal(few[:, :length], many[:2, :length])
    with pytest.raises(ValueError, match="too many"):
        draw_failures(host_mtbf_secs=1e-3, horizon_secs=1e7)


@settings(max_examples=60, deadline=None)
@given(
    step=st.floats(0.01, 20),
    blocking=st.floats(0, 30),
    write=st.floats(0, 200),
    slowdown=st.floats(0, 3),
    restart=st.floats(0, 500),
    mtbf=st.floats(30, 1e5),
    plan=st.sampled_from(["secs", "steps", "auto", "both"]),
    seed=st.integers(0, 1000),
)
def test_every_second_has_one_cause(
    step, blocking, write, slowdown, restart, mtbf, plan, seed
):
    save = SaveCost(blocking_secs=blocking, write_secs=write, slowdown=slowdown)
    plans = {
        "secs": EverySecs(37.0),
        "steps": EverySteps(13),
        "auto": AutoSecs(HOUR, save),
        "both": Earliest((AutoSecs(HOUR, save), EverySteps(100))),
    }
    costs = Costs(step_secs=step, save=save, restart_secs=restart)
    found = _simulate(
        plans[plan], costs, mtbf=mtbf, horizon=5000.0, num_seeds=5, seed=seed
    )
    parts = [found.work_secs, found.lost_secs, found.save_secs, found.restart_secs]
    np.testing.assert_allclose(np.sum(parts, axis=0), 5000.0, rtol=1e-9)
    assert min(part.min() for part in parts) >= -1e-6
    # No save begins before the one before it is over.
    busy = found.num_saves * (blocking + write - save.slow_secs) - write
    assert np.all(busy <= 5000.0 + 1e-6)


def test_what_no_failure_touches_is_reckoned_exactly():
    """100 s of start, then 10 steps of 1 s, 2 s blocking, 3 s at half the pace."""
    save = SaveCost(blocking_secs=2.0, write_secs=3.0, slowdown=1.0)
    costs = Costs(step_secs=1.0, save=save, restart_secs=100.0)
    never = np.full((1, 1), np.inf)
    for plan in (EverySteps(10), EverySecs(11.5)):
        found = simulator.simulate(plan, costs, failures=never, horizon_secs=1000.0)
        assert found.restart_secs[0] == 100.0
        assert found.lost_secs[0] == 0.0
        # The first save 12 s after the start, the next ones every 13.5 s: 66 of them.
        assert found.num_saves[0] == 66
        assert found.save_secs[0] == pytest.approx(66 * 2 + 66 * 1.5)


def test_a_save_that_comes_due_during_one_is_skipped():
    save = SaveCost(blocking_secs=0.0, write_secs=25.0)
    costs = Costs(step_secs=1.0, save=save, restart_secs=0.0)
    never = np.full((1, 1), np.inf)
    for plan, every in (
        (EverySteps(10), 30),
        (EverySecs(4.0), 28),
        (EverySteps(25), 25),
    ):
        found = simulator.simulate(plan, costs, failures=never, horizon_secs=3000.0)
        assert found.every_secs[0] == every


@pytest.mark.parametrize("mtbf", [30.0, 600.0, 24 * HOUR])
def test_auto_is_as_good_as_the_best_fixed_interval(mtbf):
    """A sample of benchmarks/interval.py, with a guess that is right."""
    save = SaveCost(blocking_secs=0.05, write_secs=0.5, slowdown=0.3)
    costs = Costs(step_secs=0.07, save=save, restart_secs=6.0)
    given = {"mtbf": mtbf, "horizon": 300 * mtbf, "num_seeds": 40}
    auto = _simulate(AutoSecs(mtbf, save), costs, **given).goodput.mean()
    best = max(
        _simulate(EverySecs(every), costs, **given).goodput.mean()
        for every in np.geomspace(0.5, 2000, 15)
    )
    assert auto > 0.99 * best
