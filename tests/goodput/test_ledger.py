"""Each second of a run belongs to one cause, and the right one."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxft.events import KINDS
from jaxft.goodput.account import Account, account_of
from jaxft.goodput.ledger import Cause


def whole(story: Any) -> Any:
    """One worker from its launch to its end: 100 steps in 10 s, a save, a break."""
    story.launch(0).begin()
    story.steps(1, 1, 0.5).steps(2, 50, 4.5, data=1.0)
    story.say("save_start", 1.0, step=50, blocking_secs=0.25, planning_secs=0)
    story.say(
        "save_commit", 1.0, step=50, secs=2.0, num_bytes=7, num_linked=0, linked_bytes=0
    )
    story.steps(51, 90, 0.0).events[-1][1].update(secs=2.0)
    story.phase("evaluate").say("evaluation", 3.0, step=90, metrics={}, secs=3.0)
    story.phase("train").steps(91, 100, 1.0).phase("save")
    story.say("end", 0.5, step=100, reason="finished")
    return story.exit(0, 0.125).decide("finish", "finished", "finished")


def test_a_run_without_a_fault(story: Any) -> None:
    told = whole(story())
    told.watch("supervisor_end", exit_code=0, reason="finished")
    assert told.secs() == {
        "init": 1.0 + 2.0,
        "restore": 3.0,
        "compile": 4.0,
        "data_wait": 1.0,
        "productive_step": 0.5 + 3.5 + 1.75 + 1.0,
        "checkpoint_blocking": 0.25 + 0.5,
        "evaluation": 3.0,
        "down": 0.125,
    }
    account = told.account()
    assert account.ledger.num_steps == 100
    assert account.ledger.num_repeated == 0
    assert account.ledger.wall_secs == sum(told.secs().values())
    assert account.ledger.goodput == 6.75 / account.ledger.wall_secs
    assert account.incidents.all == []


def test_steps_of_a_dead_worker_are_repeated(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    # It did two more seconds of work that nobody heard of.
    told.exit(-9, 2.0).decide("restart", "killed", "killed by SIGKILL in phase train")
    told.wait(5.0).launch(1).begin(restored=4)
    # Steps 5 to 10 again, 11 to 16 for the first time, half a second each.
    told.steps(5, 16, 6.0, data=0.0)
    secs = told.secs()
    assert secs["productive_step"] == 10.0 + 3.0
    assert secs["repeated_step"] == 2.0 + 3.0
    assert secs["down"] == 5.0
    assert secs["init"] == 2 * 3.0
    assert secs["restore"] == 2 * 3.0
    assert "unknown" not in secs
    ledger = told.account().ledger
    assert (ledger.num_steps, ledger.num_repeated) == (16, 6)
    assert ledger.off_secs == 0.0


def test_steps_that_were_saved_are_not_repeated(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    # It did ten more steps, of which nobody told, and saved the fifth of them.
    told.exit(-9, 10.0, step=20).launch(1).begin(restored=15).steps(16, 20, 5.0)
    secs = told.secs()
    assert secs["productive_step"] == 10.0 + 5.0 + 5.0
    assert secs["repeated_step"] == 5.0
    ledger = told.account().ledger
    assert (ledger.num_steps, ledger.num_repeated) == (20, 0)


def test_steps_of_a_history_that_is_not_here_are_not_counted(story: Any) -> None:
    told = story().launch(0).begin().exit(-9, 1.0)
    told.launch(1).begin(restored=1000).steps(1001, 1002, 1.0)
    assert told.account().ledger.num_steps == 2
    assert told.secs()["productive_step"] == 1.0


def test_a_suspended_run_is_down(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0).wait(1.0)
    told.watch("suspended", 100.0, secs=100.0).steps(11, 12, 1.0)
    told.events[-1][1]["secs"] = 102.0
    assert told.secs()["down"] == 100.0
    assert told.secs()["productive_step"] == 10.0 + 2.0
    assert "unknown" not in told.secs()


def test_what_is_heard_goes_by_the_clock_that_is_never_set_back(story: Any) -> None:
    told, account = whole(story()), Account()
    for number, (at_secs, event) in enumerate(told.events):
        account.hear(event | {"mono": at_secs, "time": 1e9 - 1e6 * number})
    assert account.ledger.secs() == told.account().ledger.secs()
    account.hear({"kind": "preflight_done", "mono": float("nan")})
    account.hear({"kind": "preflight_done"})
    check(account)


def test_time_between_commands_is_told_apart(story: Any) -> None:
    told = whole(story()).watch("supervisor_end", exit_code=0, reason="finished")
    told.wait(3600.0)
    told.supervisor = 77
    told.launch(0).begin(restored=100).steps(101, 101, 1.0)
    ledger = told.account().ledger
    assert ledger.off_secs == 3600.0
    assert told.secs()["down"] == 3600.125


def test_a_supervisor_that_was_killed_leaves_no_word(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0).phase("evaluate", 0.0)
    told.say("evaluation", 1.0, step=10, metrics={}, secs=1.0).phase("train")
    told.wait(60.0)
    # The same numbers of processes: in a container they are.
    told.worker -= 1
    told.launch(0).begin(restored=10).steps(11, 11, 1.0)
    assert told.account().ledger.off_secs == 60.0
    assert told.secs()["down"] == 60.0
    assert "repeated_step" not in told.secs()
    assert told.secs()["productive_step"] == 11.0


def test_workers_without_a_supervisor(story: Any) -> None:
    told = story()
    for number in range(3):
        told.worker += number < 2  # A process id may come again, too.
        told.begin(restored=10 * number).steps(10 * number + 1, 10 * number + 10, 5.0)
        told.say("end", step=10 * number + 10, reason="stopped").wait(7.0)
    told.begin(restored=30)
    # With the imports, of which nobody tells here.
    assert told.account().ledger.off_secs == 3 * (7.0 + 1.0)
    assert told.secs()["productive_step"] == 15.0
    assert told.account().num_launches == 4


def test_a_hang_is_from_the_last_progress_to_the_death(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0).wait(2.0)
    hang = {"step": 10, "silent_secs": 30.0, "limit_secs": 30.0, "phase": "step"}
    told.say("hang", 30.0, seen_by="worker", **hang)
    hang["silent_secs"] = 31.0
    told.watch("hang", 1.0, seen_by="supervisor", **hang)
    told.exit(-9, 1.0).decide("restart", "hang", "hang")
    secs = told.secs()
    assert secs["hang"] == 32.0
    # What it had done of the next steps before it hung.
    assert secs["repeated_step"] == 2.0
    assert secs["productive_step"] == 10.0


def test_a_hang_that_ends_by_itself(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    hang = {"step": 10, "silent_secs": 30.0, "limit_secs": 30.0, "phase": "step"}
    told.say("hang", 31.0, seen_by="worker", **hang).wait(9.0)
    told.steps(11, 11, 0.0).events[-1][1]["secs"] = 40.0
    told.steps(12, 12, 1.0)
    assert told.secs()["hang"] == 30.0 + 9.0
    assert told.secs()["productive_step"] == 10.0 + 1.0 + 1.0
    assert "unknown" not in told.secs()


def test_a_rollback_in_place(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0).wait(1.0)
    told.say("rollback", step=4, origin=8, timeline=1, reason="spike")
    told.phase("restore", 0.5).phase("train", 2.0).steps(5, 12, 8.0)
    secs = told.secs()
    assert secs["repeated_step"] == 1.0 + 0.5 + 6.0
    assert secs["restore"] == 3.0 + 2.0
    assert secs["productive_step"] == 10.0 + 2.0


def test_a_run_begins_with_its_first_launch(story: Any) -> None:
    told = story().watch("decision").wait(5.0).launch(0).begin().steps(1, 1, 1.0)
    ledger = told.account().ledger
    assert (ledger.wall_secs, ledger.off_secs) == (11.0, 0.0)
    assert told.account().begun_secs == 1005.0


def test_what_the_loop_did_not_measure_is_unknown(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0).wait(3.0).steps(11, 11, 1.0)
    assert told.secs()["unknown"] == 3.0
    told.phase("a phase of the future").wait(2.0).phase("train")
    assert told.secs()["unknown"] == 5.0


def test_a_running_worker_is_told_as_what_it_is_at(story: Any) -> None:
    told = story().launch(0).say("start", 1.0, attempt=0, argv=[])
    told.phase("restore", 1.0).phase("init").phase("compile", 1.0)
    account = told.account()
    account.go_on_until(told.now + 500.0)
    assert account.ledger.secs()[Cause.COMPILE] == 500.0
    assert account.ledger.wall_secs == 503.0
    assert account.is_alive


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_with_fields_of_any_type(kind: str, story: Any) -> None:
    told = whole(story())
    for value in (None, "x", -1, 1.5, [], {}, True, 10**400, "nan", float("nan")):
        broken = dict.fromkeys(KINDS[kind], value)
        for place in range(0, len(told.events), 5):
            events = list(told.events)
            at = events[place][0]
            for role in ("work", "supervise"):
                event = {"kind": kind, "time": at, "role": role, "pid": 3} | broken
                events.insert(place, (at, event))
            check(account_of(events))


def check(account: Account) -> None:
    """The law of the ledger."""
    micros = account.ledger.micros()
    assert min(micros.values()) >= 0
    assert sum(micros.values()) == round(account.ledger.wall_secs * 1e6)
    assert 0 <= account.ledger.off_secs * 1e6 <= micros[Cause.DOWN] + 0.5
    assert 0.0 <= account.ledger.goodput <= 1.0
    for incident in account.incidents.all:
        assert incident.lost_secs >= 0
        assert incident.off_secs >= 0
        assert incident.num_lost_steps >= 0
    lost = sum(incident.lost_secs for incident in account.incidents.all)
    assert lost <= account.ledger.wall_secs + 1e-3


SECS = st.one_of(st.just(0.0), st.floats(0, 1e5), st.floats(-10, 1e9))
STEPS = st.integers(-2, 40)


@st.composite
def any_events(draw: st.DrawFn) -> list[tuple[float, dict[str, Any]]]:
    """Anything in any order, with any times of its own; time goes on as it likes."""
    values = {
        "name": st.sampled_from(
            ["init", "restore", "compile", "train", "evaluate", "save", "other"]
        ),
        "step": STEPS,
        "first_step": STEPS,
        "origin": STEPS,
        "num_skipped": STEPS,
        "secs": SECS,
        "data_secs": SECS,
        "blocking_secs": SECS,
        "silent_secs": SECS,
        "limit_secs": SECS,
        "verify_secs": SECS,
        "worker_pid": st.integers(1, 3),
        "attempt": st.integers(0, 2),
        "status": st.sampled_from([0, -9, 75]),
        "reason": st.sampled_from(["finished", "stopped", "why"]),
        "action": st.sampled_from(["restart", "stop", "finish"]),
    }
    kinds = st.sampled_from(sorted(KINDS) + 3 * ["step", "phase", "launch", "start"])
    events, now = [], draw(st.floats(0, 2e9))
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(kinds)
        fields = {
            name: draw(values.get(name, st.sampled_from(["x", 1, None])))
            for name in KINDS[kind]
        }
        now += draw(st.sampled_from([0.0, 1e-7, 0.3, 11.0, 1e4]))
        base = {
            "kind": kind,
            "time": now,
            "role": draw(st.sampled_from(["work", "supervise", "notebook", "other"])),
            "pid": draw(st.integers(1, 3)),
        }
        events.append((now, base | fields))
    return events


@hypothesis.given(any_events())
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_history_adds_up(events: list[tuple[float, dict[str, Any]]]) -> None:
    check(account_of(events))
    account = Account()
    for at_secs, event in events:
        account.take(event, at_secs=at_secs)
        check(account)


def random_run(told: Any, rng: random.Random) -> tuple[int, int]:
    """Many lives as jaxft writes them; how far it got for good, and steps for nothing.

    A worker may die some steps after it told of any, and may have saved one of these.
    """
    step, top, saved, done, place = 0, 0, -1, 0, 0
    for life in range(rng.randint(1, 8)):
        told.launch(life).begin(restored=saved)
        step, top = max(saved, 0), max(top, saved)
        place = step if saved >= 0 else place
        for _ in range(rng.randint(0, 6)):
            num_steps = rng.randint(1, 5)
            secs = num_steps * 0.25
            told.steps(step + 1, step + num_steps, secs, data=secs * rng.random())
            step = place = step + num_steps
            done, top = done + num_steps, max(top, step)
            saved = step if rng.random() < 0.4 else saved
        num_quiet = rng.randint(0, 4) if place == step > 0 else 0
        for _ in range(num_quiet):
            told.wait(0.25)
            step = place = step + 1
            done += 1
            saved = step if rng.random() < 0.3 else saved
        told.exit(-9, step=step if num_quiet else -1)
        told.decide("restart", "killed", "killed").wait(rng.choice([0.0, 2.0]))
    return top, done - place


@hypothesis.given(seed=st.integers(0, 2**32))
@hypothesis.settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_each_step_is_productive_once(seed: int, story: Any) -> None:
    told = story()
    top, num_lost = random_run(told, random.Random(seed))
    account = told.account()
    check(account)
    ledger = account.ledger
    assert ledger.num_steps == top
    secs = ledger.secs()
    assert secs[Cause.UNKNOWN] == pytest.approx(0.0, abs=1e-4)
    # What is not in it was waiting for input.
    assert secs[Cause.STEP] <= 0.25 * top + 1e-3
    assert secs[Cause.STEP] + secs[Cause.DATA] >= 0.25 * top - 1e-3
    lost = sum(incident.num_lost_steps for incident in account.incidents.all)
    assert lost == num_lost
