"""A worker that waits: started and with its imports done before it is needed.

World: host-only. Floor: recovery. Read `jaxft/recovery/worker_process.py`, which turns
it into a worker, with this file.

A restart spends most of its time on imports. So while a worker trains, the supervisor
keeps one more interpreter, which has imported jaxft and its libraries and nothing of
the user's, holds no device and no file of the run, and waits at a socket. When the
worker dies it is told its launch there and becomes the next one. Where it cannot be
had, or is not as a new process would be, a new process is started as ever.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft.process_state import process_state, resident_bytes, show_words
from jaxft.records import Emit
from jaxft.recovery.worker_link import die_with_parent

# The first steps after a start are not to compete with the imports of a spare.
_SETTLE_SECS = 2.0
_MAX_BYTES = 1 << 20
_MAX_FDS = 253  # The kernel's limit.


class SpareWorker:
    """At most one interpreter in waiting, and this side of its socket.

    Args:
        make_argv: its command line for the descriptor that it has to wait at.
        signals: blocked in it, as in a worker, until it listens to them.
        emit: is told when it is ready, and what memory it holds.
        env: its environment; None for this process's own.
        has_room: whether the host has the memory for it; asked before each start.
        settle_secs: how long a worker must have made steps before it is started.
        clock: seconds, from any start, never backwards.
    """

    def __init__(
        self,
        make_argv: Callable[[int], Sequence[str]],
        *,
        signals: Sequence[signal.Signals],
        emit: Emit,
        env: Mapping[str, str] | None = None,
        has_room: Callable[[], bool] = lambda: True,
        settle_secs: float = _SETTLE_SECS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._make_argv = make_argv
        self._signals = tuple(signals)
        self._emit = emit
        self._env = env
        self._has_room = has_room
        self._settle_secs = settle_secs
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started = 0.0
        self._born_with: Mapping[str, str] = {}
        self._served_pid = -1
        self._settled_at: float | None = None

    @property
    def pid(self) -> int:
        """Its process id; -1 while there is none."""
        return -1 if self._process is None else self._process.pid

    def tend(self, worker_pid: int, *, makes_steps: bool) -> None:
        """Hears it, buries it, and starts it: once in the life of each worker.

        Args:
            worker_pid: the worker that lives now.
            makes_steps: whether it has made its first step.
        """
        if self._process is not None:
            self._hear()
            if self._process.poll() is not None:
                self.close()  # No incident: the next worker is a new process.
        if not makes_steps:
            self._settled_at = None
            return
        if self._settled_at is None:
            self._settled_at = self._clock() + self._settle_secs
        if self._served_pid == worker_pid or self._clock() < self._settled_at:
            return
        self._served_pid = worker_pid
        if self._process is None and self._has_room():
            self._start()

    def promote(
        self, argv: Sequence[str], *, fds: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Makes it a worker; None where only a new process will do.

        Args:
            argv: what a new worker's command line would be.
            fds: descriptors that the worker gets.
        """
        if not self._is_like_new() or self._socket is None:
            self.close()
            return None
        told = pickle.dumps((list(argv), list(fds)))
        try:
            socket.send_fds(self._socket, [told], fds)
        except OSError:
            self.close()
            return None
        # The socket stays: closed with a word of its unread, it would drop ours.
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Ends it; twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _is_like_new(self) -> bool:
        """Whether it is what a process that is started now would become."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        state = process_state(process.pid)
        # A signal to it alone was no request to the run, which it would stop later.
        return (
            state.letter not in "Tt"
            and not state.has_pending
            and self._born_with == self._environment()
        )

    def _environment(self) -> Mapping[str, str]:
        return dict(os.environ if self._env is None else self._env)

    def _start(self) -> None:
        self.close()
        self._born_with, self._started = self._environment(), self._clock()
        # Without one a restart only takes longer.
        with contextlib.suppress(OSError):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket = ours
            ours.setblocking(False)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
            try:
                self._process = subprocess.Popen(
                    self._make_argv(theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    env=self._env,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                theirs.close()
            ours.send(pickle.dumps(list(sys.path)))

    def _hear(self) -> None:
        """It says one thing: that it is ready."""
        assert self._socket is not None
        with contextlib.suppress(OSError, ValueError):
            if said := self._socket.recv(_MAX_BYTES):
                self._emit(
                    "spare",
                    spare_pid=self.pid,
                    secs=self._clock() - self._started,
                    memory_bytes=int(said),
                )


class Waiting:
    """The spare's own side; made first of all in it, before the imports.

    It ends with its supervisor, by the kernel's word or by the end of the socket.

    Args:
        fd: the socket that it waits at.
    """

    def __init__(self, fd: int):
        die_with_parent()
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        told = self._receive()[0]
        sys.path[:] = told  # A config file may have added to it.

    def launch(self) -> tuple[list[str], dict[int, int]]:
        """Waits until it is needed: its command line, and where descriptors are.

        Of each descriptor the supervisor's number and this process's own.
        """
        with contextlib.suppress(OSError):
            self._socket.send(str(resident_bytes()).encode())
        (argv, theirs), ours = self._receive()
        self._socket.close()
        show_words(argv)
        return argv, dict(zip(theirs, ours, strict=True))

    def _receive(self) -> tuple[Any, list[int]]:
        try:
            told, fds, _, _ = socket.recv_fds(
                self._socket, _MAX_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except (OSError, KeyboardInterrupt):
            os._exit(0)
        if not told:
            os._exit(0)  # The supervisor is gone, or needs it no more.
        return pickle.loads(told), fds
