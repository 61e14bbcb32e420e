"""What is rare is told when it happens, in one line each."""

import pytest

from jaxft.metrics.notes import Notes


def told(*events: tuple[str, dict], failed_saves: bool = False) -> list[str]:
    lines: list[str] = []
    notes = Notes(lines.append, failed_saves=failed_saves)
    for kind, fields in events:
        notes.take(kind, fields)
    return lines


def failed(step: int, reason: str) -> tuple[str, dict]:
    return "mirror_failed", {"step": step, "target": "s3://b", "reason": reason}


@pytest.mark.parametrize(
    ("kind", "fields", "line"),
    [
        (
            "quarantine",
            {"step": 25, "path": "/c/25.quarantined-0", "reason": "bad\n  chunk"},
            "step 25 was moved aside: bad chunk; kept as /c/25.quarantined-0",
        ),
        (
            "quarantine_failed",
            {"step": 25, "path": "/c/25", "reason": "it cannot be moved aside: no"},
            "step 25 is passed over: it cannot be moved aside: no: /c/25",
        ),
        (
            "save_unhealthy",
            {"step": 30, "leaves": ["params/w"]},
            "step 30 was not saved: params/w is not finite",
        ),
        (
            "save_unhealthy",
            {"step": 30, "leaves": list("abcde")},
            "step 30 was not saved: a, b, c and 2 more are not finite",
        ),
        (
            "unhealthy",
            {"step": 30, "leaves": ["a", "b"]},
            "step 30 is passed over: a, b are not finite",
        ),
        (
            "metric_missing",
            {"step": 10, "metric": "los", "known": ["accuracy", "loss"]},
            "checkpoint.keep goes by los, which step 10 does not have; it has "
            "accuracy, loss",
        ),
        (
            "interval_costly",
            {"secs": 12.345, "overhead": 0.0412, "reason": "failures are frequent"},
            "saves every 12.3 s take 4.1% of the time: failures are frequent",
        ),
        (*failed(30, "no answer"), "mirror: step 30 failed: no answer"),
        (*failed(-1, "no answer"), "mirror: s3://b failed: no answer"),
    ],
)
def test_lines(kind: str, fields: dict, line: str) -> None:
    assert told((kind, fields)) == [line]


def test_what_is_no_news_is_not_told() -> None:
    assert told(("step", {"step": 1}), ("save_commit", {"step": 1, "secs": 1.0})) == []


def test_a_failed_save_is_told_where_the_run_goes_on() -> None:
    event = ("save_failed", {"step": 3, "reason": "save of step 3 failed"})
    assert told(event) == []
    assert told(event, failed_saves=True) == ["save of step 3 failed"]


def test_a_mirror_that_goes_on_failing_is_told_once_and_when_it_is_back() -> None:
    there = ("mirror_commit", {"step": 40})
    assert told(there) == []
    assert told(
        failed(10, "down"), failed(20, "down"), failed(30, "full"), there, there
    ) == [
        "mirror: step 10 failed: down",
        "mirror: step 30 failed: full",
        "mirror: step 40 is there",
    ]


def test_steps_that_were_fetched_are_known() -> None:
    notes = Notes(print)
    notes.take("mirror_fetch", {"step": 5})
    assert notes.fetched == {5}


def test_a_row_of_failed_saves_is_told_by_its_first_and_by_its_end() -> None:
    def save(kind: str, step: int) -> tuple[str, dict]:
        reason = f"save of step {step} failed"
        return kind, {"step": step, "secs": 1.0, "reason": reason}

    row = [save("save_failed", step) for step in (20, 30, 40)]
    events = [*row, save("save_commit", 50), save("save_commit", 60), row[0]]
    assert told(*events, save("save_commit", 70), failed_saves=True) == [
        "save of step 20 failed",
        "step 50 is saved, after 3 failed saves",
        "save of step 20 failed",
        "step 70 is saved, after 1 failed save",
    ]
    assert told(*events) == []


def test_a_save_that_no_stop_leaves_time_for_is_told_once() -> None:
    lines: list[str] = []
    notes = Notes(lines.append, stop_secs=30.0)
    for step, secs in ((10, 29.0), (20, 41.26), (30, 50.0)):
        notes.take("save_commit", {"step": step, "secs": secs})
    (line,) = lines
    assert line.startswith("warning: a save takes 41.3 s, a stop leaves 30.0 s")
    assert "preemption.grace_secs" in line
