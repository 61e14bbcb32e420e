"""What counts as a spike of the loss."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.faults.nonfinite import BadStepsError
from jaxft.faults.spikes import SpikeRule


def rule(**changes):
    return SpikeRule(**({"factor": 10.0, "window": 20, "num_steps": 3} | changes))


def noisy(num_steps, *, seed=0, level=2.0):
    return level + 0.05 * np.random.default_rng(seed).normal(size=num_steps)


def feed(one, losses, *, start=1):
    for step, loss in enumerate(losses, start):
        one.observe(step, float(loss))


def test_a_sustained_spike_is_seen_with_its_first_step():
    one = rule()
    feed(one, noisy(50))
    with pytest.raises(BadStepsError, match=r"in steps 51 to 53, 8 in the last") as bad:
        feed(one, [8.0] * 5, start=51)
    assert (bad.value.first_step, bad.value.last_step) == (51, 53)
    assert bad.value.fault.exit_code == 65


def test_a_short_one_is_none_and_moves_nothing():
    one = rule()
    feed(one, noisy(50))
    for start in (51, 54, 57):
        feed(one, [8.0, 8.0, 2.0], start=start)


@given(seed=st.integers(0, 50), slope=st.floats(-0.02, 0.005))
def test_noise_and_a_slow_slope_are_none(seed, slope):
    feed(rule(), noisy(200, seed=seed, level=5.0) + slope * np.arange(200))


def test_a_young_run_is_not_judged():
    feed(rule(), [2.0] * 2 + [9.0] * 20)
    with pytest.raises(BadStepsError):
        feed(rule(), [2.0] * 5 + [9.0] * 20)


def test_what_is_not_finite_is_for_another_rule():
    one = rule()
    feed(one, [*noisy(50), *[math.nan, math.inf] * 10])
    with pytest.raises(BadStepsError) as bad:
        feed(one, [8.0, math.nan, 8.0, 8.0], start=71)
    assert bad.value.last_step == 74


def test_a_constant_loss_has_some_room():
    one = rule()
    feed(one, [2.0] * 30)
    feed(one, [2.1] * 30, start=31)
    with pytest.raises(BadStepsError):
        feed(one, [2.5] * 3, start=61)


def test_it_goes_on_as_from_a_checkpoint():
    one, other = rule(), rule()
    losses = noisy(80)
    feed(one, losses[:40])
    saved = json.loads(json.dumps(one.get_state()))
    feed(one, [9.0, 9.0], start=41)
    other.set_state(saved)
    one.set_state(saved)
    for each in (one, other):
        feed(each, losses[40:60], start=41)
    assert one.get_state() == other.get_state()
    with pytest.raises(BadStepsError, match="in steps 61 to 63"):
        feed(other, [9.0] * 3, start=61)


@pytest.mark.parametrize("pairs", [None, 3, [[1]], [["a", "b"]], "text"])
def test_a_checkpoint_without_a_window_is_a_beginning(pairs):
    one = rule()
    feed(one, noisy(50))
    one.set_state(pairs)
    assert one.get_state() == []
