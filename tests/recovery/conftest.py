"""A supervisor over toy workers: real processes, pipes and signals."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxft.config import SupervisorConfig
from jaxft.events import KINDS, EventLog, read_events
from jaxft.recovery.supervisor import Launch, Supervisor

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# What every toy worker starts with; `attempt` is 0 for the first.
WORKER = f"FIELDS = { {kind: list(fields) for kind, fields in KINDS.items()} }"
WORKER += """
import json, os, signal, sys, time
attempt, event_fd, parent_fd, lock_fd = map(int, sys.argv[1:5])
cache, stacks_fd = sys.argv[5], int(sys.argv[6])

def emit(kind, **fields):
    fields = {**dict.fromkeys(FIELDS.get(kind, ()), 0), **fields}
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

def beat(serial, phase="step", step=7, limit_secs=0.3):
    os.write(event_fd, f"beat {serial} {phase} {step} {limit_secs}\\n".encode())

def show_stacks():
    import faulthandler
    number = signal.SIGRTMIN + 6
    faulthandler.register(number, file=stacks_fd, all_threads=True)

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
        self.told: list[str] = []
        self.heard: list[dict] = []
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
            hear=self.heard.append,
            tell=self.told.append,
            **options,
        )

    def _make_argv(self, launch: Launch) -> list[str]:
        self.launches.append(launch)
        lock_fd = (*launch.lock_fds, -1)[0]
        numbers = (launch.attempt, launch.event_fd, launch.parent_fd, lock_fd)
        words = [*map(str, numbers), str(launch.cache), str(launch.stacks_fd)]
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


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> Callable[..., Run]:
    """`make_run(script, name=..., **options)`; its history is under `tmp_path`."""

    def make(script: str, *, name: str = "", **options) -> Run:
        return Run(tmp_path / name, script, **options)

    return make


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """No descriptor, no child, no handler is left."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _is_alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether a process runs; one that only waits to be reaped does not."""
    return _is_alive


@pytest.fixture
def wait_until_dead() -> Callable[..., None]:
    def wait(pid: int, secs: float = 1.0) -> None:
        deadline = time.monotonic() + secs
        while _is_alive(pid):
            assert time.monotonic() < deadline, f"{pid} lives"
            time.sleep(0.005)

    return wait
