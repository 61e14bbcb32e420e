"""The supervisor with toy workers: real processes, pipes and signals."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jaxft.config import SupervisorConfig
from jaxft.events import EventLog, read_events
from jaxft.records import ExitCode, FaultKind
from jaxft.recovery.supervisor import Launch, Supervisor
from jaxft.recovery.worker_process import MAX_LINE_BYTES

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# What every toy worker starts with; `attempt` is 0 for the first.
WORKER = """
import json, os, signal, sys, time
attempt, event_fd, parent_fd, lock_fd = map(int, sys.argv[1:5])
cache = sys.argv[5]

def emit(kind, **fields):
    fields = {"kind": kind, "time": time.time(), **fields}
    data = json.dumps(fields).encode() + b"\\n"
    while data:
        data = data[os.write(event_fd, data):]

def step(number):
    emit("step", step=number, first_step=number)

def finish(number=0):
    emit("end", step=number, reason="finished")
    sys.exit(0)

def fault(kind, code, step=-1, evidence=""):
    emit("fault", fault=kind, step=step, process=0, evidence=evidence, exit_code=code)
    sys.exit(code)

def listen():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Run:
    """A supervisor over one worker script, and what it left behind."""

    def __init__(self, folder: pathlib.Path, script: str, **options):
        self.events_folder = folder / "events"
        self.launches: list[Launch] = []
        self.script = WORKER + textwrap.dedent(script)
        self.log = EventLog(self.events_folder, role="supervise")
        config = {"max_restarts": 6, "backoff_secs": 0.01, "backoff_max_secs": 0.02}
        names = ("max_restarts", "refill_steps", "backoff_secs", "backoff_max_secs")
        config |= {name: options.pop(name) for name in names if name in options}
        self.supervisor = Supervisor(
            self._make_argv,
            config=SupervisorConfig(**config),
            signals=SIGNALS,
            grace_secs=options.pop("grace_secs", 5.0),
            emit=self.log,
            **options,
        )

    def _make_argv(self, launch: Launch) -> list[str]:
        self.launches.append(launch)
        numbers = (launch.attempt, launch.event_fd, launch.parent_fd, launch.lock_fd)
        words = [*map(str, numbers), str(launch.cache)]
        return [sys.executable, "-S", "-c", self.script, *words]

    def run(self, *signals: tuple[float, int]):
        """Runs it; each (delay, number) is a signal to this process."""
        timers = [
            threading.Timer(delay, os.kill, (os.getpid(), number))
            for delay, number in signals
        ]
        for timer in timers:
            timer.start()
        try:
            return self.supervisor.run()
        finally:
            self.log.close()
            for timer in timers:
                timer.cancel()
                timer.join()

    def events(self, *kinds: str) -> list[dict]:
        return [e for e in read_events(self.events_folder) if e["kind"] in kinds]


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No descriptor, no child, no handler is left."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def is_alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_dead(pid: int, secs: float = 1.0) -> None:
    deadline = time.monotonic() + secs
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.005)


