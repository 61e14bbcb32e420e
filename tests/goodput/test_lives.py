"""Lives begin and end as the events tell, also where some of these are missing."""

from __future__ import annotations

from typing import Any

from jaxft.goodput.lives import Border, Lives


def borders(told: Any) -> list[Any]:
    """Border, unseen, new command and alone of each event that is a border."""
    lives = Lives()
    turns = [lives.take(event) for _, event in told.events]
    return [
        (turn.border, turn.unseen, turn.new_command, turn.alone)
        for turn in turns
        if turn.border is not Border.NONE
    ]


BEGIN = (Border.BEGIN, False, True, False)
AGAIN = (Border.BEGIN, False, False, False)
EXIT = (Border.EXIT, False, False, False)
LAST_WORD = (Border.LAST_WORD, False, False, False)
OVER = (Border.OVER, False, False, False)


def test_a_command_with_one_restart(story: Any) -> None:
    told = story().launch(0).begin().exit(-9).launch(1).begin()
    told.say("end", step=1, reason="finished").exit(0)
    told.watch("supervisor_end", exit_code=0, reason="finished")
    assert borders(told) == [BEGIN, EXIT, AGAIN, LAST_WORD, EXIT, OVER]


def test_another_command_with_the_same_numbers(story: Any) -> None:
    told = story().launch(0).begin()
    told.worker -= 1  # As in a container that is started again.
    told.launch(0).begin()
    assert borders(told) == [BEGIN, (Border.BEGIN, True, True, False)]


def test_an_exit_that_the_disk_did_not_take(story: Any) -> None:
    told = story().launch(0).begin().launch(1).begin()
    assert borders(told) == [BEGIN, (Border.BEGIN, True, False, False)]


def test_a_launch_that_the_disk_did_not_take(story: Any) -> None:
    told = story().begin().exit(-9).launch(1).begin().exit(-9)
    assert borders(told) == [BEGIN, EXIT, BEGIN, EXIT]


def test_an_exit_of_another_is_none(story: Any) -> None:
    told = story().launch(0).begin()
    told.watch("worker_exit", worker_pid=999, status=-9, step=0)
    assert borders(told) == [BEGIN]


def test_who_goes_on_after_a_fault_has_lived_on(story: Any) -> None:
    fault = {"process": 0, "exit_code": 65, "evidence": "x", "step": 1}
    told = story().launch(0).begin().say("fault", fault="nonfinite", **fault)
    told.say("save_commit").phase("restore")
    assert borders(told)[1:] == [LAST_WORD, (Border.BACK, False, False, False)]
    # But nobody comes back from the dead.
    told.say("end", step=1, reason="stopped").exit(75).phase("train")
    assert borders(told)[3:] == [LAST_WORD, EXIT]


def test_a_worker_alone_says_its_last_word_itself(story: Any) -> None:
    told = story().begin().say("end", step=1, reason="finished").begin()
    alone = (Border.LAST_WORD, False, False, True)
    assert borders(told) == [BEGIN, alone, BEGIN]


def test_a_tool_is_no_worker(story: Any) -> None:
    told = story()
    told.watch("rollback").events[-1][1]["role"] = "cli"
    assert borders(told) == []
