"""Several members of a job on one machine: starts them, hands signals on, waits.

World: host-only. Floor: recovery. Read `jaxft/recovery/job_supervisor.py`, which each
of them is, before this file.

It decides nothing. A member that somebody has killed is started again, as a scheduler
would do it; one that leaves by itself has the job's exit code.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from jaxft.config import Config
from jaxft.records import ExitCode
from jaxft.recovery.addresses import free_address
from jaxft.recovery.signal_pipe import SignalPipe
from jaxft.recovery.worker_link import die_with_parent

_POLL_SECS = 0.1
# How much later than its grace time a member is ended by force.
_MARGIN_SECS = 20.0


class LocalJob:
    """The members of one job, all of them children of this process.

    Args:
        make_argv: command line of a member for its process index.
        num_processes: how many.
        signals: handed on to every member.
        grace_secs: how long after the first has left the others may take.
        max_restarts: how often members are started again, all together.
        env: environment of the members; None for this process's own.
        write: is given each line that a member prints, its index, and whether it came
            from standard error.
    """

    def __init__(
        self,
        make_argv: Callable[[int], Sequence[str]],
        *,
        num_processes: int,
        signals: Sequence[signal.Signals],
        grace_secs: float,
        max_restarts: int,
        env: Mapping[str, str] | None = None,
        write: Callable[[int, str, bool], None],
    ):
        self._make_argv = make_argv
        self._num_processes = num_processes
        self._signals = signals
        self._grace_secs = grace_secs
        self._restarts_left = max_restarts
        self._env = env
        self._write = write
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        # Descriptor -> what it holds of a line; whose it is, and whether of errors.
        self._rests: dict[int, bytes] = {}
        self._sources: dict[int, tuple[int, bool]] = {}
        self._status: int | None = None
        self._is_stopping = False
        self._kill_at = float("inf")

    def run(self) -> int:
        """Blocks until all members have left; the job's exit code."""
        with SignalPipe(self._signals) as pipe, self._selector:
            self._selector.register(pipe.read_fd, selectors.EVENT_READ, None)
            try:
                for index in range(self._num_processes):
                    self._start(index)
                while self._members:
                    for key, _ in self._selector.select(_POLL_SECS):
                        if key.data is None:
                            self._hand_on(pipe)
                        else:
                            self._read(key.fd)
                    self._look()
            finally:
                for member in self._members.values():
                    member.kill()
                    member.wait()
        return ExitCode.CRASHED if self._status is None else self._status

    def _start(self, index: int) -> None:
        member = subprocess.Popen(
            self._make_argv(index),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=self._env,
            preexec_fn=die_with_parent,
        )
        for stream in (member.stdout, member.stderr):
            assert stream is not None
            fd = stream.fileno()
            os.set_blocking(fd, False)
            self._rests[fd] = b""
            self._sources[fd] = (index, stream is member.stderr)
            self._selector.register(fd, selectors.EVENT_READ, stream)
        self._members[index] = member

    def _read(self, fd: int) -> bool:
        """Prints what a member says; False at the end, or when there is no more."""
        source = self._sources[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        *lines, rest = (self._rests.get(fd, b"") + data).split(b"\n")
        self._rests[fd] = rest
        for line in lines:
            self._write(source[0], line.decode(errors="replace"), source[1])
        if not data:
            self._forget(fd)
        return bool(data)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        index, is_error = self._sources.pop(fd)
        if rest := self._rests.pop(fd):
            self._write(index, rest.decode(errors="replace"), is_error)

    def _hand_on(self, pipe: SignalPipe) -> None:
        for number in pipe.read():
            self._is_stopping |= number != signal.SIGTSTP
            for member in self._members.values():
                member.send_signal(number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
                for member in self._members.values():
                    member.send_signal(signal.SIGCONT)

    def _look(self) -> None:
        """Takes in who has left, and starts those again that were killed."""
        for index, member in list(self._members.items()):
            status = member.poll()
            if status is None:
                if time.monotonic() >= self._kill_at:
                    member.kill()
                continue
            for stream in (member.stdout, member.stderr):
                assert stream is not None
                fd = stream.fileno()
                while fd in self._sources and self._read(fd):
                    pass
                if fd in self._sources:  # A child of it still holds the other end.
                    self._forget(fd)
                stream.close()
            del self._members[index]
            self._take_end(index, status)

    def _take_end(self, index: int, status: int) -> None:
        is_over = self._status is not None or self._is_stopping
        if status < 0 and not is_over and self._restarts_left > 0:
            self._restarts_left -= 1
            name = signal.Signals(-status).name
            self._write(index, f"jaxft: killed by {name}: started again", True)
            self._start(index)
            return
        code = status if status >= 0 else int(ExitCode.CRASHED)
        if self._status is None:
            self._status = code
            self._kill_at = time.monotonic() + self._grace_secs + _MARGIN_SECS


def run_members(
    words: Sequence[str],
    *,
    num_processes: int,
    config: Config,
    signals: Sequence[signal.Signals],
    write: Callable[[int, str, bool], None],
) -> int:
    """Runs a command as a job of several processes on this machine; its exit code.

    Args:
        words: of the command line, without the program.
        num_processes: how many.
        config: of the run.
        signals: handed on to every member.
        write: see `LocalJob`.
    """
    # Where they meet, and what tells them from any other job.
    coordinator = f"--coordinator={free_address('127.0.0.1:0')}"

    def make_argv(index: int) -> list[str]:
        who = [f"--process_index={index}", coordinator]
        return [sys.executable, "-m", "jaxft.main", *words, *who]

    return LocalJob(
        make_argv,
        num_processes=num_processes,
        signals=signals,
        grace_secs=config.preemption.grace_secs,
        max_restarts=config.supervisor.max_restarts,
        write=write,
    ).run()
