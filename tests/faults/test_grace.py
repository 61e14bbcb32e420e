"""What a stop does with its time, and how long saves are known to take."""

import itertools

import pytest

from jaxft.faults.grace import (
    NUM_REMEMBERED,
    SaveTimes,
    StopAction,
    StopQuestion,
    plan_stop,
)

SAVE, WAIT, LEAVE = StopAction.SAVE, StopAction.WAIT, StopAction.LEAVE


@pytest.mark.parametrize(
    ("left_secs", "flying_secs", "save_secs", "action"),
    [
        # Nothing is known: the deadline holds whatever is tried.
        (1.0, None, (), SAVE),
        (1.0, 50.0, (), WAIT),
        (0.0, None, (), LEAVE),
        (0.0, 1.0, (), LEAVE),
        (float("inf"), None, (900.0,), SAVE),
        # A new one goes by the median.
        (5.0, None, (4.0, 5.0, 90.0), SAVE),
        (5.0, None, (1.0, 5.1, 90.0), LEAVE),
        # One in flight goes by the fastest, and by its age.
        (5.0, 1.0, (6.0, 90.0, 90.0), WAIT),
        (5.0, 0.5, (6.0, 90.0, 90.0), LEAVE),
        (5.0, 300.0, (6.0, 90.0), WAIT),
    ],
)
def test_the_plan(left_secs, flying_secs, save_secs, action):
    question = StopQuestion(
        left_secs=left_secs,
        is_committed=False,
        in_flight_secs=flying_secs,
        save_secs=save_secs,
    )
    assert plan_stop(question) is action


def test_what_is_committed_is_never_saved_again():
    for left_secs, flying_secs in itertools.product((0.0, 1e9), (None, 0.0, 1e9)):
        question = StopQuestion(
            left_secs=left_secs, is_committed=True, in_flight_secs=flying_secs
        )
        assert plan_stop(question) is LEAVE


def test_more_time_is_never_worse():
    """From leave to act, as time grows, and never back."""
    for flying_secs, save_secs in itertools.product(
        (None, 0.0, 3.0), ((), (2.0,), (2.0, 8.0, 9.0))
    ):
        answers = [
            plan_stop(
                StopQuestion(
                    left_secs=left / 4,
                    is_committed=False,
                    in_flight_secs=flying_secs,
                    save_secs=save_secs,
                )
            )
            is not LEAVE
            for left in range(60)
        ]
        assert answers == sorted(answers)
        assert answers[-1]


def test_times_of_saves_come_from_the_events():
    now = [100.0]
    times = SaveTimes(timer=lambda: now[0])
    assert (times.last_secs(), times.age_secs(7)) == ((), 0.0)
    times.take("step", {"step": 7})
    # The loop waited for 2 s before the event, which is told when it goes on.
    times.take("save_start", {"step": 7, "blocking_secs": 2.0})
    now[0] = 103.0
    assert times.age_secs(7) == 5.0
    assert times.age_secs(8) == 0.0
    times.take("save_commit", {"step": 7, "secs": 3.5})
    assert times.last_secs() == (5.0,)
    # A failed one says nothing about how long they take.
    times.take("save_start", {"step": 9, "blocking_secs": 0.0})
    times.take("save_failed", {"step": 9, "reason": "full"})
    assert times.last_secs() == (5.0,)
    for step in range(10, 10 + 2 * NUM_REMEMBERED):
        times.take("save_start", {"step": step, "blocking_secs": 0.0})
        now[0] += step
        times.take("save_commit", {"step": step, "secs": 0.0})
    last = range(10 + NUM_REMEMBERED, 10 + 2 * NUM_REMEMBERED)
    assert times.last_secs() == tuple(map(float, last))
