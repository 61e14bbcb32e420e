"""One worker process as its supervisor sees it: start, words, death.

World: host-only. Floor: recovery. Read `jaxft/recovery/policy.py`, whose `WorkerExit`
is made here, before this file and `jaxft/recovery/supervisor.py` after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft import events
from jaxft.process_state import process_state
from jaxft.records import ALONE, ExitCode, FaultKind, JobPlace, Phase
from jaxft.recovery.policy import CacheMode, WorkerExit
from jaxft.recovery.silence import (
    HangWatch,
    Silence,
    ask_for_stacks,
    excerpt,
    where,
)
from jaxft.recovery.spare import SpareWorker

_PIPE_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What a new worker has to be told.

    Attributes:
        attempt: restarts before it; 0 for the first worker.
        event_fd: descriptor it writes its event lines to.
        parent_fd: descriptor whose end of file means that the supervisor is gone.
        lock_fds: descriptors that the workdir's lock lives in.
        cache: how it must use the compile cache.
        committed_step: newest step that is known to be committed; -1 for none.
        stacks_fd: file that it writes its stacks to when asked; -1 for none.
        learnt: how long things took in this run, see `jaxft.limits.LearntTimes`.
        alarms: phase -> how often workers before it were ended for hanging there.
        place: which process of its job it is.
    """

    attempt: int
    event_fd: int
    parent_fd: int
    lock_fds: tuple[int, ...]
    cache: CacheMode
    committed_step: int = -1
    stacks_fd: int = -1
    learnt: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alarms: Mapping[Phase, int] = dataclasses.field(default_factory=dict)
    place: JobPlace = ALONE

    def renumbered(self, fds: Mapping[int, int]) -> Launch:
        """The same where descriptors have other numbers: old -> new."""
        return dataclasses.replace(
            self,
            event_fd=fds[self.event_fd],
            parent_fd=fds[self.parent_fd],
            lock_fds=tuple(fds[fd] for fd in self.lock_fds),
            stacks_fd=fds.get(self.stacks_fd, -1),
        )


class WorkerProcess:
    """One worker process, its process group and this side of its two pipes.

    Attributes:
        process: the worker, leader of its own session and process group.
        event_fd: read end of the event pipe, not blocking.
        heard: what its events say.
        from_spare: whether it was waiting already.

    Args:
        make_argv: its command line.
        attempt: restarts before it.
        lock_fds: descriptors that the workdir's lock lives in; it inherits them.
        more_fds: others that it inherits.
        cache: how it must use the compile cache.
        committed_step: newest step that is known to be committed; -1 for none.
        place: which process of its job it is.
        env: its environment; None for this process's own.
        hear: is given each of its events.
        watch: for hangs; None to look for none.
        spare: becomes this worker if it can; None for a new process.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self,
        make_argv: Callable[[Launch], Sequence[str]],
        *,
        attempt: int,
        lock_fds: Sequence[int],
        more_fds: Sequence[int],
        cache: CacheMode,
        committed_step: int,
        env: Mapping[str, str] | None,
        hear: Callable[[events.Event], None],
        watch: HangWatch | None = None,
        place: JobPlace = ALONE,
        spare: SpareWorker | None = None,
    ):
        # In memory: it takes stacks before there is a workdir, and on a full disk.
        self._stacks_fd = -1 if watch is None else os.memfd_create("jaxft-stacks")
        self.event_fd, events_in = os.pipe()
        parent_out, self._parent_fd = os.pipe()
        with contextlib.suppress(OSError):  # Over the user's limit: 64 kB do as well.
            fcntl.fcntl(self.event_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self.event_fd, False)
        launch = Launch(
            attempt=attempt,
            event_fd=events_in,
            parent_fd=parent_out,
            lock_fds=tuple(lock_fds),
            cache=cache,
            committed_step=committed_step,
            place=place,
            stacks_fd=self._stacks_fd,
            learnt={} if watch is None else watch.learnt.to_json(),
            alarms={} if watch is None else dict(watch.learnt.alarms),
        )
        stacks_fds = [] if watch is None else [self._stacks_fd]
        fds = [events_in, parent_out, *lock_fds, *more_fds, *stacks_fds]
        try:
            argv = make_argv(launch)
            waiting = None if spare is None else spare.promote(argv, fds=fds)
            self.from_spare = waiting is not None
            self.process = waiting or subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=fds,
                env=env,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(events_in)
            os.close(parent_out)
        self.silence = None if watch is None else watch.begin()
        self.heard = Heard(hear, silence=self.silence)
        self._rest = b""
        self._killed = False

    def read(self) -> bool:
        """Takes in what the pipe holds; False at its end or when it is empty."""
        try:
            data = os.read(self.event_fd, _PIPE_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.heard.take(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""  # No event is that long; what follows will not parse.
        return bool(data)

    def is_dead(self) -> bool:
        """Whether it is dead; it stays a zombie, so that its group id stays its own."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, how) is not None

    def send_signal(self, number: int) -> None:
        """To the worker alone: what its children are for is its business."""
        os.kill(self.process.pid, number)

    def pause(self) -> None:
        """Stops the worker and its children where they are."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def end_hang(self, folder: str | os.PathLike[str] | None) -> dict[str, Any] | None:
        """Looks for a hang; kills the worker then, after its stacks were asked for.

        Args:
            folder: where all of the stacks is written to; None for nowhere.

        Returns:
            The fields of the event `hang`; None where the worker does not hang.
        """
        silence, pid = self.silence, self.process.pid
        if silence is None or self._killed or not silence.tick():
            return None
        if process_state(pid).is_traced:
            silence.forgive()  # A person looks at it.
            return None
        text, state = ask_for_stacks(pid, self._stacks_fd)
        summary = (
            f"no progress for {silence.silent_secs:.1f} s in phase {silence.phase} "
            f"(limit {silence.limit_secs:.1f} s){state.words}"
        )
        if place := where(text):
            summary += f", at {place}"
        self.heard.take_hang(
            silence.phase, f"{excerpt(text, max_bytes=3000)}\n{summary}".strip()
        )
        self.kill()
        return {
            "phase": str(silence.phase),
            "step": silence.step,
            "silent_secs": silence.silent_secs,
            "limit_secs": silence.limit_secs,
            "seen_by": "supervisor",
            "stacks": excerpt(text) or "it gave none" + state.words,
            "file": events.write_beside(folder, text, name="hang") if folder else "",
        }

    def kill(self) -> None:
        """Ends the worker and its children, all at once."""
        if not self._killed:
            self._killed = True
            self.heard.killed_by_us = True
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Ends what is left of the group; returns the worker's exit status."""
        os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        # Where this process is the container's first, orphans come to it.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.process.pid, 0):
                pass
        self._close()
        return status

    def _close(self) -> None:
        os.close(self.event_fd)
        os.close(self._parent_fd)
        if self._stacks_fd >= 0:
            os.close(self._stacks_fd)


