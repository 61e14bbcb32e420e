"""The worker's side of the two pipes to its supervisor.

World: host-only. Floor: recovery. Read `jaxft/recovery/supervisor.py`, the other side,
with this file.

Events go up through one pipe. The other carries nothing: its end of file says that
the supervisor is gone, and then the worker must not go on, because a new start may
already wait for the workdir.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft.records import Phase
from jaxft.recovery.silence import LEARNT, STACKS_SIGNAL, beat_line

# What is kept for a supervisor that does not read; more is dropped, whole lines only.
MAX_BACKLOG_BYTES = 1 << 22
_PR_SET_PDEATHSIG = 1


class SupervisorLink:
    """Binds this process to its supervisor: events go there, and it dies with it.

    Make it first of all in the worker, and only once in a process.

    Args:
        event_fd: write end of the event pipe; see `supervisor.Launch`.
        parent_fd: read end of the pipe that ends with the supervisor.
        lock_fds: descriptors of the workdir's lock. The worker keeps them open; what
            the worker starts does not get them.
        stacks_fd: file that the stacks of all threads are written to when the
            supervisor asks for them; -1 for none.
    """

    def __init__(
        self,
        event_fd: int,
        parent_fd: int,
        *,
        lock_fds: Sequence[int] = (),
        stacks_fd: int = -1,
    ):
        self._event_fd = event_fd
        self._fds = [event_fd, parent_fd, *lock_fds]
        if stacks_fd >= 0:
            self._fds.append(stacks_fd)
            # In C, without the interpreter lock: whoever holds it may be what hangs.
            faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
        self._lock = threading.Lock()
        self._backlog = bytearray()
        for fd in self._fds:
            os.set_inheritable(fd, False)
        # A slow supervisor must not stall a step.
        os.set_blocking(event_fd, False)
        self._forking_pid = 0
        os.register_at_fork(
            before=self._see_who_forks, after_in_child=self._let_child_go
        )
        # The kernel's way works even where Python's threads cannot run; the pipe's
        # way also sees a supervisor that died before this line.
        die_with_parent()
        threading.Thread(
            target=_wait_for_the_end, args=(parent_fd,), name="parent", daemon=True
        ).start()

    def send(self, line: str) -> None:
        """Hands one event line up; never waits, and never fails."""
        data = line.encode() + b"\n"
        with self._lock:
            if self._event_fd < 0:
                return
            if len(self._backlog) + len(data) <= MAX_BACKLOG_BYTES:
                self._backlog += data
            self._write()

    def beat(
        self, serial: int, /, *, phase: Phase, step: int, limit_secs: float
    ) -> bool:
        """Tells of progress; False when older lines still wait for the supervisor."""
        line = beat_line(serial, phase=phase, step=step, limit_secs=limit_secs)
        with self._lock:
            if self._backlog or self._event_fd < 0:
                return False
            self._backlog += line.encode() + b"\n"
            self._write()
        return True

    def tell_learnt(self, learnt: Mapping[str, Any]) -> None:
        """Tells how long things took, for the next worker."""
        self.send(f"{LEARNT} {json.dumps(learnt)}")

    def close(
        self,
        *,
        timeout_secs: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Sends what is left, as far as it goes in `timeout_secs`; ends the events."""
        deadline = clock() + timeout_secs
        with self._lock:
            while self._backlog and self._event_fd >= 0:
                left = deadline - clock()
                if left <= 0:
                    break
                waiter = select.poll()
                waiter.register(self._event_fd, select.POLLOUT)
                waiter.poll(left * 1000)
                self._write()
            self._end_events()

    def _write(self) -> None:
        """Writes what the pipe takes now; the rest goes with the next line."""
        try:
            while self._backlog:
                num_bytes = os.write(self._event_fd, self._backlog)
                del self._backlog[:num_bytes]
        except BlockingIOError:
            return
        except OSError:
            self._end_events()  # Nobody reads: the other pipe says what that means.

    def _end_events(self) -> None:
        self._backlog.clear()
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._fds.remove(self._event_fd)
            self._event_fd = -1

    def _see_who_forks(self) -> None:
        # "Parent" means the thread that forks: any but the main one may end sooner
        # than the process, and then it must not take the child with it.
        is_main = threading.current_thread() is threading.main_thread()
        self._forking_pid = os.getpid() if is_main else 0

    def _let_child_go(self) -> None:
        """A forked child speaks for nobody, keeps no lock alive, outlives nobody."""
        if self._forking_pid:
            die_with_parent()
            if os.getppid() != self._forking_pid:  # It died before that line.
                os._exit(1)
        # The lock may have been held by a thread that does not exist here.
        self._lock = threading.Lock()
        self._event_fd = -1
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def die_with_parent() -> None:
    """On Linux this process ends with the thread that started it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_for_the_end(parent_fd: int) -> None:
    while os.read(parent_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
