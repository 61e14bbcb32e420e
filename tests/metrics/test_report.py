"""The closing summary says what happened, from the events alone."""

import pathlib
from typing import Any

from jaxft.metrics.report import closing_summary, lost_secs, summarize


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
    assert lost_secs(KILLED) == (7.0 - 3.0) + (11.5 - 7.5)
    assert lost_secs([]) == 0.0


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


def test_text() -> None:
    text = closing_summary(KILLED, workdir=pathlib.Path("/w"), reason="finished")
    assert "8.0000 -> 3.0000" in text
    assert "2.00 steps/s, 200 tokens/s, 20.0 % waiting for input" in text
    assert "/w/checkpoints, newest 6" in text
    assert text.isascii()


def test_a_run_that_did_nothing_has_a_summary() -> None:
    text = closing_summary([], workdir=pathlib.Path("/w"), reason="stopped")
    assert text.splitlines()[0].endswith("stopped")
    moved = [event("quarantine", 1.0, step=3, path="/w/3.quarantined-0", reason="x")]
    assert "/w/3.quarantined-0" in closing_summary(
        moved, workdir=pathlib.Path("/w"), reason="stopped"
    )
