"""`report`: whole, running, broken and empty workdirs, as text and as JSON."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jaxft.cli import __main__ as cli
from jaxft.cli import text
from jaxft.events import EventLog
from jaxft.recovery.workdir import WorkdirLock, is_in_use


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `report ...`: exit code, what it said, what it complained of."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["report", *map(str, words)])
        said = capsys.readouterr()
        assert said.err.count("\n") <= 1, said.err
        return int(code), said.out, said.err

    return run


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A run's history on disk, written by the log that runs write it with."""

    def __init__(self, workdir: pathlib.Path) -> None:
        self.workdir = workdir
        self.clock = Clock()

    def log(self, role: str) -> EventLog:
        log = EventLog(
            self.workdir / "events", role=role, clock=self.clock, uptime=self.clock
        )
        log.open()
        return log

    def live(self, *, steps: range, saved: int) -> None:
        """A worker of this process: `steps`, a second each, and a save in between."""
        log = self.log("work")
        log("start", attempt=0, argv=[])
        log("run", num_steps=20, unit="rows", per_step=1, num_params=1)
        log("phase", name="train")
        for step in steps:
            self.clock.now += 1.0
            fields = {"secs": 1.0, "data_secs": 0.25, "metrics": {}, "num_skipped": 0}
            log("step", step=step, first_step=step, **fields)
        log("save_start", step=saved, blocking_secs=0.0, planning_secs=0)
        fields = {"num_linked": 0, "linked_bytes": 5, "num_bytes": 2_000_000}
        log("save_commit", step=saved, secs=2.0, **fields)
        log.close()
        self.clock.now += 0.125  # It dies a little later.

    def launch(self, log: EventLog, attempt: int) -> None:
        log("launch", worker_pid=os.getpid(), attempt=attempt)
        self.clock.now += 2.0


@pytest.fixture
def broken(tmp_path: pathlib.Path) -> Run:
    """Twelve steps, a kill, four of them again, four new ones, the end."""
    run = Run(tmp_path / "run")
    supervisor = run.log("supervise")
    run.launch(supervisor, 0)
    run.live(steps=range(1, 13), saved=8)
    supervisor("worker_exit", worker_pid=os.getpid(), status=-9, step=12)
    why = {"cause": "killed", "reason": "killed by SIGKILL in phase train"}
    supervisor("decision", action="restart", delay_secs=0.0, budget_left=9, **why)
    run.clock.now += 4.0
    run.launch(supervisor, 1)
    run.live(steps=range(9, 21), saved=20)
    supervisor("worker_exit", worker_pid=os.getpid(), status=0, step=20)
    supervisor("supervisor_end", exit_code=0, reason="finished")
    return run


def test_text(broken: Run, report: Any) -> None:
    code, out, err = report(broken.workdir)
    assert (code, err) == (0, "")
    assert out.isascii()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{broken.workdir}: finished, step 20 of 20"
    wall = 2.0 + 12.125 + 4.0 + 2.0 + 12.125
    assert lines[2].startswith(f"wall time {wall:.1f} s since ")
    # Of 20 steps three quarters of a second each were no waiting.
    assert f"goodput {100 * 15 / wall:.1f} % of it in productive steps" in lines
    assert "steps 20 productive, 4 repeated, 0 not applied" in lines
    assert f"productive step 15.00 {100 * 15 / wall:.2f} %" in lines
    # With what it did at last, of which nobody knows.
    assert f"repeated step 3.25 {100 * 3.25 / wall:.2f} %" in lines
    assert f"down 4.00 {100 * 4 / wall:.2f} %" in lines
    assert "unknown 0.00 0.00 %" in lines
    (row,) = [line for line in lines if "SIGKILL" in line]
    # Four down, two to begin, four steps again.
    assert row.endswith(" killed 12 4 10.1 s killed by SIGKILL in phase train")
    assert "1 incident, 4 steps and 10.1 s lost" in lines
    assert "save, until committed 2 2.00 s 2.00 s 4.00 s 4 MB" in lines
    start, restart = lines[-2:]
    assert start == "first start 0.00 2.00 0.00 0.00 0.00 0.00 1.00 0.00 3.00"
    assert restart == "restart 4.00 2.00 0.00 0.00 0.00 0.00 1.00 0.00 7.00"


