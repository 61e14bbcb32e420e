"""All files of a run are read in the order of what happened, whatever clocks say."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import resource
import tracemalloc
from typing import Any

import pytest

from jaxft.events import EventLog, boot_id
from jaxft.goodput.history import History


class Clocks:
    """A time of day that can be set, and an uptime that cannot."""

    def __init__(self) -> None:
        self.day, self.up = 1_000_000.0, 500.0

    def log(self, folder: pathlib.Path, role: str) -> EventLog:
        log = EventLog(folder, role=role, clock=lambda: self.day, uptime=self.uptime)
        log.open()
        return log

    def uptime(self) -> float:
        return self.up

    def wait(self, secs: float) -> None:
        self.day += secs
        self.up += secs


def names(history: History) -> list[str]:
    return [event["name"] for _, event in history]


def test_files_are_merged_by_time(tmp_path: pathlib.Path) -> None:
    clocks = Clocks()
    supervisor = clocks.log(tmp_path, "supervise")
    supervisor("phase", name="a")
    for letters in ("bc", "ef"):
        clocks.wait(10.0)
        worker = clocks.log(tmp_path, "work")
        for letter in letters:
            clocks.wait(0.25)
            worker("phase", name=letter)
        clocks.wait(1.0)
        supervisor("phase", name={"b": "d", "e": "g"}[letters[0]])
    num_read: list[int] = []
    history = History(tmp_path)
    assert len(list(history.read(num_read.append))) == 7
    assert sum(num_read) == history.num_bytes > 0
    assert names(history) == list("abcdefg")
    times = [secs - 1_000_000.0 for secs, _ in history]
    assert times == [0.0, 10.25, 10.5, 11.5, 21.75, 22.0, 23.0]
    assert history.now(clock=lambda: 7.0, uptime=clocks.uptime) == 1_000_023.0


def test_of_several_processes_the_first_tells(tmp_path: pathlib.Path) -> None:
    for index, letter in ((2, "c"), (1, "b"), (1, "a")):
        log = EventLog(tmp_path, role=letter, process_index=index)
        log("phase", name=letter)
        log.open()
    assert sorted(names(History(tmp_path))) == ["a", "b"]
    log = EventLog(tmp_path, role="work")  # Alone: it is process 0.
    log("phase", name="d")
    log.open()
    assert names(History(tmp_path)) == ["d"]


@pytest.mark.parametrize("secs", [-3600.0, -1.0, 5.0, 86400.0 * 365])
def test_a_clock_that_is_set_changes_nothing(
    tmp_path: pathlib.Path, secs: float
) -> None:
    clocks = Clocks()
    supervisor, worker = clocks.log(tmp_path, "supervise"), clocks.log(tmp_path, "work")
    supervisor("phase", name="a")
    clocks.wait(1.0)
    worker("phase", name="b")
    clocks.day += secs
    clocks.wait(1.0)
    worker("phase", name="c")
    clocks.wait(1.0)
    later = clocks.log(tmp_path, "notebook")  # Named by a day that is not its turn.
    later("phase", name="d")
    supervisor("phase", name="e")
    history = History(tmp_path)
    assert sorted(names(history)) == list("abcde")
    spans = [round(at - 1_000_000.0, 6) for at, _ in history]
    if secs > -3600.0:
        assert spans == [0.0, 1.0, 2.0, 3.0, 3.0]
    # Else the later file begins before all others by the time of day, and ties the
    # boot to that: all is shifted alike.
    assert [b - a for a, b in itertools.pairwise(spans)] == [1.0, 1.0, 1.0, 0]


def test_lines_of_before_have_only_the_time_of_day(tmp_path: pathlib.Path) -> None:
    lines = [{"kind": "preflight_done", "time": t} for t in (10.0, 12.0, 5.0, 6.0)]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "old.jsonl").write_text(text + '\n{"kind": "preflight_do')
    assert [secs for secs, _ in History(tmp_path)] == [10.0, 12.0, 12.0, 13.0]


def test_another_boot_goes_by_the_time_of_day(tmp_path: pathlib.Path) -> None:
    for number, (day, up) in enumerate([(100.0, 90.0), (110.0, 100.0), (500.0, 3.0)]):
        line = {"kind": "preflight_done", "time": day, "mono": up, "host": "h"}
        boot = {"boot": "two" if number == 2 else "one"}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(line | boot) + "\n")
    assert [secs for secs, _ in History(tmp_path)] == [100.0, 110.0, 500.0]


@pytest.mark.parametrize("mono", [None, "x", [], True, float("nan"), 1e300])
def test_an_uptime_of_any_type(tmp_path: pathlib.Path, mono: Any) -> None:
    line = {"kind": "preflight_done", "time": 3.0, "mono": mono, "boot": "b"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert [secs for secs, _ in History(tmp_path)] == [3.0]


def test_where_nothing_is(tmp_path: pathlib.Path) -> None:
    assert not History(tmp_path / "none")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "torn.jsonl").write_bytes(b'{"kind": "st\xff')
    assert not History(tmp_path)
    assert list(History(tmp_path)) == []
    log = EventLog(tmp_path, role="work")
    log.open()
    log("preflight_done")
    assert History(tmp_path)


def test_a_boot_has_a_name() -> None:
    # Of this machine; elsewhere it may have none.
    assert boot_id() == boot_id()
    if os.path.exists("/proc/sys/kernel/random/boot_id"):
        assert len(boot_id()) == 8


def test_thousands_of_files_are_not_open_at_once(tmp_path: pathlib.Path) -> None:
    clocks = Clocks()
    supervisor = clocks.log(tmp_path, "supervise")
    supervisor("phase", name="s")
    for _ in range(600):
        clocks.wait(1.0)
        worker = clocks.log(tmp_path, "work")
        for _ in range(3):
            worker("phase", name="w")
        worker.close()
    clocks.wait(1.0)
    supervisor("phase", name="e")
    num_open = len(os.listdir("/proc/self/fd"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 20, limit[1]))
    try:
        assert "".join(names(History(tmp_path))) == "s" + "w" * 1800 + "e"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_long_history_is_not_held(tmp_path: pathlib.Path) -> None:
    log = Clocks().log(tmp_path, "work")
    for _ in range(200):
        log("phase", name="x" * 100)
    line = log.path.read_bytes()
    log.path.write_bytes(line * 100)
    tracemalloc.start()
    assert sum(1 for _ in History(tmp_path)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(line) * 100 / 4
