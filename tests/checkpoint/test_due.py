"""When a save is due: alone by step and clock, of several by what all can know."""

import pytest

from jaxft import records
from jaxft.checkpoint import due, policies
from jaxft.config import ConfigError


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(text, *, num_processes=1, is_told=False):
    clock = Clock()
    saves = due.DueSaves(
        text,
        emit=records.ignore_event,
        known=None,
        timer=clock,
        num_processes=num_processes,
        is_told=is_told,
    )
    return saves, clock


def test_alone_steps_and_clock_both_count_once_a_border():
    saves, clock = make("steps(10) | secs(60)")
    assert [step for step in range(25) if saves.at(step, retry=False)] == [10, 20]
    assert not saves.at(20, retry=False)
    clock.now = 60.0
    assert saves.at(23, retry=False)
    saves.begun(23)
    assert not saves.at(24, retry=False)
    assert saves.at(25, retry=True)
    clock.now = 120.0
    saves.skipped()
    assert not saves.at(26, retry=False)


def test_of_several_only_steps_are_answered_and_the_clock_is_told():
    saves, clock = make("steps(10) | secs(60)", num_processes=2, is_told=True)
    clock.now = 60.0
    assert [s for s in range(5, 12) if saves.at(s, retry=False)] == [10]
    assert not saves.to_tell(12, retry=False, by_clock=False)
    assert saves.to_tell(12, retry=False, by_clock=True)
    # All hear of it two borders later, and then it begins.
    assert not saves.to_tell(13, retry=False, by_clock=True)
    saves.begun(14)
    assert not saves.to_tell(14, retry=False, by_clock=True)
    clock.now = 120.0
    assert saves.to_tell(15, retry=False, by_clock=True)


def test_any_process_tells_of_another_try():
    saves, _ = make("steps(10)", num_processes=2, is_told=True)
    assert saves.to_tell(3, retry=True, by_clock=False)
    assert not saves.to_tell(4, retry=True, by_clock=False)
    assert saves.to_tell(5, retry=True, by_clock=False)


def test_what_nobody_tells_is_refused():
    with pytest.raises(ConfigError, match="clock"):
        make("secs(60)", num_processes=2)
    make("secs(60)", num_processes=1)


def test_a_policy_in_two_halves():
    by_step, by_clock = policies.split_by_clock(policies.parse_save("steps(4)"))
    assert by_step is not None
    assert by_clock is None
    by_step, by_clock = policies.split_by_clock(policies.parse_save("secs(4)"))
    assert by_step is None
    assert by_clock is not None
