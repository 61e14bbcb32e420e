"""What a history teaches, from files as the command writes them."""

import json
import os
import pathlib

import pytest

from jaxft import events
from jaxft.goodput.experience import read_experience

_T0 = 1_700_000_000.0


class _History:
    """An `events` folder, written with a clock that is set by hand."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.now = _T0
        self._num = 0

    def log(self, role: str) -> events.EventLog:
        self.now += 0.001  # Files of one process are told apart by their start.
        self._num += 1
        log = events.EventLog(self.folder, role=role, clock=lambda: self.now)
        log.open()
        return log

    def worker(self, attempt, *, num_saves=3, num_steps=40, step=0.1, role="work"):
        """Start, 5 s to compile, steps of 0.1 s in lines of ten, saves beside some."""
        log = self.log(role)
        log("start", attempt=attempt, argv=[])
        self.now += 5.0
        log("phase", name="train")
        done = 0
        for number in range(num_saves + 1):
            for _ in range(num_steps // 10):
                self.now += 10 * step
                log(
                    "step",
                    step=done + 10,
                    first_step=done + 1,
                    secs=10 * step,
                    data_secs=0.0,
                    metrics={},
                    num_skipped=0,
                )
                done += 10
            if number < num_saves:
                self.now += 0.25
                log(
                    "save_start",
                    step=done,
                    blocking_secs=0.05,
                    planning_secs=0.0,
                )
                self.now += 10 * step
                log(
                    "save_commit",
                    step=done,
                    secs=0.5,
                    num_bytes=1,
                    num_linked=0,
                    linked_bytes=0,
                )
                log(
                    "step",
                    step=done + 10,
                    first_step=done + 1,
                    secs=0.25 + 10 * step,
                    data_secs=0.0,
                    metrics={},
                    num_skipped=0,
                )
                done += 10
        return log

    def exit(self, log, *, cause, step=100, attempt=0):
        log("worker_exit", worker_pid=attempt + 10, status=-9, step=step)
        log(
            "decision",
            action="restart",
            cause=cause,
            reason="",
            delay_secs=0.0,
            budget_left=1,
        )

    def read(self, **more):
        given = {"expected_hours": 24.0, "now_secs": self.now} | more
        return read_experience(self.folder, **given)


@pytest.fixture
def history(tmp_path: pathlib.Path) -> _History:
    return _History(tmp_path / "events")


def _run(history, causes, *, ends=True, step=100):
    """One start of the command whose workers end by `causes`, 2 s apart."""
    log = history.log("supervise")
    for attempt, cause in enumerate(causes):
        log("launch", worker_pid=attempt + 10, attempt=attempt)
        history.worker(attempt)
        history.exit(log, cause=cause, attempt=attempt, step=step)
        history.now += 2.0
    if ends:
        log("supervisor_end", exit_code=0, reason="")
    return log


def test_no_history_is_no_experience(history):
    measured = history.read()
    assert measured.experience.num_failures == 0
    assert measured.experience.secs == 0.0
    assert measured.experience.cost is None
    assert measured.step_secs == 0.0


def test_failures_and_hours_add_up_over_starts(history):
    _run(history, ["killed", "exception", "stopped"])
    history.now += 3600.0  # The command does not run.
    _run(history, ["hang", "finished"])
    measured = history.read()
    assert measured.experience.num_failures == 3
    assert measured.num_restarts == 3
    # 5 s, and 4 times 4 s of steps, and 3 times 1.25 s beside saves, a worker.
    assert measured.experience.secs == pytest.approx(5 * 24.75 + 5 * 2, abs=3)
    # 2 s down and 5 s to compile.
    assert measured.experience.restart_secs == pytest.approx(7.9, abs=0.3)


def test_what_saves_cannot_help_is_no_failure(history):
    _run(history, ["config", "out_of_memory", "nonfinite", "no_checkpoint", "finished"])
    _run(history, ["exception", "save_failed"], step=-1)
    assert history.read().experience.num_failures == 0
    _run(history, ["killed"], step=-1)
    _run(history, ["save_failed"])
    assert history.read().experience.num_failures == 2


def test_a_command_without_an_end_went_down_with_its_host(history):
    log = history.log("supervise")
    log("launch", worker_pid=77, attempt=0)
    history.now += 50.0
    own = history.read(own_pid=77)
    assert own.experience.num_failures == 0
    assert own.experience.secs == pytest.approx(50.0, abs=0.01)
    assert history.read(is_running=True) == own
    assert history.read(own_pid=78).experience.num_failures == 1
    # Its worker wrote for longer than itself.
    path = history.folder / "host-name-work-1-77.jsonl"
    path.write_text("")
    os.utime(path, (_T0 + 500.0, _T0 + 500.0))
    seen = history.read(own_pid=78).experience.secs
    assert seen == pytest.approx(500.0, abs=0.01)


def test_a_notebook_counts_too(history):
    log = history.worker(0, role="notebook")
    log("end", step=1, reason="finished")
    assert history.read().experience.num_failures == 0
    history.worker(0, role="notebook")  # The kernel died: no end.
    measured = history.read()
    assert measured.experience.num_failures == 1
    assert measured.experience.secs == pytest.approx(2 * 24.75, abs=0.1)
    assert history.read(own_pid=os.getpid()).experience.num_failures == 0


def test_costs_are_told_from_the_steps_beside_the_saves(history):
    _run(history, ["killed"])
    measured = history.read()
    assert measured.step_secs == pytest.approx(0.1)
    cost = measured.experience.cost
    assert cost.blocking_secs == pytest.approx(0.05)
    assert cost.write_secs == pytest.approx(0.5)
    assert cost.lost_secs == pytest.approx(0.25)


def test_a_plan_in_the_history_is_better_than_its_lines(history):
    log = history.worker(0)
    fields = dict.fromkeys(events.KINDS["interval"], 1.0)
    log("interval", **fields | {"blocking_secs": 7.0, "write_secs": 2.0})
    assert history.read().experience.cost.blocking_secs == 7.0


def test_what_is_torn_or_strange_teaches_nothing(history):
    _run(history, ["killed", "finished"])
    before = history.read()
    newest = sorted(history.folder.glob("*work*"))[-1]
    strange = {"kind": "step", "time": 1.0, "step": 3, "first_step": 1, "secs": "nan"}
    strange |= {"data_secs": 0, "metrics": {}, "num_skipped": 0}
    negative = {"kind": "interval", "time": 1.0}
    negative |= dict.fromkeys(events.KINDS["interval"], -1.0)
    with newest.open("a") as file:
        file.write(json.dumps(strange) + "\n" + json.dumps(negative) + "\n")
        file.write('{"kind": "save_start", "time": 1, "ste')
    (history.folder / "notes.jsonl").write_text("[]\n" * 10)
    (history.folder / "a-b-work-1.jsonl").mkdir()
    (history.folder / "h-supervise-1-2.jsonl").write_bytes(b"\xff\xfe\n")
    assert history.read() == before


def test_a_long_history_is_read_at_its_ends(history):
    log = history.worker(0, num_saves=2)
    for _ in range(3000):
        log(
            "step",
            step=0,
            first_step=1,
            secs=1e9,
            data_secs=0,
            metrics={},
            num_skipped=0,
        )
    assert log.path.stat().st_size > 400_000
    log("interval", **dict.fromkeys(events.KINDS["interval"], 3.0))
    measured = history.read()
    assert measured.step_secs == pytest.approx(0.1)
    assert measured.experience.cost.blocking_secs == 3.0
