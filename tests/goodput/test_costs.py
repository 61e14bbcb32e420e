"""What saves, restores and restarts cost, part by part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def test_the_parts_of_a_recovery(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 1, 0.5).exit(-9, 1.0)
    told.wait(5.0).launch(1).begin(restored=1).steps(2, 2, 0.25)
    first, second = told.account().costs.recoveries
    assert dataclasses.asdict(second) == {
        "attempt": 1,
        "at_secs": second.at_secs,
        "is_restart": True,
        "down_secs": 5.0,
        "imports_secs": 1.0,
        "build_secs": 2.0,
        "restore_secs": 1.5,
        "verify_secs": 1.0,
        "compile_secs": 4.0,
        "is_cached": True,
        "first_step_secs": 0.25,
        "other_secs": pytest.approx(0.5),
        "total_secs": 5.0 + 10.25,
    }
    assert not first.is_restart
    assert not first.is_cached
    assert (first.down_secs, first.restore_secs, first.total_secs) == (0.0, 0.0, 10.5)


def test_the_time_without_a_command_is_no_part(story: Any) -> None:
    told = story().launch(0).begin().steps(1, 1, 0.5).wait(1000.0)
    told.launch(0).begin(restored=1).steps(2, 2, 0.25)
    _, second = told.account().costs.recoveries
    assert second.is_restart
    assert (second.down_secs, second.total_secs) == (0.0, 10.25)


def test_who_never_reached_a_step_is_no_recovery(story: Any) -> None:
    told = story().launch(0).begin().exit(-9)
    told.launch(1).begin().steps(1, 1, 1.0)
    (only,) = told.account().costs.recoveries
    assert (only.attempt, only.is_restart) == (1, True)


def test_saves_and_restores_are_added_up(story: Any) -> None:
    told = story().launch(0).begin(restored=0)
    for number, secs in enumerate((0.5, 2.0, 0.25)):
        fields = {"planning_secs": 0.0, "blocking_secs": secs}
        told.say("save_start", 1.0, step=number, **fields)
        fields = {"num_bytes": 100, "num_linked": 1, "linked_bytes": 30}
        told.say("save_commit", 1.0, step=number, secs=4 * secs, **fields)
    told.say("save_skipped", step=9, reason="x").say("save_failed", step=9, reason="x")
    costs = told.account().costs
    assert len(costs.blocking) == len(costs.saves) == 3
    assert (costs.blocking.median, costs.blocking.longest) == (0.5, 2.0)
    assert costs.blocking.total == 2.75
    assert costs.saves.total == 11.0
    assert (costs.save_bytes, costs.linked_bytes) == (300, 90)
    assert (costs.num_skipped_saves, costs.num_failed_saves) == (1, 1)
    assert (len(costs.restores), costs.restores.total, costs.restore_bytes) == (
        1,
        2.5,
        100,
    )


def test_nothing_costs_nothing(story: Any) -> None:
    costs = story().account().costs
    assert (costs.blocking.median, costs.blocking.longest) == (0.0, 0.0)
