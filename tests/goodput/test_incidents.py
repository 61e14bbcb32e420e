"""Each incident has its cause, its evidence, its steps and its seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def rows(told: Any) -> list[dict[str, Any]]:
    """What each incident says, but for when it was."""
    found = [dataclasses.asdict(one) for one in told.account().incidents.all]
    for one in found:
        one.pop("at_secs")
        one.pop("injected")
    return found


KILLED = {
    "kind": "killed",
    "step": 10,
    "evidence": "killed by SIGKILL in phase train",
    "num_lost_steps": 6,
    "off_secs": 0.0,
    "is_over": True,
}


def killed(told: Any) -> Any:
    """Ten steps, of which four are saved, and a kill two seconds later."""
    told.launch(0).begin().steps(1, 10, 10.0).exit(-9, 2.0)
    told.decide("restart", "killed", "killed by SIGKILL in phase train")
    return told.wait(5.0)


def test_a_kill_costs_until_the_same_step_is_there_again(story: Any) -> None:
    told = killed(story()).launch(1).begin(restored=4).steps(5, 7, 3.0)
    told.steps(8, 13, 6.0)
    # Two seconds of steps, five down, ten to the first step, six for steps 5 to 10.
    assert rows(told) == [KILLED | {"lost_secs": 2.0 + 5.0 + 10.0 + 6.0}]


def test_the_next_one_before_that_has_a_cost_of_its_own(story: Any) -> None:
    told = killed(story()).launch(1).begin(restored=4).steps(5, 7, 3.0).exit(-11, 1.0)
    told.wait(2.0).launch(2).begin(restored=4).steps(5, 10, 6.0)
    first, second = rows(told)
    assert first == KILLED | {"lost_secs": 2.0 + 5.0 + 10.0 + 4.0, "is_over": False}
    assert second["evidence"] == "killed by SIGSEGV"
    assert (second["step"], second["num_lost_steps"]) == (7, 3)
    assert (second["lost_secs"], second["is_over"]) == (2.0 + 10.0 + 6.0, True)


def test_a_death_on_the_way_to_the_first_step_takes_no_step(story: Any) -> None:
    told = killed(story()).launch(1).exit(-9, 1.0).launch(2).begin(restored=4)
    told.steps(5, 10, 6.0)
    assert [row["num_lost_steps"] for row in rows(told)] == [6, 0]
    assert [row["step"] for row in rows(told)] == [10, -1]


def test_one_that_is_not_over_costs_until_now(story: Any) -> None:
    told = killed(story()).launch(1).begin(restored=4)
    (row,) = rows(told)
    assert (row["lost_secs"], row["is_over"]) == (2.0 + 5.0 + 10.0, False)
    assert row["num_lost_steps"] == 6


def test_a_stop_and_what_no_command_ran(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    told.say("stop_request", reason="SIGTERM").phase("save")
    told.say("end", 0.5, step=10, reason="stopped").exit(75, 0.25)
    told.decide("stop", "stopped", "stopped by SIGTERM")
    told.watch("supervisor_end", exit_code=75, reason="stopped by SIGTERM")
    told.wait(1000.0)
    told.supervisor += 1
    told.launch(0).begin(restored=10).steps(11, 12, 2.0)
    (row,) = rows(told)
    assert row == {
        "kind": "stopped",
        "step": 10,
        "evidence": "stopped by SIGTERM",
        "num_lost_steps": 0,
        "lost_secs": 0.5 + 0.25 + 10.0,
        "off_secs": 1000.0,
        "is_over": True,
    }


@pytest.mark.parametrize("word", ["fault", "nothing"])
def test_a_command_that_ends_without_a_word(story: Any, word: str) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    if word == "fault":  # Of the worker; the supervisor did not live to see it.
        fault = {"process": 0, "exit_code": 70, "evidence": "Traceback\n  x\nBad: y\n"}
        told.say("fault", fault="exception", step=10, **fault)
    told.wait(100.0).launch(0).begin(restored=8).steps(9, 10, 2.0)
    (row,) = rows(told)
    assert row["off_secs"] == 100.0
    assert row["lost_secs"] == 10.0 + 2.0
    assert row["num_lost_steps"] == 2
    said = {
        "nothing": ("killed", "the command and its worker ended without a word"),
        "fault": ("exception", "Bad: y"),
    }
    assert (row["kind"], row["evidence"]) == said[word]


def test_a_worker_without_a_supervisor_speaks_for_itself(story: Any) -> None:
    told = story().begin().steps(1, 10, 10.0)
    told.say("stop_request", reason="notebook").say("end", step=10, reason="stopped")
    (row,) = rows(told)
    assert (row["kind"], row["is_over"]) == ("stopped", False)
    assert row["evidence"] == "stopped by notebook"
    told.wait(30.0).begin(restored=10).steps(11, 11, 1.0)
    told.say("end", step=11, reason="finished")
    (row,) = rows(told)
    assert row["is_over"]


def test_a_hang_and_the_kill_that_answers_it_are_one(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    hang = {"step": 10, "silent_secs": 30.5, "limit_secs": 30.0, "phase": "step"}
    for seen_by in ("watchdog", "supervisor"):
        told.say("hang", 31.0, seen_by=seen_by, **hang)
    told.exit(71).decide("restart", "hang", "hung")
    told.launch(1).begin(restored=10).steps(11, 11, 1.0)
    (row,) = rows(told)
    assert row["kind"] == "hang"
    words = "no progress in phase step for 30.5 s (limit 30.0 s), seen by the watchdog"
    assert row["evidence"] == words
    assert row["lost_secs"] == 62.0 + 10.0


def test_a_stall_that_ends_costs_its_time_and_no_step(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    hang = {"step": 10, "silent_secs": 30.0, "limit_secs": 30.0, "phase": "step"}
    told.say("hang", 30.0, seen_by="watchdog", **hang).steps(11, 11, 10.0)
    (row,) = rows(told)
    assert (row["lost_secs"], row["num_lost_steps"]) == (40.0, 0)
    assert row["is_over"]


def test_a_rollback_in_place(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    told.say("rollback", 1.0, step=4, origin=8, timeline=1, reason="a spike")
    told.phase("restore").phase("train", 3.0).steps(5, 12, 8.0)
    (row,) = rows(told)
    assert (row["kind"], row["evidence"]) == ("rollback", "to step 4: a spike")
    assert (row["step"], row["num_lost_steps"]) == (10, 6)
    assert row["lost_secs"] == 1.0 + 3.0 + 6.0


def test_what_costs_no_time_of_its_own(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    told.say("quarantine", step=8, path="/w/8", reason="a flipped\n bit")
    told.say("save_failed", step=10, reason="no space")
    quarantine, save = rows(told)
    assert (quarantine["kind"], quarantine["evidence"]) == (
        "quarantine",
        "a flipped bit",
    )
    assert (save["kind"], save["step"]) == ("save_failed", 10)
    assert save["is_over"]
    assert save["lost_secs"] == 0.0


def test_a_fault_of_a_plan_is_told_as_such(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    fields = {"number": 1, "step": 12, "process": 0}
    told.say("injected", fault="slow_disk", plan="slow_disk@5-9:1MBps", **fields)
    told.say("injected", fault="kill", plan="kill@12", **fields).exit(-9)
    told.launch(1).begin(restored=8).steps(9, 10, 2.0).exit(-9)
    found = told.account().incidents.all
    assert [one.injected for one in found] == ["kill@12", ""]


def test_a_full_disk_is_noticed_by_saves_and_by_nothing_else(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    fields = {"number": 1, "step": 12, "process": 0}
    told.say("injected", fault="enospc", plan="enospc@11", **fields)
    told.say("injected", fault="hang", plan="hang@12", **fields)
    told.say("save_failed", step=11, reason="disk full")
    told.say("save_failed", step=12, reason="disk full")
    told.exit(-9)
    found = [(one.kind, one.injected) for one in told.account().incidents.all]
    assert found == [
        ("save_failed", "enospc@11"),
        ("save_failed", ""),
        ("killed", "hang@12"),
    ]


def test_a_full_disk_that_took_no_history_is_noticed_by_the_decision(
    story: Any,
) -> None:
    told = story().launch(0).begin().steps(1, 10, 10.0)
    fields = {"number": 1, "step": 12, "process": 0}
    told.say("injected", fault="enospc", plan="enospc@11", **fields).exit(74)
    decision = {"delay_secs": 0.0, "budget_left": 9, "reason": "disk full"}
    told.say("decision", action="restart", cause="save_failed", **decision)
    (found,) = told.account().incidents.all
    assert (found.kind, found.injected) == ("save_failed", "enospc@11")


def test_what_got_further_than_its_last_step_event(story: Any) -> None:
    fields = {"blocking_secs": 0.0, "planning_secs": 0.0}
    told = story().launch(0).begin().steps(1, 10, 10.0)
    told.say("save_start", 2.0, step=14, **fields).exit(-9, step=15)
    told.launch(1).begin(restored=8).steps(9, 16, 8.0)
    (row,) = rows(told)
    assert (row["step"], row["num_lost_steps"]) == (15, 7)


def test_a_run_that_finishes_closes_what_is_open(story: Any) -> None:
    told = killed(story()).launch(1).begin(restored=10)
    told.say("end", 1.0, step=10, reason="finished").exit(0, 1.0)
    (row,) = rows(told)
    assert row["is_over"]
    assert row["lost_secs"] == 2.0 + 5.0 + 10.0 + 1.0
