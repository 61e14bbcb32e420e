"""The closing summary says what happened, from the events alone."""

import math
import pathlib
import pickle
import random
import statistics
from typing import Any

import pytest

from jaxft.events import KINDS, EventLog
from jaxft.metrics.report import Summary, summarize


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time} | fields


def step(time: float, last: int, *, first: int | None = None) -> dict[str, Any]:
    first = last if first is None else first
    return event(
        "step",
        time,
        step=last,
        first_step=first,
        secs=0.5 * (last - first + 1),
        data_secs=0.1 * (last - first + 1),
        metrics={"loss": 10.0 - last},
    )


KILLED = [
    event("launch", 0.0, worker_pid=1, attempt=0),
    event("run", 1.0, num_steps=6, unit="tokens", per_step=100),
    event("evaluation", 1.5, step=0, metrics={"loss": 8.0}),
    step(2.0, 1),
    step(2.5, 2),
    event("save_commit", 2.6, step=2),
    step(3.0, 3),
    event("worker_exit", 3.2, status=-9),
    event("launch", 3.3, worker_pid=2, attempt=1),
    event("restore", 6.0, step=2),
    step(7.0, 3),
    step(7.5, 4),
    event("worker_exit", 7.6, status=-9),
    event("worker_exit", 9.6, status=-9),
    event("launch", 9.7, worker_pid=4, attempt=3),
    step(12.5, 6, first=5),
    event("save_commit", 13.0, step=6),
    event("evaluation", 13.2, step=6, metrics={"loss": 3.0}),
    event("end", 13.5, step=6, reason="finished"),
    event("worker_exit", 13.6, status=0),
]


def test_lost_time_runs_from_the_last_step_until_it_is_passed_again() -> None:
    # From 3.0 (step 3 done) to 7.0 (step 3 done again), from 7.5 to 11.5 (step 5
    # began): two deaths in a row are one loss.
    assert summarize(KILLED).lost_secs == (7.0 - 3.0) + (11.5 - 7.5)
    assert summarize([]).lost_secs == 0.0


def test_summary_of_a_killed_run() -> None:
    summary = summarize(KILLED)
    assert summary.step == 6
    assert summary.num_restarts == 3
    assert summary.metrics == {"loss": 4.0}
    assert (summary.first_evaluation, summary.evaluation) == (
        {"loss": 8.0},
        {"loss": 3.0},
    )
    assert summary.last_checkpoint == 6
    assert summary.steps_per_sec == 2.0


def text_of(events: list[dict[str, Any]], workdir: str = "/w") -> str:
    return summarize(events).text(workdir=pathlib.Path(workdir), reason="ended")


