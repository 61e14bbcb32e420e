"""The workdir's lock: real processes, real kills."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from jaxft.records import FaultError, FaultKind
from jaxft.recovery import workdir
from jaxft.recovery.workdir import WorkdirLock

OWNER = """
import sys, time
from jaxft.recovery.workdir import WorkdirLock
lock = WorkdirLock.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""
# The lock goes on living in a child that inherited it, as a worker does.
OWNER_WITH_WORKER = """
import subprocess, sys, time
from jaxft.recovery.workdir import WorkdirLock
lock = WorkdirLock.acquire(sys.argv[1])
worker = subprocess.Popen(
    [sys.executable, "-c", f"import time; time.sleep({sys.argv[2]})"],
    pass_fds=lock.filenos(),
    stdout=subprocess.DEVNULL,
)
print("held", worker.pid, flush=True)
time.sleep(60)
"""

# A child by fork alone, as a data loader may make one: it is no worker.
OWNER_WITH_CHILD = """
import os, sys, time
from jaxft.recovery.workdir import WorkdirLock
lock = WorkdirLock.acquire(sys.argv[1])
told, tell = os.pipe()
pid = os.fork()
if pid == 0:
    lock.release(undo=True)  # Nor does it undo what is not its own.
    os.write(tell, b"y")
    time.sleep(60)
    os._exit(0)
os.read(told, 1)
print("held", pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start():
    """Starts a script; ended with the test at the latest."""
    started = []

    def start(script: str, *args: object) -> tuple[subprocess.Popen, list[str]]:
        argv = [sys.executable, "-c", script, *map(str, args)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().split()

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def refusal(workdir: object, **options) -> tuple[FaultKind, str]:
    with pytest.raises(FaultError) as caught:
        WorkdirLock.acquire(workdir, **options)
    text = caught.value.fault.evidence
    assert "\n" not in text
    assert text
    return caught.value.fault.kind, text


def test_makes_the_folder_and_names_the_owner(tmp_path):
    with WorkdirLock.acquire(tmp_path / "a" / "b") as lock:
        assert lock.workdir == tmp_path / "a" / "b"
        owner = json.loads((tmp_path / "a/b/lock").read_text())
        assert owner["pid"] == os.getpid()
        assert len(lock.filenos()) == 2
        assert not any(map(os.get_inheritable, lock.filenos()))
    with WorkdirLock.acquire(tmp_path / "a" / "b"):
        pass


def test_a_second_start_is_refused_at_once_and_names_the_first(tmp_path, start):
    owner, _ = start(OWNER, tmp_path)
    begun = time.monotonic()
    kind, text = refusal(tmp_path)
    assert time.monotonic() - begun < 1.0
    assert kind is FaultKind.WORKDIR_IN_USE
    assert f"process {owner.pid} on " in text
    assert str(tmp_path) in text
    # The text of the owner is untouched by the refusal.
    assert json.loads((tmp_path / "lock").read_text())["pid"] == owner.pid


def test_the_same_process_is_refused_too(tmp_path):
    with WorkdirLock.acquire(tmp_path):
        assert refusal(tmp_path)[0] is FaultKind.WORKDIR_IN_USE


def test_takes_over_at_once_after_a_kill(tmp_path, start):
    owner, _ = start(OWNER, tmp_path)
    # Not reaped: a zombie is as dead as anything.
    owner.kill()
    begun = time.monotonic()
    with WorkdirLock.acquire(tmp_path):
        assert time.monotonic() - begun < 1.0


def test_waits_for_what_a_dead_owner_left_running(tmp_path, start):
    owner, _ = start(OWNER_WITH_WORKER, tmp_path, 0.6)
    owner.kill()
    begun = time.monotonic()
    with WorkdirLock.acquire(tmp_path):
        assert 0.1 < time.monotonic() - begun < 5.0


def test_a_worker_that_outlives_its_owner_keeps_others_out(tmp_path, start):
    owner, (_, worker_pid) = start(OWNER_WITH_WORKER, tmp_path, 30)
    owner.kill()
    owner.wait()
    try:
        kind, text = refusal(tmp_path, takeover_secs=0.2)
        assert kind is FaultKind.WORKDIR_IN_USE
        assert f"what the dead process {owner.pid}" in text
    finally:
        os.kill(int(worker_pid), signal.SIGKILL)


def test_a_forked_child_neither_frees_nor_keeps_the_lock(tmp_path, start):
    owner, (_, child_pid) = start(OWNER_WITH_CHILD, tmp_path / "run")
    try:
        assert f"process {owner.pid} on" in refusal(tmp_path / "run")[1]
        owner.kill()
        owner.wait()
        os.kill(int(child_pid), 0)
        begun = time.monotonic()
        with WorkdirLock.acquire(tmp_path / "run", takeover_secs=3.0):
            assert time.monotonic() - begun < 1.0
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


def test_an_owner_on_another_host_is_taken_to_live(tmp_path):
    with WorkdirLock.acquire(tmp_path):
        owner = {"pid": 2**22 + 1, "host": "elsewhere", "since": "then"}
        (tmp_path / "lock").write_text(json.dumps(owner))
        begun = time.monotonic()
        assert "on elsewhere since then" in refusal(tmp_path)[1]
        assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\xff"])
def test_an_unreadable_owner_is_somebody(tmp_path, text):
    with WorkdirLock.acquire(tmp_path):
        (tmp_path / "lock").write_bytes(text.encode("latin-1"))
        now = iter(range(100))
        kind, said = refusal(tmp_path, clock=lambda: next(now), sleep=lambda secs: None)
    assert kind is FaultKind.WORKDIR_IN_USE
    assert "has not said who" in said


def test_undo_leaves_nothing_behind(tmp_path):
    WorkdirLock.acquire(tmp_path / "a" / "b").release(undo=True)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    workdir = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt), WorkdirLock.acquire(workdir):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="other"), WorkdirLock.acquire(workdir):
        raise ValueError("other")
    assert (workdir / "lock").exists()


def test_undo_leaves_what_was_there(tmp_path):
    WorkdirLock.acquire(tmp_path / "run").release()
    (tmp_path / "run" / "checkpoints").mkdir()
    before = (tmp_path / "run" / "lock").read_bytes()
    (tmp_path / "run" / "lock").write_bytes(before + b"longer than before\n")
    before = (tmp_path / "run" / "lock").read_bytes()
    WorkdirLock.acquire(tmp_path / "run").release(undo=True)
    assert (tmp_path / "run" / "lock").read_bytes() == before
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_undo_never_deletes_data(tmp_path):
    lock = WorkdirLock.acquire(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    lock.release(undo=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_refused_start_undoes_its_folders(tmp_path):
    (tmp_path / "file").write_text("x")
    refusal(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "x"


def test_a_waiting_start_survives_the_undo_of_a_refused_one(tmp_path):
    lock = WorkdirLock.acquire(tmp_path / "run")
    sleeps = []

    def remove_meanwhile(secs: float) -> None:
        if not sleeps:
            lock.release(undo=True)
            assert not (tmp_path / "run").exists()
        sleeps.append(secs)

    with WorkdirLock.acquire(tmp_path / "run", sleep=remove_meanwhile):
        assert sleeps
        assert refusal(tmp_path / "run")[0] is FaultKind.WORKDIR_IN_USE


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path, monkeypatch):
    # An undo removes the file between another start's open and its flock.
    path = tmp_path / "lock"
    path.write_text("")
    real_flock = fcntl.flock
    removed = []

    def flock(fd: int, how: int) -> None:
        if not removed:
            path.unlink()
            removed.append(fd)
        real_flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with WorkdirLock.acquire(tmp_path) as lock:
        assert removed
        assert os.path.samestat(os.fstat(lock.filenos()[0]), path.stat())
        assert refusal(tmp_path)[0] is FaultKind.WORKDIR_IN_USE


def test_a_folder_whose_lock_file_is_removed_stays_locked(tmp_path):
    with WorkdirLock.acquire(tmp_path) as lock:
        assert lock.problem() == ""
        lock.path.unlink()
        assert str(lock.path) in lock.problem()
        assert "\n" not in lock.problem()
        with pytest.raises(FaultError, match="in use"):
            WorkdirLock.acquire(tmp_path)
    WorkdirLock.acquire(tmp_path).release()


def test_undo_leaves_what_took_the_place_of_the_workdir(tmp_path):
    workdir = tmp_path / "run"
    lock = WorkdirLock.acquire(workdir)
    workdir.rename(tmp_path / "aside")
    with WorkdirLock.acquire(workdir) as other:
        assert lock.problem() != ""
        lock.release(undo=True)
        assert other.problem() == ""


def test_a_file_system_that_locks_no_folder(tmp_path, monkeypatch):
    """As NFS: what is open for reading alone cannot be locked."""
    real = fcntl.flock

    def flock(fd, how):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EBADF, "no")
        real(fd, how)

    monkeypatch.setattr("fcntl.flock", flock)
    num_fds = len(os.listdir("/proc/self/fd"))
    with WorkdirLock.acquire(tmp_path) as lock:
        assert len(lock.filenos()) == 1
        assert lock.problem() == ""
        with pytest.raises(FaultError, match="in use"):
            WorkdirLock.acquire(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_many_at_once_one_wins(tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        deadline = time.monotonic() + 20
        while sum(racer.poll() is None for racer in racers) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (winner,) = [racer for racer in racers if racer.poll() is None]
        for racer in racers:
            if racer is not winner:
                assert f"process {winner.pid} on" in racer.stderr.read()
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_relative_home_spaces_slash_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "inner").mkdir()
    (tmp_path / "deep").symlink_to("real/inner")
    for text, folder in [
        ("run", "run"),
        ("./sub/run/", "sub/run"),
        ("~/my runs/one ", "home/my runs/one "),
        ("link", "link"),
        ("./none/.././run", "run"),
        # Behind a link `..` is not what it looks like.
        ("deep/../run", "real/run"),
    ]:
        with WorkdirLock.acquire(text) as lock:
            assert lock.workdir == tmp_path / folder
            assert (tmp_path / folder / "lock").is_file()
    with WorkdirLock.acquire("link"):
        assert refusal("real")[0] is FaultKind.WORKDIR_IN_USE
    with WorkdirLock.acquire(pathlib.Path("run")):
        pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.write_text("x"), "not a folder"),
        (lambda p: p.symlink_to("nowhere"), "link to nothing"),
        (lambda p: (p / "lock").mkdir(parents=True), "directory"),
    ],
)
def test_unusable_workdirs(tmp_path, make, says):
    make(tmp_path / "run")
    kind, text = refusal(tmp_path / "run")
    assert kind is FaultKind.CONFIG
    assert says in text
    assert str(tmp_path / "run") in text


@pytest.mark.parametrize(
    "text", ["", "  ", "gs://bucket/run", "~nobody-of-that-name/run", "a\0b"]
)
def test_impossible_names(text):
    assert refusal(text)[0] is FaultKind.CONFIG


def test_a_file_system_that_takes_no_files():
    kind, text = refusal("/proc/jaxft-run")
    assert kind is FaultKind.CONFIG
    assert "/proc/jaxft-run" in text


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    kind, text = refusal(tmp_path / "run")
    assert kind is FaultKind.CONFIG
    assert "not writable" in text


def test_a_signal_at_any_line_of_a_start_leaves_nothing_behind(
    tmp_path: pathlib.Path,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        counts = [_interrupt_at(tmp_path / f"{k}" / "run", k) for k in range(1, 200)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert min(counts) == 1
    assert max(counts) < 199  # Each line had its turn.


def _interrupt_at(folder: pathlib.Path, k: int) -> int:
    """A real signal at the k-th line of a start; how many lines there were."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != workdir.__file__:
            return None
        if event == "line":
            count += 1
            if count == k:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        with WorkdirLock.acquire(folder):
            sys.settrace(None)
            assert folder.is_dir()
    except KeyboardInterrupt:
        sys.settrace(None)
        workdir.give_back_all()
        assert not folder.parent.exists()
    finally:
        sys.settrace(None)
    with WorkdirLock.acquire(folder):
        pass
    return count
