"""Where the time went: each microsecond of a run belongs to exactly one cause.

World: host-only. Floor: goodput, above `lives`. Read `jaxft/goodput/lives.py` before
and `jaxft/goodput/incidents.py` after it.

The wall time of a run is from its first launch to its last event, over all restarts
and all commands; in between the causes leave no gap and count nothing
twice, by construction: the time between two events is held until an event says what
it was, and is then booked as a whole. Counted in whole microseconds, so sums are exact.

How it is decided:

* A worker is at what its last `phase` says. From its launch to its first phase
  (interpreter, imports, building, preflight) it is at `init`.
* In training a `step` event says which steps the time before it was for, and how much
  of it waited for input. Steps up to the highest that was ever finished are repeated,
  those beyond are productive; within one event both are taken to last equally long.
* What a dead worker did after its last `step` event was for steps that are done again:
  it is booked as repeated. Where the next one goes on from a later step than that event
  told of, the part up to there was productive after all. So of each step exactly one
  time is productive.
* Guarded steps (that were not applied) are steps; the checkpoints hold them as such.
* The loop waits for a save for as long as `save_start` says; for the last one, for one
  at a stop and for a mirror at the end, as long as that phase lasts. What a save costs
  in the background shows in the steps beside it.
* A `hang` event says how long there was no progress before it; that, and all until
  there is progress or the worker is dead, is `hang`.
* From a worker's last word or its death to the next launch the run is `down`, and while
  it is suspended; of that, the time in which not even a command ran is told apart
  (`off_secs`).
* What the events do not explain is `unknown`: in training, what is longer than the
  loop's own measure of it.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any

from jaxft.events import Event
from jaxft.goodput.lives import Border, Turn

# What reading an event raises whose fields are there but are not what they should be.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_PER_SEC = 1_000_000


class Cause(enum.StrEnum):
    """What a second was for."""

    INIT = "init"
    COMPILE = "compile"
    RESTORE = "restore"
    DATA = "data_wait"
    STEP = "productive_step"
    REPEATED = "repeated_step"
    SAVE = "checkpoint_blocking"
    EVALUATION = "evaluation"
    HANG = "hang"
    DOWN = "down"
    UNKNOWN = "unknown"


_OF_PHASE = {
    "start": Cause.INIT,
    "init": Cause.INIT,
    "restore": Cause.RESTORE,
    "compile": Cause.COMPILE,
    "train": Cause.STEP,
    "first_step": Cause.STEP,
    "step": Cause.STEP,
    "data": Cause.STEP,  # Of steps; how much of it was waiting they say themselves.
    "evaluate": Cause.EVALUATION,
    "save": Cause.SAVE,
    "mirror": Cause.SAVE,
}

# They say how far a worker has got, beside what its steps say.
_TELL_STEP = frozenset({"save_start", "worker_exit", "hang", "fault", "bad_steps"})


class Ledger:
    """Seconds by cause; takes in events in order, in a fixed space.

    Attributes:
        top_step: highest step that was finished; -1 for none.
        num_steps: steps finished for the first time.
        num_repeated: steps finished again.
        num_guarded: of all of them, those that were not applied.
    """

    def __init__(self) -> None:
        self.top_step = -1
        self.num_steps = 0
        self.num_repeated = 0
        self.num_guarded = 0
        self._booked = dict.fromkeys(Cause, 0)
        self._off = 0
        self._begun: int | None = None
        self._at = 0
        self._now = Cause.UNKNOWN
        self._is_off = False
        self._is_hung = False
        # Since the last booking, and not known yet to be what `_now` says.
        self._held = 0
        # The same from before a hang that is not over.
        self._before_hang = 0
        # Of the loop's measure until the next step event, what was no step.
        self._blocked = 0
        # What the last worker took along, and how far it is known to have got.
        self._lost = 0
        self._last_seen = -1

    # --- what is known --------------------------------------------------------

    @property
    def wall_secs(self) -> float:
        """From the first launch to the last event."""
        return 0.0 if self._begun is None else (self._at - self._begun) / _PER_SEC

    @property
    def off_secs(self) -> float:
        """Of `down`, the time in which no command ran."""
        held = self._held if self._is_off else 0
        return (self._off + held) / _PER_SEC

    def micros(self) -> dict[Cause, int]:
        """Microseconds by cause; their sum is the wall time, exactly.

        What is held is told as what it is going to be if all goes on well.
        """
        booked = dict(self._booked)
        booked[Cause.HANG if self._is_hung else self._now] += self._held
        booked[self._now] += self._before_hang
        return booked

    def secs(self) -> dict[Cause, float]:
        """Seconds by cause, of all causes."""
        return {cause: count / _PER_SEC for cause, count in self.micros().items()}

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into productive steps; 0 for no time."""
        micros = self.micros()
        wall = sum(micros.values())
        return micros[Cause.STEP] / wall if wall else 0.0

    # --- taking in ------------------------------------------------------------

    def take(self, event: Event, *, at_secs: float, turn: Turn) -> None:
        """Takes in one event.

        Args:
            event: as it was written; if it is not made as it should be, only its time
                counts.
            at_secs: its time; one before that of an earlier event counts as the same.
            turn: what it means for the life of a worker.
        """
        at = round(at_secs * _PER_SEC)
        if self._begun is None:
            if turn.border is not Border.BEGIN:
                return  # A supervisor that has not launched anything yet.
            self._begun = self._at = at
        at = max(at, self._at)
        passed, self._at = at - self._at, at
        if turn.border is Border.BEGIN:
            self._begin(turn, passed=passed)
            return
        self._held += passed
        if turn.border in (Border.EXIT, Border.LAST_WORD):
            self._close(is_lost=event["kind"] != "end")
            self._enter(Cause.DOWN)
        elif turn.border is Border.OVER:
            self._close(is_lost=True)
            self._enter(Cause.DOWN, is_off=True)
        elif turn.border is Border.BACK:
            self._close(is_lost=False)
            self._enter(Cause.STEP)
        taker = getattr(self, f"_take_{event['kind']}", None)
        if taker is not None:
            with contextlib.suppress(*MALFORMED):
                taker(event)
        if event["kind"] in _TELL_STEP:
            with contextlib.suppress(*MALFORMED):
                self._last_seen = max(self._last_seen, int(event["step"]))

    def go_on_until(self, at_secs: float) -> None:
        """The run goes on, and its newest event was some time ago."""
        at = round(at_secs * _PER_SEC)
        if self._begun is not None and at > self._at:
            self._held += at - self._at
            self._at = at

    def _begin(self, turn: Turn, *, passed: int) -> None:
        """A worker begins, after a time in which there was none, known or not."""
        if turn.unseen:
            self._close(is_lost=True)
            self._enter(Cause.DOWN)
        if turn.new_command and not self._is_off:
            # Where nobody has said that the command before it had ended.
            self._close(is_lost=False)
            self._enter(Cause.DOWN, is_off=True)
        self._held += passed
        self._close(is_lost=False)
        self._enter(Cause.INIT)

    def _take_phase(self, event: Event) -> None:
        cause = _OF_PHASE.get(event["name"], Cause.UNKNOWN)
        if cause is not self._now or self._is_off:
            # To restore is to give up what was not told yet.
            self._close(is_lost=cause is Cause.RESTORE)
            self._enter(cause)
        elif self._is_hung:
            self._end_hang()

    def _take_step(self, event: Event) -> None:
        first, last = int(event["first_step"]), int(event["step"])
        secs, data_secs = float(event["secs"]), float(event["data_secs"])
        num_guarded, num_all = int(event["num_skipped"]), last - first + 1
        lasted, waited = round(secs * _PER_SEC), round(data_secs * _PER_SEC)
        if num_all < 1:
            raise ValueError(f"steps {first} to {last}")
        self._end_hang()
        num_again = min(num_all, max(0, self.top_step - first + 1))
        if self._now is Cause.STEP:
            known = max(0, min(self._held, lasted - self._blocked))
            data = max(0, min(known, waited))
            again = (known - data) * num_again // num_all
            self._book(Cause.DATA, data)
            self._book(Cause.REPEATED, again)
            self._book(Cause.STEP, known - data - again)
            self._book(Cause.UNKNOWN, self._held)
            self._blocked = 0
        self.top_step = max(self.top_step, last)
        self.num_steps += num_all - num_again
        self.num_repeated += num_again
        self.num_guarded += num_guarded

    def _take_restore(self, event: Event) -> None:
        self._carve(Cause.RESTORE, event["secs"])
        num_kept = (step := int(event["step"])) - self.top_step
        # Else it comes from a history that is not here.
        if num_kept > 0 and step <= self._last_seen:
            kept = self._lost * num_kept // (self._last_seen - self.top_step)
            self._booked[Cause.REPEATED] -= kept
            self._booked[Cause.STEP] += kept
            self.num_steps += num_kept
            self.top_step = step
        self._lost, self._last_seen = 0, -1

    def _take_suspended(self, event: Event) -> None:
        self._carve(Cause.DOWN, event["secs"])

    def _take_save_start(self, event: Event) -> None:
        self._carve(Cause.SAVE, event["blocking_secs"])

    def _take_evaluation(self, event: Event) -> None:
        self._carve(Cause.EVALUATION, event["secs"])

    def _take_compile(self, event: Event) -> None:
        self._carve(Cause.COMPILE, event["secs"])

    def _take_rollback(self, event: Event) -> None:
        del event
        if self._now is Cause.STEP:
            self._close(is_lost=True)

    def _take_hang(self, event: Event) -> None:
        silent = round(float(event["silent_secs"]) * _PER_SEC)
        if self._now is not Cause.DOWN and not self._is_hung:
            self._book(Cause.HANG, max(0, min(self._held, silent)), is_blocking=True)
            # What was before it is for whoever says what that was.
            self._before_hang, self._held = self._held, 0
            self._is_hung = True

    # --- booking --------------------------------------------------------------

    def _book(self, cause: Cause, count: int, *, is_blocking: bool = False) -> None:
        self._booked[cause] += count
        self._held -= count
        if is_blocking:
            self._blocked += count

    def _carve(self, cause: Cause, secs: Any) -> None:
        """Of what is held, the last `secs` were for something else."""
        count = max(0, min(self._held, round(float(secs) * _PER_SEC)))
        if self._now not in (cause, Cause.DOWN):
            self._book(cause, count, is_blocking=True)

    def _end_hang(self) -> None:
        """There is progress again: what was held meanwhile was no progress."""
        if self._is_hung:
            self._book(Cause.HANG, self._held, is_blocking=True)
            self._is_hung = False
            self._held, self._before_hang = self._before_hang, 0

    def _close(self, *, is_lost: bool) -> None:
        """Books all that is held; `is_lost`: the steps in it are done again."""
        self._end_hang()
        cause = self._now
        if self._is_off:
            self._off += self._held
        elif cause is Cause.STEP and is_lost:
            cause, self._lost = Cause.REPEATED, self._held
        self._book(cause, self._held)

    def _enter(self, cause: Cause, *, is_off: bool = False) -> None:
        self._now, self._is_off, self._blocked = cause, is_off, 0
