"""What went wrong, each with its cause, its evidence and what it cost.

World: host-only. Floor: goodput, above `lives`. Read `jaxft/goodput/ledger.py` before
and `jaxft/goodput/account.py` after it.

An incident costs the steps that must be done again, and the time from the last step
before it until the run is as far as it was. When the next one comes before that, the
time until then is the cost of the first and the time after it that of the second: no
second is told twice. Time in which no command ran is told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal

from jaxft.events import Event
from jaxft.goodput.ledger import MALFORMED
from jaxft.goodput.lives import Border, Turn
from jaxft.records import FaultKind

# Characters of evidence.
_MAX_EVIDENCE = 240
_ASKED = "asked to stop"
# Faults of a plan that nobody notices by themselves.
_SILENT = ("slow_disk", "bitflip")
# One that only saves notice, and what its notice is called.
_OF_SAVES = {"enospc": FaultKind.SAVE_FAILED}


@dataclasses.dataclass(kw_only=True)
class Incident:
    """One thing that went wrong.

    Attributes:
        kind: a `FaultKind`, or `rollback`, `quarantine`.
        at_secs: when it was seen, in seconds since the epoch.
        step: finished step attempts then, or the label of the checkpoint that it is
            about; -1 for none.
        evidence: one line.
        injected: the fault that a plan of faults has caused it by; empty for none.
        num_lost_steps: steps that were done and have to be done again, as far as the
            events tell.
        lost_secs: until the run was as far as before it, or until now.
        off_secs: time in which no command ran meanwhile; not in `lost_secs`.
        is_over: whether the run was as far again, or had never gone back.
    """

    kind: str
    at_secs: float
    step: int
    evidence: str
    injected: str = ""
    num_lost_steps: int = 0
    lost_secs: float = 0.0
    off_secs: float = 0.0
    is_over: bool = False


class Incidents:
    """Finds incidents in events, in their order; keeps each of them.

    Attributes:
        all: in the order of their happening.
    """

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self._open: Incident | None = None
        # Of the open one: since when it costs, and what was off until then.
        self._since, self._off_before = 0.0, 0.0
        # Nobody has said yet from which step the run goes on after it.
        self._unresolved: Incident | None = None
        self._top_step = -1
        # The last step of this life, and of any: what can be lost.
        self._step = -1
        self._place = -1
        # The last moment at which nothing was lost.
        self._good_at: float | None = None
        self._fault: Event | None = None
        self._end = ""
        self._hang: Incident | None = None
        self._awaits_decision: Incident | None = None
        # Plans of faults that were injected and not noticed yet; "" is any notice.
        self._injected: dict[str, str] = {}
        self._last_secs = 0.0

    def take(
        self, event: Event, *, at_secs: float, off_secs: float, turn: Turn
    ) -> None:
        """Takes in one event.

        Args:
            event: as it was written; one that is not made as it should be says nothing.
            at_secs: its time.
            off_secs: how long no command ran, until now and altogether.
            turn: what it means for the life of a worker.
        """
        with contextlib.suppress(*MALFORMED):
            if turn.border is Border.BEGIN:
                self._begin(turn, at_secs=at_secs, off_secs=off_secs)
            elif turn.border is Border.EXIT:
                self._exit(event, at_secs=at_secs, off_secs=off_secs)
            taker = getattr(self, f"_take_{event['kind']}", None)
            if taker is not None:
                taker(event, at_secs, off_secs)
            if turn.alone and self._end != "finished":
                self._add_end("", at_secs=at_secs, off_secs=off_secs)
                self._fault, self._end, self._hang = None, "", None
        self._last_secs = at_secs

    def go_on_until(self, at_secs: float, *, off_secs: float) -> None:
        """What the one that is not over has cost by now."""
        if self._open is not None:
            self._cost(self._open, until=at_secs, off_secs=off_secs)

    # --- the lives of workers -------------------------------------------------

    def _begin(self, turn: Turn, *, at_secs: float, off_secs: float) -> None:
        off_then = off_secs
        if turn.new_command:
            off_then -= at_secs - self._last_secs
        if turn.unseen:
            what = "the command and its worker" if turn.new_command else "the worker"
            self._add(
                FaultKind.KILLED,
                evidence=f"{what} ended without a word",
                at_secs=self._last_secs,
                off_secs=off_then,
            )
        elif self._fault is not None or self._end.startswith("stopped"):
            # Nobody was there to see the end of this one.
            self._add_end("", at_secs=self._last_secs, off_secs=off_then)
        self._step, self._good_at = -1, None
        self._fault, self._end, self._hang = None, "", None
        self._awaits_decision, self._injected = None, {}

    def _exit(self, event: Event, *, at_secs: float, off_secs: float) -> None:
        self._see_step(event)
        status = int(event["status"])
        if self._end == "finished" or (status == 0 and self._fault is None):
            if self._open is not None:
                self._close(self._open, at=at_secs, off_secs=off_secs)
            return
        how = f"left with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-status).name}"
        self._awaits_decision = self._add_end(how, at_secs=at_secs, off_secs=off_secs)
        self._fault, self._end, self._hang = None, "", None

    def _add_end(self, how: str, *, at_secs: float, off_secs: float) -> Incident:
        """A worker has ended before the run was finished."""
        if self._hang is not None:
            return self._hang
        kind, evidence = str(FaultKind.KILLED), how
        if self._fault is not None:
            kind = str(self._fault["fault"])
            evidence = _last_line(str(self._fault["evidence"])) or how
        elif self._end:
            kind, evidence = str(FaultKind.STOPPED), self._end
        return self._add(kind, evidence=evidence, at_secs=at_secs, off_secs=off_secs)

    def _take_fault(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        self._fault = event
        self._step = max(self._step, int(event["step"]))

    def _take_end(self, event: Event, at_secs: float, off_secs: float) -> None:
        asked, self._end = self._end, str(event["reason"])
        if self._end == "stopped" and asked.startswith(_ASKED):
            self._end += asked.removeprefix(_ASKED)
        self._step = max(self._step, int(event["step"]))
        if self._end == "finished" and self._open is not None:
            self._close(self._open, at=at_secs, off_secs=off_secs)

    def _take_stop_request(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        self._end = self._end or f"{_ASKED} by {event['reason']}"

    def _take_decision(self, event: Event, at_secs: float, off_secs: float) -> None:
        """The supervisor knows better than the last words alone."""
        del at_secs, off_secs
        incident, self._awaits_decision = self._awaits_decision, None
        if incident is not None and event["action"] != "finish":
            incident.kind = kind = str(event["cause"])
            # The worker itself could not tell, as a full disk takes no history.
            incident.injected = incident.injected or self._injected.pop(kind, "")
            if incident.kind != FaultKind.HANG:  # That has told more.
                incident.evidence = _one_line(event["reason"]) or incident.evidence

    def _take_injected(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        if event["fault"] not in _SILENT:
            self._injected[_OF_SAVES.get(event["fault"], "")] = str(event["plan"])

    # --- what happens inside of a life ------------------------------------------

    def _take_save_start(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        self._see_step(event)

    def _take_bad_steps(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        self._see_step(event)

    def _see_step(self, event: Event) -> None:
        """It has got so far, although no step event says so yet."""
        self._step = max(self._step, step := int(event["step"]))
        self._place = max(self._place, step)

    def _take_step(self, event: Event, at_secs: float, off_secs: float) -> None:
        first, last = int(event["first_step"]), int(event["step"])
        secs, incident = max(0.0, float(event["secs"])), self._open
        if last < first:
            raise ValueError(f"steps {first} to {last}")
        self._go_on_from(first - 1)
        if incident is not None and last >= self._top_step:
            share = (last - max(self._top_step, first - 1)) / (last - first + 1)
            # A worker that lived on has lost no step, only the time.
            spread = 0.0 if incident is self._hang else secs * share
            reached = max(at_secs - spread, self._since)
            self._close(incident, at=reached, off_secs=off_secs)
        self._top_step = max(self._top_step, last)
        self._step, self._place, self._hang = last, last, None
        if self._open is None:
            self._good_at = at_secs

    def _take_restore(self, event: Event, at_secs: float, off_secs: float) -> None:
        del at_secs, off_secs
        self._go_on_from(step := int(event["step"]))
        self._place = step
        self._top_step = max(self._top_step, step)

    def _go_on_from(self, step: int) -> None:
        """It is known now what the last incident has taken."""
        if self._unresolved is not None:
            self._unresolved.num_lost_steps = max(0, self._place - step)
            self._unresolved = None

    def _take_hang(self, event: Event, at_secs: float, off_secs: float) -> None:
        if self._hang is None:
            self._step = max(self._step, int(event["step"]))
            silent, limit = float(event["silent_secs"]), float(event["limit_secs"])
            self._hang = self._add(
                FaultKind.HANG,
                evidence=f"no progress in phase {event['phase']} for {silent:.1f} s "
                f"(limit {limit:.1f} s), seen by the {event['seen_by']}",
                at_secs=at_secs,
                off_secs=off_secs,
            )

    def _take_rollback(self, event: Event, at_secs: float, off_secs: float) -> None:
        self._step = max(self._step, int(event["origin"]))
        reason = f"to step {event['step']}: {event['reason']}"
        self._add("rollback", evidence=reason, at_secs=at_secs, off_secs=off_secs)

    def _take_quarantine(self, event: Event, at_secs: float, off_secs: float) -> None:
        del off_secs
        self._add_point("quarantine", event, at_secs=at_secs)

    def _take_save_failed(self, event: Event, at_secs: float, off_secs: float) -> None:
        del off_secs
        self._add_point(str(FaultKind.SAVE_FAILED), event, at_secs=at_secs)

    # --- keeping them -----------------------------------------------------------

    def _add_point(self, kind: str, event: Event, *, at_secs: float) -> None:
        """One that costs no time of its own: what follows from it has its own."""
        evidence, step = _one_line(event["reason"]), int(event["step"])
        found = Incident(
            kind=kind, at_secs=at_secs, step=step, evidence=evidence, is_over=True
        )
        found.injected = self._injected.pop(kind, "")
        self.all.append(found)

    def _add(
        self, kind: str, *, evidence: str, at_secs: float, off_secs: float
    ) -> Incident:
        since = at_secs if self._good_at is None else min(self._good_at, at_secs)
        if self._open is not None:
            self._cost(self._open, until=at_secs, off_secs=off_secs)
            since = at_secs
        incident = Incident(
            kind=str(kind),
            at_secs=at_secs,
            step=self._step,
            evidence=_one_line(evidence),
            injected=self._injected.pop(str(kind), "") or self._injected.pop("", ""),
        )
        self.all.append(incident)
        self._open, self._since, self._off_before = incident, since, off_secs
        self._unresolved = self._unresolved or incident
        return incident

    def _cost(self, incident: Incident, *, until: float, off_secs: float) -> None:
        incident.off_secs = max(0.0, off_secs - self._off_before)
        incident.lost_secs = max(0.0, until - self._since - incident.off_secs)

    def _close(self, incident: Incident, *, at: float, off_secs: float) -> None:
        self._cost(incident, until=at, off_secs=off_secs)
        incident.is_over, self._open = True, None


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:_MAX_EVIDENCE]


def _last_line(text: str) -> str:
    """Where a traceback says what it was."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
