"""Supervisors of one job with toy workers: they agree without a master."""

from __future__ import annotations

import pathlib
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest

from jaxft.config import SupervisorConfig
from jaxft.events import KINDS, EventLog, read_events
from jaxft.records import ExitCode, FaultKind
from jaxft.recovery.council import member_name
from jaxft.recovery.generations import Generations, Seat
from jaxft.recovery.job_supervisor import JobRules, JobSupervisor
from jaxft.recovery.supervisor import Outcome
from jaxft.recovery.worker_process import Launch

pytestmark = pytest.mark.usefixtures("nothing_leaks")

# What every toy worker starts with; it is `index` of `size` in `generation`.
WORKER = f"FIELDS = { {kind: list(fields) for kind, fields in KINDS.items()} }"
WORKER += """
import json, os, signal, sys, time
event_fd, index, size, generation, attempt = map(int, sys.argv[1:6])
cache = sys.argv[6]

def emit(kind, **fields):
    fields = {**dict.fromkeys(FIELDS.get(kind, ()), 0), **fields}
    fields = {"kind": kind, "time": time.time(), **fields}
    os.write(event_fd, json.dumps(fields).encode() + b"\\n")

def step(number):
    emit("step", step=number, first_step=number)

def finish(number=0):
    emit("end", step=number, reason="finished")
    sys.exit(0)

def fault(kind, code, step=-1, evidence=""):
    emit("fault", fault=kind, step=step, process=0, evidence=evidence, exit_code=code)
    sys.exit(code)

def stop(*_):
    emit("stop_request", reason="SIGTERM")
    emit("end", step=5, reason="stopped")
    sys.exit(75)

def listen():
    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    time.sleep(60)
    os._exit(1)
"""


class Member:
    """One member, in a thread of its own."""

    def __init__(self, job: Job, index: int, incarnation: str):
        self.outcome: Outcome | None = None
        self.told: list[str] = []
        self._job = job
        self._log = EventLog(job.folder / "events" / str(index), role="supervise")
        self.supervisor = JobSupervisor(
            self._make_argv,
            seat=Seat(name=member_name(index), incarnation=incarnation),
            workdir=job.folder,
            rules=job.rules,
            find_address=lambda: f"127.0.0.1:{next(job.ports)}",
            refuse=job.refuse,
            config=SupervisorConfig(max_restarts=4, backoff_secs=0.01),
            signals=(signal.SIGTERM,),
            grace_secs=5.0,
            emit=self._log,
            tell=self.told.append,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _make_argv(self, launch: Launch) -> list[str]:
        place = launch.place
        self._job.launches.append((time.monotonic(), launch))
        numbers = (
            *(launch.event_fd, place.process_index, place.num_processes),
            *(place.generation, launch.attempt),
        )
        words = [*map(str, numbers), str(launch.cache)]
        return [sys.executable, "-S", "-c", self._job.script, *words]

    def _run(self) -> None:
        self.outcome = self.supervisor.run()

    def join(self) -> Outcome:
        self._thread.join(60)
        self._log.close()
        assert self.outcome is not None
        return self.outcome


class Job:
    """Members over one worker script."""

    def __init__(self, folder: pathlib.Path, script: str, size: int, **rules: float):
        self.folder = folder
        self.script = WORKER + textwrap.dedent(script)
        self.launches: list[tuple[float, Launch]] = []
        self.ports = iter(range(6001, 7000))
        self.files = Generations(folder)
        self.refuse: Callable[[int], str] = lambda _: ""
        # Six times as long as a beat takes, on a machine that does other things.
        told = {"lost_secs": 6.0, "wait_secs": 30.0} | rules
        self.rules = JobRules(num_configured=size, **told)

    def start(self, *indices: int, incarnation: str = "a") -> list[Member]:
        return [Member(self, index, incarnation) for index in indices]

    def events(self, index: int, kind: str) -> list[dict]:
        found = read_events(self.folder / "events" / str(index))
        return [event for event in found if event["kind"] == kind]


@pytest.fixture
def make_job(tmp_path: pathlib.Path) -> Callable[..., Job]:
    def make(script: str, *, size: int = 2, **rules: float) -> Job:
        return Job(tmp_path, script, size, **rules)

    return make


def test_all_finish(make_job):
    job = make_job(
        """
        emit("preflight_done")
        step(3)
        finish(3)
        """,
        size=3,
    )
    members = job.start(2, 0, 1)
    outcomes = [member.join() for member in members]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.FINISHED}
    assert [member.supervisor.speaks for member in members] == [False, True, False]
    places = [launch.place for _, launch in job.launches]
    assert sorted(place.process_index for place in places) == [0, 1, 2]
    assert {(p.num_processes, p.generation) for p in places} == {(3, 1)}
    assert {place.coordinator for place in places} == {"127.0.0.1:6001"}
    assert job.files.end(1).cause == "finished"