def test_text() -> None:
    text = text_of(KILLED)
    rows = dict(line.split("  ", 1) for line in text.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows == {
        "run": "ended",
        "step": "6 of 6",
        "loss": "4.0000",
        "held-out loss": "8.0000 -> 3.0000",
        "throughput": "2.00 steps/s, 200 tokens/s, 20.0 % waiting for input",
        "restarts": "3, 8.0 s lost to them",
        "checkpoints": "/w/checkpoints, newest 6",
    }
    assert text.isascii()


def test_a_run_that_did_nothing_has_a_summary() -> None:
    text = text_of([], workdir="/w/../v")
    assert text.splitlines()[0].endswith("ended")
    assert text.endswith("none yet in /v/checkpoints")
    moved = [event("quarantine", 1.0, step=3, path="/w/3.quarantined-0", reason="x")]
    assert "/w/3.quarantined-0" in text_of(moved)


def test_a_run_that_had_nothing_left_to_do_says_where_it_is() -> None:
    resumed = [
        event("launch", 0.0, worker_pid=1, attempt=0),
        event("run", 1.0, num_steps=300, unit="rows", per_step=8),
        event("restore", 2.0, step=300, secs=0.1, num_bytes=1),
    ]
    for events in (resumed, [*resumed, event("end", 3.0, step=300, reason="finished")]):
        text = text_of(events)
        assert "300 of 300" in text
        assert text.endswith("/w/checkpoints, newest 300")


def test_a_loss_is_that_of_the_step_that_is_told() -> None:
    begin = [event("run", 1.0, num_steps=9, unit="rows", per_step=1), step(2.0, 3)]
    assert "loss" in text_of(begin)
    # A step event got lost: what is newer knows no loss.
    for kind in ("end", "save_commit"):
        text = text_of([*begin, event(kind, 3.0, step=5, reason="stopped")])
        assert "5 of 9" in text
        assert "loss" not in text
    same = [*begin, event("end", 3.0, step=3, reason="stopped")]
    assert "loss" in text_of(same)
    assert "3 of 9" in text_of([*begin, event("end", 3.0, step=-1, reason="stopped")])


def test_what_somebody_else_knows_of_the_time_has_a_row() -> None:
    text = summarize(KILLED).text(
        workdir=pathlib.Path("/w"), reason="ended", goodput="42.0 % of 9 s"
    )
    (row,) = [line for line in text.splitlines() if line.startswith("goodput ")]
    assert row.split("  ")[-1] == "42.0 % of 9 s"


def test_after_a_restart_the_step_is_where_the_run_is_now() -> None:
    text = text_of([*KILLED[:-4], event("restore", 13.0, step=2), step(14.0, 3)])
    assert "3 of 6" in text
    assert "7.0000" in text


def test_a_history_with_holes_says_so() -> None:
    text = summarize(KILLED).text(
        workdir=pathlib.Path("/w"), reason="ended", history="2 events lost"
    )
    assert text.splitlines()[-1].split("  ")[-1] == "incomplete: 2 events lost"


def slow(time: float, last: int) -> dict[str, Any]:
    return step(time, last) | {"secs": 50.0, "data_secs": 25.0}


def test_the_pace_leaves_out_what_each_worker_does_once() -> None:
    run = event("run", 0.0, num_steps=9, unit="rows", per_step=1)
    first, second = [run, slow(1.0, 1), step(2.0, 2)], [run, slow(3.0, 3), step(4.0, 4)]
    summary = summarize(first + second)
    assert summary.steps_per_sec == 2.0
    assert summary.input_share == 0.2
    # Where there is nothing else, it is better than nothing.
    assert summarize([run, slow(1.0, 1)]).steps_per_sec == 0.02


@pytest.mark.parametrize(
    "bad",
    [
        {"step": "six"},
        {"step": None},
        {"first_step": []},
        {"secs": "long"},
        {"secs": "nan"},
        {"secs": 0.0},
        {"secs": -1.0},
        {"metrics": 3},
        {"metrics": {"loss": [1]}},
        {"step": 10**400, "first_step": 0},
        {"step": 1e308, "first_step": -1e308},
        {"data_secs": {}},
    ],
    ids=str,
)
def test_a_foreign_event_changes_no_more_than_itself(bad: dict[str, Any]) -> None:
    text = text_of([*KILLED[:7], step(3.1, 3) | bad, *KILLED[7:]])
    assert "newest 6" in text
    assert "8.0000 -> 3.0000" in text
    assert "2.00 steps/s" in text


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_with_fields_of_any_type(kind: str) -> None:
    for value in (None, "x", -1, 1.5, [], {}, True, 10**400):
        text_of([event(kind, 1.0) | dict.fromkeys(KINDS[kind], value)])


def test_non_finite_numbers_are_shown(tmp_path: pathlib.Path) -> None:
    summary = Summary()
    log = EventLog(tmp_path, role="work", tee=summary.take_line)
    fields = {"first_step": 1, "secs": 1.0, "data_secs": 0.0, "num_skipped": 1}
    log("step", step=1, metrics={"loss": math.nan}, **fields)
    log("evaluation", step=1, metrics={"loss": math.inf}, secs=1.0)
    lines = summary.text(workdir=tmp_path, reason="stopped").splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["nan", "inf"]


def test_months_of_steps_take_no_space() -> None:
    summary = Summary()
    rng = random.Random(0)
    rates = []

    def feed(first: int, last: int) -> None:
        for number in range(first, last):
            one = step(number, number)
            one["secs"] = rng.lognormvariate(0.0, 0.1)
            rates.append(1 / one["secs"])
            summary.take(one)

    feed(1, 1000)
    size = len(pickle.dumps(summary))
    feed(1000, 20_000)
    assert len(pickle.dumps(summary)) < 1.3 * size
    assert summary.steps_per_sec == pytest.approx(statistics.median(rates), rel=0.01)


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    back = [one | {"time": 1000.0 - 50 * n} for n, one in enumerate(KILLED)]
    summary = summarize(back)
    assert (summary.step, summary.last_checkpoint) == (6, 6)
    assert summary.metrics == {"loss": 4.0}
    assert summary.lost_secs >= 0.0


def mirrored(*events: dict[str, Any]) -> str:
    """The mirror's row; empty for none."""
    target = event("mirror_target", 0.5, target="s3://b")
    lines = text_of([target, *events]).splitlines()
    return "".join(x.split("  ", 1)[1].strip() for x in lines if x[:6] == "mirror")


def test_what_the_mirror_has() -> None:
    saved = [event("save_commit", 1.0 * n, step=n) for n in (10, 20, 30)]
    there = [event("mirror_commit", 1.0 * n, step=n) for n in (10, 20, 30)]
    failed = event("mirror_failed", 31.0, step=30, reason="down")
    end = event("end", 40.0, step=30, reason="finished")
    restored = event("restore", 0.9, step=20)
    assert mirrored() == mirrored(restored) == ""
    assert mirrored(*saved, *there) == "step 30 is its newest"
    assert mirrored(*saved, there[0], failed, there[2]) == "step 30 is its newest"
    assert mirrored(*saved, failed) == "none of the steps: down"
    assert mirrored(restored, *saved, failed) == "none of the new steps: down"
    assert mirrored(restored, failed) == "nothing new: down"
    # A stop does not wait for as long as it takes.
    assert mirrored(*saved) == "step 30 is not there yet"
    behind = "step 20 is its newest; step 30 is not there yet"
    assert mirrored(*saved, *there[:2]) == behind
    assert mirrored(*saved, *there[:2], failed) == f"{behind}: down"
    # Who finishes has waited, or has said why not.
    assert mirrored(restored, end) == "step 20 is its newest"
    assert mirrored(*saved, failed, end) == "none of the steps: down"
    fetched = event("mirror_fetch", 0.8, step=20)
    assert mirrored(fetched, restored) == "step 20 is its newest"
    worse = "step 30 is its newest; not all went well: down"
    assert mirrored(*saved, *there, failed) == worse


def test_without_a_mirror_there_is_no_word_of_one() -> None:
    assert "mirror" not in text_of(KILLED)


def test_failed_saves_are_counted_with_the_last_ones_cause() -> None:
    assert "failed saves" not in text_of(KILLED)
    failed = [
        event(
            "save_failed",
            3.0 + step,
            step=step,
            reason=f"save of step {step} to /c/{step} failed: disk full; free space "
            "under /c; the same command goes on from step 10\n(Errno 28)",
        )
        for step in (20, 30)
    ]
    row = text_of([*KILLED, *failed]).splitlines()[-1]
    assert row == "failed saves   2 (last: step 30 to /c/30 failed: disk full)"


def test_a_disk_that_takes_no_more_still_holds_what_it_holds() -> None:
    assert text_of([event("found", 1.0, step=40)]).endswith("newest 40")
