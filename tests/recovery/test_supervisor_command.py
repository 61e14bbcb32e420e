"""Lock, supervisor and a linked worker as one command: who dies with whom."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxft.events import read_events
from jaxft.records import ExitCode

pytestmark = pytest.mark.usefixtures("nothing_leaks")

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
from jaxft.events import KINDS, EventLog
from jaxft.faults.preemption import StopRequests
from jaxft.recovery.worker_link import SupervisorLink
event_fd, parent_fd, *lock_fds = map(int, sys.argv[2:])
link = SupervisorLink(event_fd, parent_fd, lock_fds=lock_fds)
log = EventLog(sys.argv[1], role="work", tee=link.send)
with StopRequests(PreemptionConfig(), emit=log) as stops:
    log("preflight_done")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print("worker", os.getpid(), child, flush=True)
    while stops.poll() is None:
        BUSY
    log("save_commit", **dict.fromkeys(KINDS["save_commit"], 0) | {"step": 1})
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
        lock.workdir / "events", launch.event_fd, launch.parent_fd,
        *launch.lock_fds))],
    config=SupervisorConfig(),
    signals=(signal.SIGTERM, signal.SIGINT),
    grace_secs=5.0,
    emit=EventLog(lock.workdir / "events", role="supervise"),
    lock=lock,
).run()
lock.release(undo=not outcome.preflight_done)
print("outcome", int(outcome.exit_code), outcome.committed_step, outcome.num_restarts)
if outcome.fault.kind == "workdir_in_use":
    print(outcome.reason)
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def command(tmp_path):
    """Starts the command on one workdir; returns it and its first line's words."""
    started = []

    def start(
        busy: str = "time.sleep(0.01)", *, job: bool = False
    ) -> tuple[subprocess.Popen, list[str]]:
        # A shell's job has a group in the shell's session; only such a one can be
        # stopped by Ctrl-Z.
        group = {"process_group": 0} if job else {"start_new_session": True}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path / "run"), busy],
            stdout=subprocess.PIPE,
            text=True,
            **group,
        )
        started.append(process)
        return process, process.stdout.readline().split()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_group_signal_is_one_request(command, tmp_path, wait_until_dead):
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
def test_a_killed_supervisor_takes_all_with_it_and_frees_the_lock(
    command, busy, is_alive, wait_until_dead
):
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


def test_the_worker_dies_within_a_second(command, wait_until_dead):
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


def test_a_killed_worker_is_replaced_under_the_same_lock(command, wait_until_dead):
    process, (_, worker, child) = command()
    os.kill(int(worker), signal.SIGKILL)
    words = process.stdout.readline().split()
    assert words[0] == "worker"
    assert words[1] != worker
    wait_until_dead(int(child))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0].split() == ["outcome", "75", "1", "1"]


def state(pid: int) -> str:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def wait_for_states(pids: list[int], states: str) -> None:
    deadline = time.monotonic() + 5
    while not all(state(pid) in states for pid in pids):
        assert time.monotonic() < deadline, [state(pid) for pid in pids]
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["file", "file again", "folder", "folder again"])
def test_a_lock_that_was_removed_ends_the_run(command, tmp_path, wait_until_dead, how):
    """Somebody took it for stale: two runs must not write into one workdir."""
    process, (_, worker, _) = command()
    workdir = tmp_path / "run"
    if "file" in how:
        (workdir / "lock").unlink()
    else:
        workdir.rename(tmp_path / "aside")
    if "again" in how:
        workdir.mkdir(exist_ok=True)
        (workdir / "lock").write_text("another's")
    out, _ = process.communicate(timeout=5)
    assert process.returncode == ExitCode.WORKDIR_IN_USE
    assert "removed or replaced while the run went on" in out
    wait_until_dead(int(worker))
    if "again" in how:
        assert (workdir / "lock").read_text() == "another's"


def test_ctrl_z_stops_the_worker_too_and_fg_wakes_it(command, tmp_path):
    process, (_, worker, child) = command(job=True)
    pids = [process.pid, int(worker), int(child)]
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTSTP)
        wait_for_states(pids, "T")
        time.sleep(0.2)  # Long enough to be told.
        os.killpg(process.pid, signal.SIGCONT)
        wait_for_states(pids, "SR")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0].split() == ["outcome", "75", "1", "0"]
    events = read_events(tmp_path / "run" / "events")
    told = [event["secs"] for event in events if event["kind"] == "suspended"]
    assert len(told) == 2
    assert min(told) >= 0.2


def test_ctrl_z_where_nobody_could_wake_it_changes_nothing(command):
    process, (_, worker, _child) = command()
    os.kill(process.pid, signal.SIGTSTP)
    time.sleep(0.3)
    wait_for_states([process.pid, int(worker)], "SR")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0].split() == ["outcome", "75", "1", "0"]
