"""A thread that ends a process which makes no progress, after it has said where.

World: host-only. Floor: faults. Read `jaxft/limits.py` before this file and
`jaxft/recovery/silence.py`, which sees the same from outside the process, after it.

The main thread declares what it begins (`PhaseBoard.enter`) and what it has finished
(`PhaseBoard.beat`); it writes to memory only. The thread reads the board a few times
a second: what counts is that the board moves, not that the process is alive. Time in
which the thread itself could not run counts for nothing: then the process was stopped
or a debugger held it, or somebody holds the interpreter lock, and whether that is a
hang only the supervisor can tell. Clocks are monotonic ones, which stand still while
the machine is suspended.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from absl import logging

from jaxft.events import write_beside
from jaxft.faults import stacks
from jaxft.limits import LearntTimes, TimeLimits
from jaxft.records import Emit, ExitCode, Fault, FaultKind, Phase, log_event

# They come and go with every step; whoever is told of a change is not told of these.
_QUICK = frozenset({Phase.STEP, Phase.DATA})
# A thread that wakes so much later than it wanted to was kept from running.
_LATE_SECS = 1.0


class Answer(enum.Enum):
    """What a watchdog does about a hang."""

    REPORT = "report"
    EXIT = "exit"


class Tell(Protocol):
    """Tells the supervisor what the main thread is at; False: not now, try again."""

    def __call__(
        self, serial: int, /, *, phase: Phase, step: int, limit_secs: float
    ) -> bool:
        """`serial` differs whenever something was begun or finished."""
        ...


class PhaseBoard:
    """What the main thread is at. Only that thread writes here, the watchdog reads.

    "Main" is the thread that makes it.

    Args:
        clock: seconds, never backwards.

    Attributes:
        ident: of the main thread.
        phase: what was begun last.
        instead: what the watchdog found that it is at in truth, until something is
            begun or finished; None for nothing else.
        step: finished step attempts, as far as they were told; -1 for none.
        awaits_peers: it waits for what other processes have to do as well.
        serial: differs whenever something was begun or finished.
        on_change: called when a phase begins or ends that does not come and go with
            every step.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self.ident = threading.get_ident()
        self.phase = Phase.START
        self.instead: Phase | None = None
        self.step = -1
        self.awaits_peers = False
        self.serial = 0
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._since = clock()
        self._took: dict[Phase, tuple[int, float]] = {}

    def enter(self, phase: Phase) -> None:
        """Says what begins now, before it does."""
        before = self.phase
        self._note(before)
        self.phase = phase
        if before is not phase and not (before in _QUICK and phase in _QUICK):
            self.on_change()

    def beat(self, step: int = -1) -> None:
        """Says that a part of the phase is done, with `step` that a step is."""
        if step >= 0:
            self.step = step
        self._note(self.phase)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Generator[None, None, None]:
        """`phase` begins now; at the end that which was before goes on."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextlib.contextmanager
    def waiting(self, *, for_peers: bool) -> Generator[None, None, None]:
        """Within, other processes may be what is waited for."""
        self.awaits_peers = for_peers
        try:
            yield
        finally:
            self.awaits_peers = False

    def take(self) -> dict[Phase, tuple[int, float]]:
        """Phase -> how many parts are done since the last call, and the longest."""
        taken, self._took = self._took, {}
        return taken

    def restart_clock(self) -> None:
        """What goes on is measured from now; for the watchdog."""
        self._since = self._clock()

    def forgive(self, instead: Phase | None = None) -> None:
        """What goes on begins now, as `instead`; for the watchdog."""
        self.restart_clock()
        self.instead = instead
        self.serial += 1

    def _note(self, phase: Phase) -> None:
        if self.instead is not None:
            phase, self.instead = self.instead, None
        now = self._clock()
        num, longest = self._took.get(phase, (0, 0.0))
        secs = now - self._since
        self._took[phase] = num + 1, secs if secs > longest else longest
        self._since = now
        self.serial += 1


class Watchdog:
    """Looks after a loop, while it is entered as a context manager.

    In anybody's loop it is three lines::

        with jaxft.Watchdog("/tmp/my-run") as dog:
            for step in range(num_steps):
                ...
                dog.beat(step + 1)

    Until the first beat the limit is `limits.first_secs`, for a first step compiles.
    A loop that holds the interpreter lock is seen by a supervisor only.

    Args:
        folder: where the stacks of all threads are written to; None for nowhere.
        limits: how long nothing may move.
        learnt: times that are known from before.
        answer: end the process with exit code 71, or only report.
        board: the main thread's; a new one by default.
        emit: is given the event `hang`, and the event `fault` before the end.
        tell: told a few times a second when something moved, and at once when a phase
            begins that does not come with every step.
        keep: given what was learnt, about once a minute and at the end.
        on_end: called with the fault before the end; for last words.
        clock: seconds, never backwards.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        limits: TimeLimits | None = None,
        learnt: LearntTimes | None = None,
        answer: Answer = Answer.EXIT,
        board: PhaseBoard | None = None,
        emit: Emit = log_event,
        tell: Tell | None = None,
        keep: Callable[[dict[str, Any]], None] | None = None,
        on_end: Callable[[Fault], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.board = board or PhaseBoard(clock=clock)
        self._folder = folder
        self._limits = limits or TimeLimits()
        self._learnt = learnt or LearntTimes()
        self._answer = answer
        self._emit = emit
        self._tell = tell
        self._keep = keep
        self._on_end = on_end
        self._clock = clock
        self._tick_secs = self._limits.tick_secs
        self._last_tick = clock()
        self._silent_secs = 0.0
        # What was seen, told and reported last, by the board's serial.
        self._seen = self._told = self._reported = -1
        self._kept_at = clock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int) -> None:
        """Says that `step` steps are finished; it costs about a microsecond."""
        if self.board.phase in (Phase.START, Phase.FIRST_STEP):
            self.board.beat(step)
            self.board.enter(Phase.STEP)
        else:
            self.board.beat(step)

    def phase(self, phase: Phase | str) -> contextlib.AbstractContextManager[None]:
        """Whatever is done within is no step: `with dog.phase("evaluate"): ...`.

        Raises:
            ValueError: there is no such phase.
        """
        return self.board.during(Phase(phase))

    def __enter__(self) -> Watchdog:
        self._last_tick = self._clock()
        if self._tell is not None:
            self.board.on_change = self._tell_now
            self._tell_now()
        self._thread = threading.Thread(
            target=self._watch, name="jaxft-watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(self._limits.last_words_secs)
        self.board.on_change = lambda: None
        self._learn(forced=True)

    def tick(self) -> None:
        """Looks once; the thread does so every `limits.tick_secs`."""
        now = self._clock()
        gap_secs, self._last_tick = now - self._last_tick, now
        if gap_secs > self._tick_secs + _LATE_SECS:
            # The process was stopped: what was measured is no time of this run's.
            self.board.take()
            self.board.restart_clock()
            gap_secs = self._tick_secs
        self._learn()
        board, serial = self.board, self.board.serial
        if serial != self._seen:
            self._seen, self._silent_secs = serial, 0.0
        else:
            self._silent_secs += gap_secs
            phase = board.instead or board.phase
            limit_secs = self._limits.limit_secs(phase, self._learnt)
            if self._silent_secs >= limit_secs and serial != self._reported:
                self._judge(phase, limit_secs)
        self._tell_later()

    def _judge(self, phase: Phase, limit_secs: float) -> None:
        """It is over its limit: a hang, unless something else explains it."""
        frames = stacks.frames_of(self.board.ident)
        if stacks.is_debugged(frames):
            self.board.forgive()
            return
        if phase is not Phase.COMPILE and stacks.is_compiling(frames):
            self.board.forgive(Phase.COMPILE)
            return
        if phase is not Phase.PEERS and self.board.awaits_peers:
            # It may be another process that hangs, whose own watchdog is to say so.
            self.board.forgive(Phase.PEERS)
            return
        self._reported = self.board.serial
        hang = {
            "phase": str(phase),
            "step": self.board.step,
            "silent_secs": self._silent_secs,
            "limit_secs": limit_secs,
            "seen_by": "watchdog",
        }
        place = stacks.where(frames)
        del frames  # They hold what the main thread's functions hold.
        if self._answer is Answer.REPORT:
            self._report(hang)
            return
        # Whatever these words are written to, or are about, may be what hangs.
        talker = threading.Thread(
            target=self._say_last_words,
            args=(hang, place),
            name="jaxft-last-words",
            daemon=True,
        )
        talker.start()
        talker.join(self._limits.last_words_secs)
        os._exit(ExitCode.HUNG)

    def _report(self, hang: dict[str, Any]) -> str:
        text = stacks.all_stacks(last=self.board.ident)
        file = ""
        if self._folder is not None:
            file = write_beside(self._folder, text, name="hang")
        self._emit("hang", **hang, stacks=stacks.excerpt(text), file=file)
        return text

    def _say_last_words(self, hang: dict[str, Any], place: str) -> None:
        text = self._report(hang)
        summary = (
            f"no progress for {hang['silent_secs']:.1f} s in phase {hang['phase']} "
            f"(limit {hang['limit_secs']:.1f} s), at {place}"
        )
        fault = Fault(
            kind=FaultKind.HANG,
            step=self.board.step,
            evidence=f"{stacks.excerpt(text, max_bytes=3000)}\n{summary}",
        )
        self._emit("fault", **fault.event())
        if self._on_end is not None:
            self._on_end(fault)

    def _learn(self, *, forced: bool = False) -> None:
        # A copy: the main thread may still be at its last entry.
        for phase, (num, longest_secs) in list(self.board.take().items()):
            self._learnt.observe(phase, longest_secs, num=num)
        now = self._clock()
        if self._keep is not None and (forced or now >= self._kept_at + 60.0):
            self._kept_at = now
            self._keep(self._learnt.to_json())

    def _tell_later(self) -> None:
        """Within the thread: of what comes and goes with every step, by and by."""
        if self._tell is None or self.board.serial == self._told:
            return
        phase = self.board.instead or self.board.phase
        if phase is Phase.DATA and self._silent_secs == 0.0:
            phase = Phase.STEP  # Caught in passing; what waits for input is seen again.
            if self._tell_as(self.board.serial, phase):
                self._told = -2  # Until then it is not told as what it is.
            return
        serial = self.board.serial
        if self._tell_as(serial, phase):
            self._told = serial

    def _tell_now(self) -> None:
        serial = self.board.serial
        if self._tell_as(serial, self.board.phase):
            self._told = serial

    def _tell_as(self, serial: int, phase: Phase) -> bool:
        limit_secs = self._limits.limit_secs(phase, self._learnt)
        if self._tell is None:
            return False
        step = self.board.step
        return self._tell(serial, phase=phase, step=step, limit_secs=limit_secs)

    def _watch(self) -> None:
        while not self._over.wait(self._tick_secs):
            try:
                self.tick()
            except Exception:
                # Whatever it is told to may fail; a watchdog that is gone would be
                # taken for a loop that hangs.
                logging.exception("jaxft: the watchdog could not look")
