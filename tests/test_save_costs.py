"""What a save costs, from a loop whose every second is made up."""

import pytest

from jaxft.intervals import SaveCost
from jaxft.save_costs import SaveCosts


def _run(costs, *, step=1.0, blocking=0.4, write=5.0, slowdown=0.25, num_saves=3):
    """A loop that saves every 20 steps, with the times that these figures mean."""
    for _ in range(num_saves):
        for _ in range(20):
            costs.stretch(step, num_steps=1)
        costs.begin(blocking)
        left, secs = write, blocking
        while left > 0:
            # A step is slower as long as the write goes on.
            slow = min(step * (1 + slowdown), left)
            done = slow / (1 + slowdown)
            left -= slow
            if left <= 0:
                costs.commit(write)
            costs.stretch(secs + slow + (step - done), num_steps=1)
            secs = 0.0


def test_blocking_and_slowdown_are_told_apart():
    costs = SaveCosts()
    assert costs.cost() is None
    assert costs.step_secs == 0.0
    _run(costs)
    cost = costs.cost()
    assert costs.step_secs == pytest.approx(1.0)
    assert cost.blocking_secs == pytest.approx(0.4)
    assert cost.write_secs == pytest.approx(5.0)
    assert cost.slowdown == pytest.approx(0.25)
    assert cost.lost_secs == pytest.approx(0.4 + 5 * 0.25 / 1.25)


def test_a_write_that_slows_nothing_costs_its_call_alone():
    costs = SaveCosts()
    _run(costs, slowdown=0.0)
    assert costs.cost().lost_secs == pytest.approx(0.4)


def test_a_call_that_waits_for_the_step_before_it_takes_nothing_for_that():
    """The step in flight is over when the call is, so the next gap is short."""
    costs = SaveCosts()
    for _ in range(3):
        for _ in range(10):
            costs.stretch(1.0, num_steps=1)
        costs.begin(1.1)
        costs.commit(0.01)
        costs.stretch(1.1, num_steps=1)
    assert costs.cost().lost_secs == pytest.approx(0.1, rel=0.11)


def test_the_first_save_counts_only_while_it_is_alone():
    costs = SaveCosts()
    _run(costs, blocking=30.0, num_saves=1)
    assert costs.cost().blocking_secs == pytest.approx(30.0)
    _run(costs, blocking=0.5, num_saves=2)
    assert costs.cost().blocking_secs == pytest.approx(0.5)
    assert costs.num_known == 3


def test_what_an_earlier_process_measured_is_better_than_a_first_save():
    costs = SaveCosts()
    known = SaveCost(blocking_secs=0.5, write_secs=4.0, slowdown=0.25)
    costs.remember(known)
    assert costs.cost() == known
    _run(costs, blocking=30.0, write=4.0, num_saves=1)
    assert costs.cost().lost_secs == pytest.approx(known.lost_secs)
    # What is new counts more and more.
    _run(costs, blocking=2.5, write=4.0, num_saves=4)
    assert costs.cost().blocking_secs == pytest.approx(1.5)
    _run(costs, blocking=2.5, write=4.0, num_saves=16)
    assert costs.cost().blocking_secs == pytest.approx(2.5)


def test_evaluations_and_stalls_are_no_steps():
    costs = SaveCosts()
    for _ in range(3):
        for _ in range(10):
            costs.stretch(1.0, num_steps=1)
        costs.stretch(60.0, num_steps=1)
        costs.begin(0.2)
        costs.stretch(1.2, num_steps=1)
        costs.stretch(61.0, num_steps=1)
        costs.commit(62.0)
        costs.stretch(1.0, num_steps=1)
    assert costs.step_secs == pytest.approx(1.0)
    assert costs.cost().lost_secs == pytest.approx(0.2)


def test_several_saves_in_one_stretch_share_what_it_took():
    """As the history has it: one line a second, and many steps in it."""
    costs = SaveCosts()
    for _ in range(3):
        costs.stretch(1.0, num_steps=10)
        for _ in range(2):
            costs.begin(0.05)
            costs.commit(0.2)
        costs.stretch(1.16, num_steps=10)
    assert costs.cost().lost_secs == pytest.approx(0.08)


def test_a_save_that_fails_teaches_nothing():
    costs = SaveCosts()
    _run(costs, num_saves=2)
    before = costs.cost()
    costs.begin(9.0)
    costs.stretch(9.0, num_steps=1)
    costs.give_up()
    costs.commit(1.0)
    costs.stretch(1.0, num_steps=1)
    assert costs.cost() == before


def test_where_saves_never_pause_they_are_still_counted():
    costs = SaveCosts()
    for _ in range(10):
        costs.stretch(1.0, num_steps=10)
    for number in range(40):
        if number:
            costs.commit(1.0)
        costs.begin(0.1)
        costs.stretch(1.1, num_steps=10)
    assert costs.num_known > 2
    assert costs.cost().lost_secs == pytest.approx(0.1, rel=0.2)
