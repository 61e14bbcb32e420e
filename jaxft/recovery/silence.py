"""How a supervisor sees that its worker hangs, and what it asks before the kill.

World: host-only. Floor: recovery. Read `jaxft/faults/watchdog.py`, the worker's own
eyes, before this file and `jaxft/recovery/supervisor.py`, which acts, after it.

The worker tells a few times a second when something moved, what it is at and how long
that may take; the supervisor waits a margin longer than the worker itself would. So it
acts only where the worker cannot: its threads do not run (somebody holds the
interpreter lock), or the whole process is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from jaxft.limits import LearntTimes, TimeLimits, read_learnt, write_learnt
from jaxft.process_state import ProcessState, process_state
from jaxft.records import MAX_EVIDENCE_BYTES, Phase

# Upon it the worker writes the stacks of all its threads, whoever holds which lock.
STACKS_SIGNAL = signal.SIGRTMIN + 6
# The first words of the pipe's lines that are no events.
BEAT, LEARNT = "beat", "learnt"
# What one look can add: whoever looks later was stopped himself.
_MOST_SECS = 1.0
_STACKS_SECS = 2.0


def beat_line(serial: int, /, *, phase: Phase, step: int, limit_secs: float) -> str:
    """What the worker tells of its progress; `serial` differs when something moved."""
    return f"{BEAT} {serial} {phase} {step} {limit_secs:.3f}"


class Silence:
    """How long one worker has made no progress, by its own lines.

    Args:
        limits: of the run.
        learnt: what is known before the worker says anything.
        clock: seconds, never backwards.

    Attributes:
        phase: what it is at.
        step: finished step attempts, -1 before they are known.
        limit_secs: what the worker allows itself there.
        silent_secs: since it last told of progress.
        learnt: what it told last of the times that it has seen; None for nothing.
    """

    def __init__(
        self, limits: TimeLimits, *, learnt: LearntTimes, clock: Callable[[], float]
    ):
        self.phase = Phase.START
        self.step = -1
        self.limit_secs = limits.limit_secs(Phase.START, learnt)
        self.silent_secs = 0.0
        self.learnt: dict[str, Any] | None = None
        self._margin_secs = limits.margin_secs
        self._clock = clock
        self._last_tick = clock()
        self._told: tuple[int, Phase] | None = None

    def take(self, line: bytes) -> bool:
        """Takes in one line of the pipe; False for one that is not for here."""
        word, _, rest = line.partition(b" ")
        with contextlib.suppress(ValueError, RecursionError):
            if word == BEAT.encode():
                serial, phase, step, limit_secs = rest.decode().split()
                self._take_beat(int(serial), Phase(phase), int(step), float(limit_secs))
                return True
            if word == LEARNT.encode():
                self.learnt = json.loads(rest)
                return True
        return False

    def _take_beat(
        self, serial: int, phase: Phase, step: int, limit_secs: float
    ) -> None:
        if (serial, phase) != self._told:
            self.silent_secs = 0.0
        self._told = serial, phase
        self.phase, self.step, self.limit_secs = phase, step, limit_secs

    def tick(self) -> bool:
        """Looks at the clock; whether it hangs, and should have said so itself."""
        now = self._clock()
        # Nobody counts the time in which this process was stopped, too (Ctrl-Z).
        self.silent_secs += min(now - self._last_tick, _MOST_SECS)
        self._last_tick = now
        return self.silent_secs >= self.limit_secs + self._margin_secs

    def forgive(self) -> None:
        """Begins to count anew."""
        self.silent_secs = 0.0


class HangWatch:
    """What a supervisor knows of hangs over all its workers.

    Args:
        limits: of the run.
        workdir: where what is learnt is kept; None for nowhere.
        clock: seconds, never backwards.
    """

    def __init__(
        self,
        limits: TimeLimits,
        *,
        workdir: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits = limits
        self._workdir = workdir
        self._clock = clock
        self.learnt = LearntTimes() if workdir is None else read_learnt(workdir)

    def begin(self) -> Silence:
        """For a new worker, which is told of `learnt`."""
        return Silence(self._limits, learnt=self.learnt, clock=self._clock)

    def keep(self, silence: Silence) -> None:
        """Writes down what the worker has learnt since the last call."""
        if silence.learnt is None:
            return
        learnt = LearntTimes.from_json(silence.learnt)
        learnt.alarms = self.learnt.alarms
        self.learnt, silence.learnt = learnt, None
        if self._workdir is not None:
            write_learnt(self._workdir, learnt.to_json())

    def count_alarm(self, phase: Phase) -> None:
        """It may have been wrong: the next worker has twice the time."""
        self.learnt.alarms[phase] = self.learnt.alarms.get(phase, 0) + 1


def ask_for_stacks(
    pid: int, fd: int, *, timeout_secs: float = _STACKS_SECS
) -> tuple[str, ProcessState]:
    """The stacks of all threads as the worker writes them to `fd`; its state before.

    Where it was stopped it runs on for the moment that it needs to write.
    """
    state = process_state(pid)
    before = os.fstat(fd).st_size
    os.kill(pid, STACKS_SIGNAL)
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + timeout_secs
    size, is_whole = before, False
    while time.monotonic() < deadline and not is_whole:
        time.sleep(0.05)
        now = os.fstat(fd).st_size
        is_whole = size == now > before
        size = now
    text = os.pread(fd, size - before, before).decode(errors="replace")
    return text.strip(), state


def excerpt(text: str, *, max_bytes: int = MAX_EVIDENCE_BYTES) -> str:
    """What fits of stacks that begin with the newest call and end with the main thread.

    The main thread's newest calls stay in any case.
    """
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    main = text[text.rfind("\n\n") + 2 :].encode() if "\n\n" in text else data
    if len(main) > max_bytes:
        return main[:max_bytes].decode(errors="ignore").rpartition("\n")[0]
    return data[-max_bytes:].decode(errors="ignore").partition("\n")[2].strip()


def where(text: str) -> str:
    """The main thread's newest call; empty when there is none."""
    for line in text[text.rfind("\n\n") + 1 :].splitlines():
        if line.strip().startswith("File "):
            return line.strip()
    return ""