class Heard:
    """What one worker's event lines say, as far as the supervisor needs it."""

    def __init__(
        self, hear: Callable[[events.Event], None], *, silence: Silence | None = None
    ) -> None:
        self._hear = hear
        self._silence = silence
        self.hang_phase: Phase | None = None
        self._hang = ""
        self.first_step = -1
        self.last_step = -1
        self.committed_step = -1
        self.reached_first_step = False
        self.preflight_done = False
        self.stop_reason = ""
        self.killed_by_us = False
        self._finished = False
        self._stopped = False
        self._phase = "start"
        self._fault: dict[str, Any] | None = None

    def take(self, line: bytes) -> None:
        """Takes in one line; a torn or foreign one says nothing."""
        if self._silence is not None and self._silence.take(line):
            return
        event = events.parse_line(line.decode(errors="replace"))
        if event is None:
            return
        self._hear(event)
        step = event.get("step")
        step = step if isinstance(step, int) else -1
        match event["kind"]:
            case "preflight_done":
                self.preflight_done = True
            case "phase":
                self._phase = str(event.get("name"))
            case "step":
                self._take_step(step, first=event.get("first_step"))
            case "save_commit":
                self.committed_step = max(self.committed_step, step)
            case "restore" | "found":
                self.committed_step = max(self.committed_step, step)
            case "stop_request":
                self.stop_reason = str(event.get("reason") or "a request")
            case "hang":
                with contextlib.suppress(ValueError):
                    self.hang_phase = Phase(event.get("phase"))
            case "fault":
                self._fault = event
                self.last_step = max(self.last_step, step)
            case "end":
                self._finished = event.get("reason") == "finished"
                self._stopped = not self._finished

    def take_hang(self, phase: Phase, evidence: str) -> None:
        """It was seen to hang from outside."""
        self.hang_phase, self._hang = phase, evidence

    def _take_step(self, step: int, *, first: object) -> None:
        if not self.reached_first_step:
            self.first_step = first if isinstance(first, int) else step
        self.reached_first_step = True
        self.last_step = max(self.last_step, step)

    def exit(self, status: int, *, cache: CacheMode) -> WorkerExit:
        """How the worker ended: by its own word, else killed by whatever it was."""
        kind, evidence = self._cause(status)
        return WorkerExit(
            kind=kind,
            status=status,
            first_step=self.first_step,
            last_step=self.last_step,
            committed_step=self.committed_step,
            reached_first_step=self.reached_first_step,
            evidence=evidence,
            cache=cache,
        )

    def _cause(self, status: int) -> tuple[FaultKind | None, str]:
        if self._fault is not None:
            with contextlib.suppress(ValueError):
                kind = FaultKind(self._fault.get("fault"))
                return kind, str(self._fault.get("evidence") or "")
        if self._finished:
            return None, ""  # Its last step is committed, however it left.
        if self._hang:
            return FaultKind.HANG, self._hang
        at = f"in phase {self._phase}"
        if status == ExitCode.HUNG and self._silence is not None:
            # Its watchdog could not speak: what it writes to may be what hangs.
            self.hang_phase = self.hang_phase or self._silence.phase
            return FaultKind.HANG, f"no progress {at}; it could not say more"
        if self.killed_by_us:
            return FaultKind.KILLED, f"killed {at}: the time to stop was over"
        if status < 0:
            name = _signal_name(-status)
            hint = ""
            if -status == signal.SIGKILL:
                hint = " (if nobody sent it, the host may be out of memory: see dmesg)"
            return FaultKind.KILLED, f"killed by {name} {at}{hint}"
        if self._stopped and status == ExitCode.STOPPED:
            return FaultKind.STOPPED, f"stopped {at}"
        # Whatever the status: code of the user's own can leave with any.
        return FaultKind.KILLED, f"left with status {status} {at} without a word"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