def test_finishes(tmp_path):
    run = Run(
        tmp_path,
        """
        emit("preflight_done")
        for n in range(1, 4): step(n)
        emit("save_commit", step=3)
        finish(3)
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.FINISHED
    assert outcome.fault is None
    assert (outcome.step, outcome.committed_step, outcome.num_restarts) == (3, 3, 0)
    assert outcome.preflight_done
    kinds = [event["kind"] for event in read_events(run.events_folder)]
    assert kinds == ["launch", "worker_exit", "decision", "supervisor_end"]


def test_killed_workers_are_restarted(tmp_path):
    run = Run(
        tmp_path,
        """
        emit("preflight_done")
        if attempt: emit("restore", step=10 * attempt, secs=0.0, num_bytes=0)
        time.sleep(0.1)
        for n in range(10 * attempt + 1, 10 * attempt + 12): step(n)
        emit("save_commit", step=10 * (attempt + 1))
        if attempt < 3: die()
        finish()
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == 0
    assert outcome.num_restarts == 3
    assert outcome.step == 41
    assert 0.3 < outcome.lost_secs < 3.0
    assert [launch.attempt for launch in run.launches] == [0, 1, 2, 3]
    exits = run.events("worker_exit")
    assert [e["status"] for e in exits] == [-9, -9, -9, 0]
    assert [e["step"] for e in exits] == [11, 21, 31, 41]
    decisions = run.events("decision")
    assert [d["action"] for d in decisions] == ["restart"] * 3 + ["finish"]
    assert {d["cause"] for d in decisions} == {"killed", "finished"}
    assert "killed by SIGKILL" in decisions[0]["reason"]
    assert "out of memory" in decisions[0]["reason"]
    assert [d["budget_left"] for d in decisions] == [5, 4, 3, 3]


def test_loss_of_time_spans_workers_that_die_before_a_step(tmp_path):
    run = Run(
        tmp_path,
        """
        if attempt == 0: step(1); die()
        time.sleep(0.15)
        if attempt == 1: die()
        step(2)
        time.sleep(0.3)
        finish()
        """,
    )
    assert 0.3 < run.run().lost_secs < 2.0


def test_budget_ends_and_says_why(tmp_path):
    run = Run(tmp_path, 'emit("preflight_done"); sys.exit(3)', max_restarts=4)
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 2
    assert outcome.fault.kind is FaultKind.KILLED
    assert "no restart left" in outcome.reason
    assert "left with status 3 in phase start" in outcome.reason
    assert [launch.cache for launch in run.launches] == ["keep", "keep", "off"]


def test_always_failing_at_the_same_place_stops(tmp_path):
    """A program that fails three steps after the start, each time killed."""
    run = Run(
        tmp_path,
        """
        for n in range(1, 4): step(n)
        os.abort()
        """,
        max_restarts=5,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 3  # One with progress, two that count double.
    assert "SIGABRT" in outcome.reason


def test_backoff_waits_only_without_progress(tmp_path):
    run = Run(
        tmp_path,
        """
        if attempt == 0: step(1)
        if attempt == 4: step(2); finish()
        die()
        """,
        max_restarts=20,
        backoff_secs=0.15,
        backoff_max_secs=10.0,
    )
    run.run()
    delays = [d["delay_secs"] for d in run.events("decision")]
    assert delays == [0.0, 0.0, 0.15, 0.3, 0.0]
    launches = [e["time"] for e in run.events("launch")]
    exits = [e["time"] for e in run.events("worker_exit")]
    waited = [b - a for a, b in zip(exits, launches[1:], strict=False)]
    assert waited[2] >= 0.15
    assert waited[3] >= 0.3
    assert waited[0] < 0.15


def test_backoff_by_the_clock_that_is_given(tmp_path):
    ticks = itertools.count(0, 200.0)
    run = Run(
        tmp_path,
        "finish() if attempt == 3 else die()",
        max_restarts=20,
        backoff_secs=1000.0,
        backoff_max_secs=1000.0,
        clock=lambda: next(ticks),
    )
    begun = time.monotonic()
    assert run.run().exit_code == 0
    assert [d["delay_secs"] for d in run.events("decision")] == [0, 1000, 1000, 0]
    assert time.monotonic() - begun < 20


def test_exception_twice_at_the_same_step_stops(tmp_path):
    run = Run(
        tmp_path,
        """
        emit("preflight_done")
        step(7)
        fault("exception", 70, step=7, evidence="Traceback\\nValueError: no")
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 1
    assert outcome.reason == "the same error again at step 7: ValueError: no"
    assert outcome.fault.kind is FaultKind.EXCEPTION
    assert outcome.fault.evidence == "Traceback\nValueError: no"


def test_exception_once_is_forgiven(tmp_path):
    run = Run(
        tmp_path,
        """
        step(7 + attempt)
        if attempt == 0: fault("exception", 70, step=7, evidence="ValueError: no")
        finish()
        """,
    )
    assert run.run().exit_code == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("config", 78),
        ("stopped", 75),
        ("no_checkpoint", 66),
        ("nonfinite", 65),
        ("out_of_memory", 77),
        ("save_failed", 74),
    ],
)
def test_faults_that_end_the_run(tmp_path, kind, code):
    run = Run(
        tmp_path,
        f"""
        emit("preflight_done")
        fault({kind!r}, {code}, step=5, evidence="one line")
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == code
    assert outcome.num_restarts == 0
    assert outcome.fault.kind == kind
    assert outcome.reason == "one line"
    # By the exit status alone, where the pipe was of no use.
    outcome = Run(tmp_path / "mute", f"sys.exit({code})").run()
    assert outcome.exit_code == code
    assert outcome.fault.kind == kind


def test_refused_before_the_preflight_writes_nothing(tmp_path):
    run = Run(tmp_path, 'fault("config", 78, evidence="config.x: no")')
    outcome = run.run()
    assert (outcome.exit_code, outcome.reason) == (78, "config.x: no")
    assert not outcome.preflight_done
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_after_restarts_keeps_the_history(tmp_path):
    run = Run(tmp_path, 'fault("config", 78, evidence="no") if attempt else die()')
    outcome = run.run()
    assert outcome.exit_code == 78
    assert outcome.preflight_done
    assert len(run.events("decision")) == 2


def test_the_fault_event_wins_over_the_status(tmp_path):
    run = Run(tmp_path, 'emit("fault", fault="nonfinite", step=3, evidence="x"); die()')
    assert run.run().exit_code == ExitCode.NONFINITE


def test_an_unknown_fault_leaves_the_status(tmp_path):
    run = Run(tmp_path, 'emit("fault", fault="gremlins", step="?"); sys.exit(77)')
    assert run.run().exit_code == ExitCode.OUT_OF_MEMORY


def test_zero_without_an_end_is_not_finished(tmp_path):
    run = Run(tmp_path, "finish() if attempt else os._exit(0)")
    outcome = run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (0, 1)
    assert "not finished" in run.events("decision")[0]["reason"]


def test_a_crash_after_the_end_is_finished(tmp_path):
    run = Run(tmp_path, 'emit("end", step=9, reason="finished"); os.abort()')
    assert run.run().exit_code == 0


def test_a_worker_that_cannot_be_started(tmp_path):
    run = Run(tmp_path, "", max_restarts=2)
    run._make_argv = None
    run.supervisor._make_argv = lambda launch: [str(tmp_path / "no-python")]
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert "could not be started" in outcome.reason


def test_pipe_closed_early(tmp_path):
    run = Run(
        tmp_path,
        """
        step(1)
        os.close(event_fd)
        time.sleep(0.3)
        sys.exit(77)
        """,
    )
    cpu = time.process_time()
    assert run.run().exit_code == ExitCode.OUT_OF_MEMORY
    assert time.process_time() - cpu < 0.25  # It does not spin on the closed pipe.


def test_huge_torn_and_foreign_lines(tmp_path):
    run = Run(
        tmp_path,
        """
        def write(data):
            while data:
                data = data[os.write(event_fd, data):]
        write(b"\\xff\\xfe not json\\n[1, 2]\\n\\n{}\\n")
        emit("step", step=5, first_step=5, metrics="x" * (5 << 20))
        emit("step", step="six")
        emit("no such kind")
        emit("save_commit", step=5)
        if attempt: finish()
        write(b'{"kind": "end", "time": 1, "reason": "finished"')
        sys.exit(0)
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == 0
    assert outcome.num_restarts == 1
    assert (outcome.step, outcome.committed_step) == (5, 5)


def test_a_line_without_end_is_dropped(tmp_path):
    run = Run(
        tmp_path,
        f"""
        piece = b"x" * (1 << 20)
        for _ in range({MAX_LINE_BYTES} // len(piece) + 2):
            rest = piece
            while rest: rest = rest[os.write(event_fd, rest):]
        os.write(event_fd, b"\\n")
        step(4)
        finish()
        """,
    )
    assert run.run().step == 4


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_passed_on_and_the_run_is_stopped(tmp_path, number):
    run = Run(
        tmp_path,
        """
        emit("preflight_done")
        def save(number, frame):
            emit("stop_request", reason=signal.Signals(number).name)
            emit("save_commit", step=8)
            emit("end", step=8, reason="stopped")
            os._exit(75)
        for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(n, save)
        listen()
        time.sleep(20)
        """,
    )
    outcome = run.run((0.3, number))
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.num_restarts == 0
    assert outcome.committed_step == 8
    assert outcome.fault.kind is FaultKind.STOPPED
    assert outcome.reason == f"stopped by {number.name}"
    assert run.events("decision")[0]["action"] == "stop"


def test_a_signal_while_python_starts_is_not_lost(tmp_path):
    """The worker does not listen yet: neither a traceback nor a lost request."""
    run = Run(
        tmp_path,
        """
        time.sleep(0.3)
        signal.signal(signal.SIGINT, lambda n, f: os._exit(75))
        listen()
        time.sleep(20)
        """,
    )
    begun = time.monotonic()
    outcome = run.run((0.01, signal.SIGINT))
    assert outcome.exit_code == ExitCode.STOPPED
    assert not outcome.preflight_done
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - begun < 3


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace(tmp_path):
    run = Run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        emit("preflight_done")
        emit("save_commit", step=40)
        time.sleep(20)
        """,
        grace_secs=0.4,
    )
    begun = time.monotonic()
    outcome = run.run((0.2, signal.SIGTERM))
    assert 0.6 <= time.monotonic() - begun < 2.0
    assert outcome.exit_code == ExitCode.STOPPED
    assert "left on the last committed step 40" in outcome.reason
    assert "the time to stop was over" in outcome.reason
    assert outcome.num_restarts == 0


def test_a_worker_that_stops_by_itself_gets_the_same_grace(tmp_path):
    run = Run(
        tmp_path,
        """
        emit("preflight_done")
        emit("stop_request", reason="time limit")
        time.sleep(20)
        """,
        grace_secs=0.3,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.reason.startswith("stopped by time limit, left before any step")


COUNT_SIGNALS = """
emit("preflight_done")
count = 0
def note(number, frame):
    global count
    count += 1
    emit("save_commit", step=count)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
listen()
end = time.monotonic() + 20
while time.monotonic() < end: time.sleep(0.01)
"""


def test_the_same_signal_again_within_three_seconds_is_one_request(tmp_path):
    run = Run(tmp_path, COUNT_SIGNALS, grace_secs=1.0)
    begun = time.monotonic()
    moments = (0.3, 0.35, 0.6, 0.9)
    outcome = run.run(*((moment, signal.SIGINT) for moment in moments))
    assert time.monotonic() - begun >= 1.3  # The whole grace time.
    assert outcome.committed_step == 1  # Passed on once.


def test_the_same_signal_later_means_now(tmp_path):
    # Hours of grace, and each look at the clock takes a second.
    ticks = itertools.count(0, 1.0)
    run = Run(tmp_path, COUNT_SIGNALS, grace_secs=1e9, clock=lambda: float(next(ticks)))
    outcome = run.run((0.3, signal.SIGINT), (1.5, signal.SIGINT))
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.reason.startswith("stopped by SIGINT, left on the last committed")
    assert outcome.committed_step == 2 or "the time to stop was over" in outcome.reason


def test_another_signal_is_passed_on_and_hurries_nobody(tmp_path):
    run = Run(tmp_path, COUNT_SIGNALS, grace_secs=1.0)
    begun = time.monotonic()
    outcome = run.run((0.3, signal.SIGINT), (0.6, signal.SIGTERM))
    assert time.monotonic() - begun >= 1.3
    assert outcome.committed_step == 2
    assert outcome.reason.startswith("stopped by SIGINT")


def test_a_stop_while_waiting_to_restart_ends_at_once(tmp_path):
    run = Run(
        tmp_path,
        'emit("save_commit", step=2); die()',
        backoff_secs=60.0,
        backoff_max_secs=60.0,
    )
    begun = time.monotonic()
    outcome = run.run((0.6, signal.SIGTERM))
    assert time.monotonic() - begun < 5
    assert outcome.exit_code == ExitCode.STOPPED
    assert "left on the last committed step 2" in outcome.reason
    assert outcome.num_restarts == 1


def test_a_death_after_a_request_is_not_restarted(tmp_path):
    run = Run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, lambda n, f: os.abort())
        listen()
        time.sleep(20)
        """,
    )
    outcome = run.run((0.3, signal.SIGTERM))
    assert outcome.exit_code == ExitCode.STOPPED
    assert "SIGABRT" in outcome.reason
    assert outcome.num_restarts == 0


def test_finishing_after_a_request_is_finished(tmp_path):
    run = Run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, lambda n, f: finish(9))
        listen()
        time.sleep(20)
        """,
    )
    assert run.run((0.3, signal.SIGTERM)).exit_code == ExitCode.FINISHED


def test_children_of_a_dead_worker_are_killed(tmp_path):
    """They hold the pipe's end, and the worker's death is seen all the same."""
    run = Run(
        tmp_path,
        f"""
        if attempt: finish()
        for _ in range(3):
            if os.fork() == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
                time.sleep(60)
                os._exit(0)
            with open({str(tmp_path / "pids")!r}, "a") as file:
                print(os.getpid(), file=file)
        children = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read()
        with open({str(tmp_path / "pids")!r}, "w") as file:
            file.write(children)
        die()
        """,
    )
    begun = time.monotonic()
    assert run.run().exit_code == 0
    assert time.monotonic() - begun < 3
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    for pid in pids:
        wait_until_dead(int(pid))


def test_the_environment_is_passed_on(tmp_path):
    env = os.environ | {"JAXFT_TEST": "yes"}
    run = Run(tmp_path, 'assert os.environ["JAXFT_TEST"] == "yes"; finish()', env=env)
    assert run.run().exit_code == 0


def test_runs_in_another_thread(tmp_path):
    run = Run(tmp_path, "finish() if attempt else die()")
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(run.run()))
    thread.start()
    thread.join()
    assert outcomes[0].num_restarts == 1


# A whole command: lock, supervisor, and a worker that is linked to it.
COMMAND = """
import signal, sys
from jaxft.config import SupervisorConfig
from jaxft.events import EventLog
from jaxft.records import FaultError
from jaxft.recovery.supervisor import Supervisor
from jaxft.recovery.workdir import WorkdirLock

WORKER = '''
import os, sys, time
from jaxft.config import PreemptionConfig
from jaxft.events import EventLog
from jaxft.faults.preemption import StopRequests
from jaxft.recovery.worker_link import SupervisorLink
event_fd, parent_fd, lock_fd = map(int, sys.argv[1:4])
link = SupervisorLink(event_fd, parent_fd, lock_fd=lock_fd)
log = EventLog(sys.argv[4], role="work", tee=link.send)
with StopRequests(PreemptionConfig(), emit=log) as stops:
    log("preflight_done")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print("worker", os.getpid(), child, flush=True)
    while stops.poll() is None:
        BUSY
    log("save_commit", step=1, secs=0.0, num_bytes=0)
log("end", step=1, reason="stopped")
link.close()
os._exit(75)
'''.replace("BUSY", sys.argv[2])

try:
    lock = WorkdirLock.acquire(sys.argv[1])
except FaultError as error:
    print(error.fault.evidence, flush=True)
    sys.exit(error.fault.exit_code)
outcome = Supervisor(
    lambda launch: [sys.executable, "-c", WORKER, *map(str, (
        launch.event_fd, launch.parent_fd, launch.lock_fd, lock.workdir / "events"))],
    config=SupervisorConfig(),
    signals=(signal.SIGTERM, signal.SIGINT),
    grace_secs=5.0,
    emit=EventLog(lock.workdir / "events", role="supervise"),
    lock_fd=lock.fileno(),
).run()
lock.release()
print("outcome", int(outcome.exit_code), outcome.committed_step, outcome.num_restarts)
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def command(tmp_path):
    """Starts the command on one workdir; returns it and its first line's words."""
    started = []

    def start(busy: str = "time.sleep(0.01)") -> tuple[subprocess.Popen, list[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path / "run"), busy],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process, process.stdout.readline().split()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_group_signal_is_one_request(command, tmp_path):
    """As srun does: the supervisor and the worker both get the signal."""
    process, (_, worker, child) = command()
    os.kill(int(worker), signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.split() == ["outcome", "75", "1", "0"]
    assert process.returncode == 75
    wait_until_dead(int(child))
    requests = [
        event
        for event in read_events(tmp_path / "run" / "events")
        if event["kind"] == "stop_request"
    ]
    assert len(requests) <= 1  # The worker's log was not opened: none on disk.


@pytest.mark.parametrize(
    "busy",
    ["time.sleep(60)", "sum(range(10**10))"],
    ids=["sleeping", "holding the GIL"],
)
def test_a_killed_supervisor_takes_all_with_it_and_frees_the_lock(command, busy):
    process, (_, worker, child) = command(busy)
    process.kill()
    begun = time.monotonic()
    second, words = command()
    assert words[0] == "worker"
    assert time.monotonic() - begun < 5.0
    assert not is_alive(int(worker))
    wait_until_dead(int(child))
    second.send_signal(signal.SIGTERM)
    assert second.communicate(timeout=20)[0].split() == ["outcome", "75", "1", "0"]


def test_the_worker_dies_within_a_second(command):
    process, (_, worker, child) = command("sum(range(10**10))")
    process.kill()
    wait_until_dead(int(worker), 1.0)
    wait_until_dead(int(child), 1.0)


def test_a_second_start_is_refused_by_name(command):
    first, _ = command()
    second, words = command()
    second.wait(timeout=20)
    assert second.returncode == ExitCode.WORKDIR_IN_USE
    text = " ".join(words)
    assert f"is in use by process {first.pid} on " in text
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=20) == 75


def test_a_killed_worker_is_replaced_under_the_same_lock(command):
    process, (_, worker, child) = command()
    os.kill(int(worker), signal.SIGKILL)
    words = process.stdout.readline().split()
    assert words[0] == "worker"
    assert words[1] != worker
    wait_until_dead(int(child))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0].split() == ["outcome", "75", "1", "1"]


def test_starts_without_jax_and_fast():
    script = """
import sys, time
begun = time.process_time()
import jaxft.recovery.supervisor, jaxft.recovery.workdir, jaxft.recovery.worker_link
banned = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore"}
print(time.process_time() - begun, *(banned & set(sys.modules)))
"""
    tries = [
        subprocess.check_output([sys.executable, "-c", script], text=True).split()
        for _ in range(3)
    ]
    assert all(len(words) == 1 for words in tries), tries
    assert min(float(words[0]) for words in tries) < 0.3
