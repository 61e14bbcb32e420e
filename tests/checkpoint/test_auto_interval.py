"""The interval of `auto`, in a loop whose clock is made up."""

import itertools
import math
import pathlib

import jax.numpy as jnp
import pytest

from jaxft import records
from jaxft.checkpoint import auto_interval
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.intervals import Experience, SaveCost

DAY = 86_400.0


class _Loop:
    """Asks at each border and saves when it is told to, as a manager does."""

    def __init__(self, text="auto", *, known=None, blocking=0.5, write=3.0):
        self.events = []
        self.saves = []
        self.now, self.step, self.last = 1000.0, 0, 1000.0
        self._blocking, self._write = blocking, write
        self._commit_at = math.inf
        self.policy, self._emit = auto_interval.make_policy(
            text, emit=self._take, known=known
        )

    def _take(self, kind, /, **fields):
        self.events.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self.events if name == kind]

    def run(self, num_steps, *, step_secs=1.0):
        for _ in range(num_steps):
            if self.policy.should_save(
                records.SaveQuestion(
                    step=self.step,
                    now_secs=self.now,
                    last_step=self.saves[-1] if self.saves else -1,
                    last_secs=self.last,
                )
            ):
                self.save()
            self.now += step_secs
            self.step += 1
            if self.now >= self._commit_at:
                self._commit_at = math.inf
                self._emit("save_commit", step=self.saves[-1], secs=self._write)

    def save(self):
        assert math.isinf(self._commit_at), "one is in flight"
        self.saves.append(self.step)
        self._emit("save_start", step=self.step, blocking_secs=self._blocking)
        self.now += self._blocking
        self.last = self.now
        self._commit_at = self.now + self._write


def test_the_first_save_comes_soon_and_the_next_by_plan():
    loop = _Loop()
    loop.run(9)
    assert not loop.saves
    loop.run(30)
    assert loop.saves == [10]
    (plan,) = loop.of("interval")
    # Daly's first order: sqrt(2 * 0.5 * a day), and nobody has failed yet.
    assert plan["secs"] == pytest.approx(math.sqrt(DAY), rel=0.05)
    assert plan["earlier_secs"] == 0.0
    assert plan["blocking_secs"] == pytest.approx(0.5)
    assert plan["failure_hours"] == pytest.approx(24, rel=0.05)
    assert 0.99 < plan["goodput"] < 1
    loop.run(1000)
    assert loop.saves[1] - loop.saves[0] == pytest.approx(plan["secs"], abs=2)
    assert not loop.of("interval_costly")


def test_what_went_by_before_the_first_border_was_no_work():
    loop = _Loop()
    loop.now += 300.0  # It compiled.
    loop.run(15)
    assert loop.saves == [10]


def test_an_earlier_worker_has_measured():
    known = Experience(
        expected_hours=24.0,
        num_failures=10,
        secs=6000.0,
        restart_secs=20.0,
        cost=SaveCost(blocking_secs=2.0, write_secs=4.0),
    )
    loop = _Loop(known=known)
    loop.run(2)
    plan = loop.of("interval")[0]
    assert plan["num_saves"] == 0
    assert plan["restart_secs"] == 20.0
    assert plan["num_failures"] == 10
    assert plan["failure_hours"] * 3600 == pytest.approx(600, rel=0.3)
    assert plan["secs"] == pytest.approx(math.sqrt(2 * 2 * 600), rel=0.2)


def test_costs_that_grow_make_it_longer_and_small_changes_are_no_news():
    loop = _Loop()
    loop.run(4000)
    assert len(loop.of("interval")) < len(loop.saves) / 3
    short = loop.of("interval")[-1]["secs"]
    loop._blocking = 8.0
    loop.run(20_000)
    plans = loop.of("interval")
    assert len(plans) > 1
    assert plans[-1]["secs"] > 2 * short
    for earlier, later in itertools.pairwise(plans):
        assert later["earlier_secs"] == earlier["secs"]
        assert abs(later["secs"] / later["earlier_secs"] - 1) >= 0.1


def test_a_costly_interval_is_told_once_and_not_stretched():
    known = Experience(expected_hours=60 / 3600)
    loop = _Loop(known=known, blocking=2.0)
    loop.run(400)
    (told,) = loop.of("interval_costly")
    assert told["overhead"] > 0.05
    assert "failure is expected every" in told["reason"]
    assert told["secs"] < 40


def test_never_shorter_than_a_save_takes():
    known = Experience(expected_hours=30 / 3600)
    loop = _Loop(known=known, blocking=0.001, write=25.0)
    loop.run(400)
    assert loop.of("interval")[-1]["secs"] >= 25.0
    # And none comes due while one is in flight, however long that takes.
    loop._write = 200.0
    loop.run(1000)
    gaps = [b - a for a, b in itertools.pairwise(loop.saves)]
    assert min(gaps) >= 25
    assert max(gaps) >= 200


def test_a_save_that_fails_stops_no_later_ones():
    loop = _Loop(known=Experience(expected_hours=1.0))
    loop.run(15)
    assert loop.saves == [10]
    loop.run(60)
    loop.save()
    loop._commit_at = math.inf
    loop._emit("save_failed", step=loop.saves[-1], reason="the disk is full")
    loop.run(200)
    assert len(loop.saves) >= 3


def test_saves_that_cost_nothing_are_made_at_every_border():
    loop = _Loop(known=Experience(cost=SaveCost(blocking_secs=0.0)), write=0.5)
    loop._blocking = 0.0
    loop.run(40)
    assert loop.of("interval")[0]["secs"] == 0.0
    assert loop.of("interval")[0]["overhead"] == 0.0
    assert loop.saves[:3] == [0, 1, 2]


def test_other_policies_are_left_alone():
    def emit(kind, /, **fields):
        raise AssertionError

    policy, passed = auto_interval.make_policy("steps(4)", emit=emit)
    assert passed is emit
    assert type(policy).__name__ == "Steps"


def test_in_a_strangers_loop(tmp_path: pathlib.Path):
    """The manager alone: real saves, and a clock that runs a second a step."""
    now, events = [0.0], []
    manager = CheckpointManager(
        tmp_path,
        save="auto | steps(40)",
        keep="every(1)",
        emit=lambda kind, /, **fields: events.append(kind),
        timer=lambda: now[0],
    )
    with manager as saved:
        for step in range(1, 61):
            now[0] += 1.0
            saved.maybe_save(step, {"w": jnp.full(3, step, jnp.int32)})
            if saved.in_flight is not None:
                saved.wait()
    assert saved.steps()[0] == 11
    assert 40 in saved.steps()
    assert len(saved.steps()) == events.count("save_commit") < 30
    assert events.count("interval") >= 1