def test_json(broken: Run, report: Any) -> None:
    code, out, _ = report(broken.workdir, "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["secs"].values()) == pytest.approx(found["wall_secs"])
    assert found["goodput"] == pytest.approx(15.0 / found["wall_secs"])
    assert (found["step"], found["num_steps"]) == (20, 20)
    assert (found["num_workers"], found["num_repeated_steps"]) == (2, 4)
    assert (found["is_running"], found["ending"]) == (False, "finished")
    assert found["saves"]["whole"]["count"] == 2
    (incident,) = found["incidents"]
    assert incident["kind"] == "killed"
    assert incident["num_lost_steps"] == 4
    assert [one["is_restart"] for one in found["recoveries"]] == [False, True]
    assert found["recoveries"][1]["down_secs"] == 4.0


def test_a_torn_history_is_told_as_far_as_it_goes(broken: Run, report: Any) -> None:
    for path in list((broken.workdir / "events").iterdir()):
        path.write_bytes(path.read_bytes()[:-7])
    (broken.workdir / "events" / "mine.txt").write_text("not of a run")
    (broken.workdir / "events" / "folder.jsonl").mkdir()
    code, out, err = report(broken.workdir)
    assert (code, err) == (0, "")
    assert "ended without a word, step 20 of 20" in out


def test_a_running_one_goes_on_until_now(tmp_path: pathlib.Path, report: Any) -> None:
    with WorkdirLock.acquire(tmp_path / "run") as lock:
        log = EventLog(lock.workdir / "events", role="work")
        log.open()
        log("start", attempt=0, argv=[])
        log("phase", name="compile")
        one, two = (json.loads(report(lock.workdir, "--json")[1]) for _ in range(2))
        assert one["is_running"]
        assert 0 < one["secs"]["compile"] < two["secs"]["compile"]
        assert "running, no step yet" in report(lock.workdir)[1]
    gone = [json.loads(report(lock.workdir, "--json")[1]) for _ in range(2)]
    assert gone[0] == gone[1]
    assert not gone[0]["is_running"]


def test_only_the_newest_of_many_incidents_are_shown(
    tmp_path: pathlib.Path, report: Any
) -> None:
    run = Run(tmp_path)
    log = run.log("work")
    log("start", attempt=0, argv=[])
    for step in range(33):
        log("save_failed", step=step, reason=f"full {step}")
    _, out, _ = report(tmp_path)
    assert "full 32" in out
    assert "full 12\n" not in out
    assert "and 13 earlier ones: see --json" in out
    assert "33 incidents, 0 steps and 0.00 s lost" in out
    assert len(json.loads(report(tmp_path, "--json")[1])["incidents"]) == 33


def test_where_nothing_is_it_says_so_in_one_line(
    tmp_path: pathlib.Path, report: Any
) -> None:
    code, out, err = report(tmp_path / "none")
    assert (code, out) == (66, "")
    assert err == f"jaxft: {tmp_path}/none: there is no such folder\n"
    code, out, err = report(tmp_path)
    assert (code, out) == (66, "")
    assert err.startswith(f"jaxft: no history in {tmp_path}/events: ")
    (tmp_path / "events").write_text("a file")
    assert report(tmp_path)[0] == 66
    (tmp_path / "file").write_text("")
    assert report(tmp_path / "file")[0] == 78


def test_a_look_at_the_lock_leaves_no_trace(tmp_path: pathlib.Path) -> None:
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with WorkdirLock.acquire(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


def test_the_report_needs_no_jax(broken: Run) -> None:
    code = "import sys; from jaxft.cli import __main__ as cli; cli.main(sys.argv[1:])"
    check = "; sys.exit('jax' in sys.modules)"
    words = [sys.executable, "-c", code + check, "report", str(broken.workdir)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("secs", "said"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (99.96, "1 min 40 s"),
        (3599.0, "59 min 59 s"),
        (3599.9, "1 h 0 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_spans(secs: float, said: str) -> None:
    assert text.span(secs) == said
