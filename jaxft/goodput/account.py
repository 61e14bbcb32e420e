"""The account of a run: its time by cause, its incidents, what everything cost.

World: host-only. Floor: goodput, its highest. Read `jaxft/goodput/ledger.py`,
`jaxft/goodput/incidents.py` and `jaxft/goodput/costs.py` before and
`jaxft/cli/report.py`, which shows it, after it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Iterable

from jaxft.events import Event
from jaxft.goodput.costs import Costs
from jaxft.goodput.history import History
from jaxft.goodput.incidents import Incidents
from jaxft.goodput.ledger import MALFORMED, Ledger
from jaxft.goodput.lives import NO_TURN, Border, Lives, Turn


class Account:
    """What a run's events add up to; takes them in one after the other.

    Attributes:
        ledger: seconds by cause.
        incidents: what went wrong.
        costs: of saves, restores and restarts.
        num_events: that were taken in.
        num_launches: workers that were started.
        last_step: number of finished steps now; -1 when none is known.
        last_target: where the run ends, in steps; -1 when that is not known.
        ending: how the last worker or command ended; empty while it goes on.
        begun_secs: time of the first launch, in seconds since the epoch.
        last_secs: time of the last.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.incidents = Incidents()
        self.costs = Costs()
        self.num_events = 0
        self.num_launches = 0
        self.last_step = -1
        self.last_target = -1
        self.ending = ""
        self.begun_secs = 0.0
        self.last_secs = 0.0
        self._lives = Lives()

    def take(self, event: Event, *, at_secs: float) -> None:
        """Takes in an event.

        Args:
            event: one of `jaxft.events.KINDS`, or another one: only its time counts.
            at_secs: its time, in seconds since the epoch, not before the last one's.
        """
        turn = NO_TURN
        with contextlib.suppress(*MALFORMED):
            turn = self._lives.take(event)
        self.begun_secs = self.begun_secs if self.num_launches else at_secs
        self.last_secs = at_secs
        self.num_events += 1
        self.num_launches += turn.border is Border.BEGIN
        self.ledger.take(event, at_secs=at_secs, turn=turn)
        if self.num_launches:  # Else the run has not begun.
            off_secs = self.ledger.off_secs
            self.incidents.take(event, at_secs=at_secs, off_secs=off_secs, turn=turn)
            self.costs.take(event, at_secs=at_secs, turn=turn)
        with contextlib.suppress(*MALFORMED):
            self._take_place(event)
            self._take_ending(event, turn)

    def hear(self, event: Event) -> None:
        """Takes in an event as it happens, on the clock that is never set back."""
        mono = event.get("mono")
        is_known = isinstance(mono, float) and math.isfinite(mono)
        self.take(event, at_secs=mono if is_known else time.monotonic())

    def go_on_until(self, at_secs: float) -> None:
        """The run is still going on, at this time."""
        self.ledger.go_on_until(at_secs)
        self.last_secs = max(self.last_secs, at_secs)
        off_secs = self.ledger.off_secs
        self.incidents.go_on_until(self.last_secs, off_secs=off_secs)

    @property
    def is_alive(self) -> bool:
        """Whether a worker lives, by the events alone: it may have been killed."""
        return self._lives.alive

    def _take_place(self, event: Event) -> None:
        match event["kind"]:
            case "step" | "restore" | "rollback":
                self.last_step = int(event["step"])
            case "end" | "save_commit":
                self.last_step = max(self.last_step, int(event["step"]))
            case "run":
                self.last_target = int(event["num_steps"])

    def _take_ending(self, event: Event, turn: Turn) -> None:
        if turn.border in (Border.BEGIN, Border.BACK):
            self.ending = ""
        elif turn.border is Border.OVER:
            code = int(event["exit_code"])
            self.ending = f"{event['reason']} (exit {code})" if code else "finished"
        elif turn.alone:
            words = str(event.get("reason") or event.get("evidence") or event["kind"])
            self.ending = " ".join(words.split())[:240]


def account_of(events: Iterable[tuple[float, Event]]) -> Account:
    """The account of events with their times, in their order."""
    account = Account()
    for at_secs, event in events:
        account.take(event, at_secs=at_secs)
    # What is not over costs until the last that is known.
    account.go_on_until(account.last_secs)
    return account


def account_of_workdir(workdir: str | os.PathLike[str]) -> Account:
    """The account of a run up to its last event.

    Args:
        workdir: of the run; without a history the account is empty.

    Raises:
        OSError: its history cannot be read.
    """
    return account_of(History(pathlib.Path(workdir) / "events"))
