"""The history: append, tear, read."""

import json
import math
import os
import pathlib
import resource
import signal
from typing import Any

import numpy as np
import pytest

from jaxft.events import KINDS, EventLog, parse_line, read_events


def test_nothing_is_written_before_open(tmp_path: pathlib.Path) -> None:
    seen: list[str] = []
    log = EventLog(tmp_path / "events", role="work", tee=seen.append)
    log("phase", name="init")
    assert not (tmp_path / "events").exists()
    assert len(seen) == 1
    log.open()
    log("phase", name="train")
    assert [e["name"] for e in read_events(tmp_path / "events")] == ["init", "train"]


def test_events_say_who_and_when(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work", clock=lambda: 12.5)
    log.open()
    log("end", step=3, reason="finished")
    (event,) = read_events(tmp_path)
    assert event["time"] == 12.5
    assert event["pid"] == os.getpid()
    assert (event["role"], event["step"]) == ("work", 3)
    assert json.loads(log.path.read_text()) == event


def test_unknown_kinds_and_missing_fields_are_refused(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work")
    with pytest.raises(ValueError, match="unknown event kind"):
        log("bang")
    with pytest.raises(ValueError, match="lacks"):
        log("end", step=1)


def test_kinds_describe_their_fields() -> None:
    for kind, fields in KINDS.items():
        assert kind.isidentifier()
        assert all(name.isidentifier() for name in fields)


def test_torn_and_foreign_lines_are_skipped(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work")
    log.open()
    for step in range(3):
        log("end", step=step, reason="finished")
    whole = log.path.read_bytes()
    for cut in range(len(whole)):
        log.path.write_bytes(whole[:cut])
        steps = [event["step"] for event in read_events(tmp_path)]
        num_whole = whole[:cut].count(b"\n")
        # The last line may be whole but for its line end.
        assert steps[:num_whole] == list(range(num_whole))
        assert len(steps) <= num_whole + 1
    (tmp_path / "other.jsonl").write_bytes(b'\xff\xfe\n[1]\n"x"\n{"kind": 3}\n\n')
    assert read_events(tmp_path)


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, "time": 1} | fields)


def test_parse_line_accepts_only_events() -> None:
    assert parse_line(line("end", step=2, reason="x")) is not None
    # A newer version's kind is for its own readers.
    assert parse_line(line("of the future")) is not None
    assert parse_line('{"kind": "end", "ti') is None
    assert parse_line("null") is None
    assert parse_line("[" * 100_000) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]])
def test_a_kind_without_its_fields_is_foreign(kind: str) -> None:
    whole = dict.fromkeys(KINDS[kind], 0)
    assert parse_line(line(kind, **whole)) is not None
    for name in whole:
        assert parse_line(line(kind, **{n: 0 for n in whole if n != name})) is None


@pytest.mark.parametrize(
    "time", ["now", None, True, [1], float("nan"), float("inf"), 10**400]
)
def test_a_time_is_a_number(time: Any) -> None:
    assert parse_line(line("preflight_done", time=time)) is None


@pytest.mark.parametrize("kind", [None, 3, ["step"], {}])
def test_a_kind_is_a_word(kind: Any) -> None:
    assert parse_line(json.dumps({"kind": kind, "time": 1})) is None


def test_numbers_that_json_lacks_are_text(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work")
    log.open()
    metrics = {
        "loss": math.nan,
        "up": math.inf,
        "down": np.float64(-math.inf),
        "single": np.float32("nan"),
        "fine": 1.5,
    }
    log("evaluation", step=1, metrics=metrics, secs=0.0)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    event = json.loads(log.path.read_text(), parse_constant=refuse)
    assert event["metrics"] == {
        "loss": "nan",
        "up": "inf",
        "down": "-inf",
        "single": "nan",
        "fine": 1.5,
    }


def test_a_full_disk_does_not_raise(tmp_path: pathlib.Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    seen: list[str] = []
    log = EventLog(blocker / "events", role="work", tee=seen.append)
    log.open()
    log("phase", name="init")
    log("phase", name="train")
    assert len(seen) == 2
    assert log.num_lost == 2
    assert log.problem.startswith(f"2 events lost from {log.path}: ")
    # What is mended is used again.
    blocker.unlink()
    log("phase", name="save")
    assert [event["name"] for event in read_events(log.path.parent)] == ["save"]
    assert log.num_lost == 2


def test_a_disk_that_takes_only_a_part(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work")
    log.open()
    log("phase", name="init")
    # The kernel itself takes what fits below the limit, and refuses the rest.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 9, limit[1]))
    try:
        log("phase", name="compile")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, earlier)
    assert log.num_lost == 1
    assert "File too large" in log.problem
    # The next event is whole, after what is left of the lost one.
    log("phase", name="train")
    log("phase", name="save")
    names = [event["name"] for event in read_events(tmp_path)]
    assert names == ["init", "train", "save"]
    assert log.path.read_bytes().count(b"\n") == 4
    assert log.num_lost == 1


def test_nothing_lost_is_no_problem(tmp_path: pathlib.Path) -> None:
    log = EventLog(tmp_path, role="work")
    log.open()
    log("phase", name="init")
    assert (log.num_lost, log.problem) == (0, "")


def test_missing_folder_is_an_empty_history(tmp_path: pathlib.Path) -> None:
    assert read_events(tmp_path / "none") == []