def test_when_one_dies_all_begin_anew(make_job):
    job = make_job(
        """
        emit("preflight_done")
        step(generation)
        if generation == 2:
            emit("save_commit", step=2)
            finish(2)
        if index == 1:
            time.sleep(0.3)
            die()
        wait()
        """,
        size=3,
    )
    members = job.start(0, 1, 2)
    outcomes = [member.join() for member in members]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.FINISHED}
    assert [launch.attempt for _, launch in job.launches] == [0, 0, 0, 1, 1, 1]
    assert len({launch.place.coordinator for _, launch in job.launches}) == 2
    second = job.files.read(2)
    assert "killed by SIGKILL" in second.reason
    assert second.proposer == "process-0"
    downs = job.files.downs(job.files.read(1))
    assert [downs[name].called_off for name in sorted(downs)] == [True, False, True]
    times = [down.time_secs for down in downs.values()]
    assert max(times) - min(times) < 3.0
    (call_off,) = job.events(0, "call_off")
    assert call_off["member"] == "process-1"
    assert job.events(1, "call_off") == []
    assert ["killed by SIGKILL" in text for text in members[0].told] == [True]
    assert members[1].told == []


def test_the_budget_is_the_jobs(make_job):
    job = make_job(
        """
        emit("preflight_done")
        if index == generation % 2:
            die()
        wait()
        """
    )
    outcomes = [member.join() for member in job.start(0, 1)]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.CRASHED}
    assert "no restart left: 3 workers died" in outcomes[0].verdict
    assert job.files.newest_number() == 3
    # As with a worker alone: after two deaths before a step the cache is a suspect.
    assert [job.files.read(n).cache for n in (1, 2, 3)] == ["keep", "keep", "off"]


def test_a_wrong_config_ends_all_at_once(make_job):
    job = make_job(
        """
        if index == 1:
            fault("config", 78, evidence="train.num_steps: is wrong")
        wait()
        """
    )
    members = job.start(0, 1)
    outcomes = [member.join() for member in members]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.CONFIG}
    assert {o.fault.evidence for o in outcomes} == {"train.num_steps: is wrong"}
    assert not any(outcome.preflight_done for outcome in outcomes)
    assert job.files.newest_number() == 1
    assert not (job.folder / "events").exists()


def test_what_others_met_is_no_cause(make_job):
    job = make_job(
        """
        emit("preflight_done")
        step(1)
        if generation == 2:
            finish()
        if index == 0:
            fault("peer_lost", 69, evidence="process 1 is gone")
        time.sleep(0.5)
        fault("hang", 71, step=1, evidence="no progress in a queue")
        """
    )
    outcomes = [member.join() for member in job.start(0, 1)]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.FINISHED}
    # The other one was called off before it could say more than it had.
    assert job.files.read(2).reason


def test_a_stop_is_for_all(make_job):
    job = make_job(
        """
        listen()
        emit("preflight_done")
        step(1)
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
        time.sleep(0.5)  # It hears of it by the control word.
        emit("stop_request", reason="a request to another process")
        emit("end", step=5, reason="stopped")
        sys.exit(75)
        """
    )
    outcomes = [member.join() for member in job.start(0, 1)]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.STOPPED}
    downs = job.files.downs(job.files.read(1))
    assert {down.ended.kind for down in downs.values()} == {FaultKind.STOPPED}
    assert not any(down.called_off for down in downs.values())
    # A new start of the command goes on, with a new budget.
    job.script = WORKER + "emit('preflight_done')\nfinish(9)"
    outcomes = [member.join() for member in job.start(0, 1, incarnation="b")]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.FINISHED}
    second = job.files.read(2)
    assert (second.number, second.attempt) == (2, 0)


def test_who_never_comes_is_named(make_job):
    job = make_job("finish()", size=3, wait_secs=0.5)
    outcomes = [member.join() for member in job.start(0, 2)]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.PEER_LOST}
    # How the other one looked depends on who gave up first.
    reasons = {outcome.reason for outcome in outcomes}
    assert all("process-1" in reason for reason in reasons)
    assert all("did not come within 0.5 s" in reason for reason in reasons)
    assert job.launches == []


ELASTIC = """
    listen()
    emit("preflight_done")
    step(generation)
    if size == 2:
        finish()
    wait()
"""


def test_fewer_go_on_and_all_when_they_are_back(make_job):
    job = make_job(ELASTIC, wait_secs=0.5, min_processes=1)
    (one,) = job.start(0)
    deadline = time.monotonic() + 30
    while not job.launches:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (other,) = job.start(1)
    outcomes = [one.join(), other.join()]
    assert {outcome.exit_code for outcome in outcomes} == {ExitCode.FINISHED}
    first, second = job.files.read(1), job.files.read(2)
    assert [len(first.members), len(second.members)] == [1, 2]
    assert second.reason == "process-1 came back"
    assert second.num_configured == 2
    assert job.files.returned(1) == ("process-1",)
    assert len(job.events(0, "regroup")) == 1
    assert job.files.newest_number() == 2


def test_where_fewer_cannot_go_on_it_says_so(make_job):
    job = make_job(ELASTIC, wait_secs=0.2, min_processes=1)
    job.refuse = lambda number: f"cannot be split over {number} processes"
    outcomes = [member.join() for member in job.start(1)]
    assert outcomes[0].exit_code is ExitCode.CONFIG
    assert outcomes[0].reason == "cannot be split over 1 processes"
    assert job.launches == []
