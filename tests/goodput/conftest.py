"""Histories by hand: events as a supervisor and its workers write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxft.goodput.account import Account, account_of


class Story:
    """A history that is told: each call happens `secs` after the one before it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.supervisor, self.worker = 1, 2

    def wait(self, secs: float) -> Story:
        self.now += secs
        return self

    def say(self, kind: str, secs: float = 0.0, /, **fields: Any) -> Story:
        """A worker's event."""
        return self._add(kind, secs, role="work", pid=self.worker, **fields)

    def watch(self, kind: str, secs: float = 0.0, /, **fields: Any) -> Story:
        """A supervisor's event."""
        return self._add(kind, secs, role="supervise", pid=self.supervisor, **fields)

    def launch(self, attempt: int, secs: float = 0.0, /) -> Story:
        self.worker += 1
        return self.watch("launch", secs, worker_pid=self.worker, attempt=attempt)

    def phase(self, name: str, secs: float = 0.0) -> Story:
        return self.say("phase", secs, name=name)

    def begin(self, restored: int = -1) -> Story:
        """From launch to training: 1 s imports, 2 build, 3 restore, 4 compile."""
        self.say("start", 1.0, attempt=0, argv=[]).phase("restore", 2.0)
        if restored >= 0:
            fields = {"secs": 2.5, "num_bytes": 100, "verify": "full"}
            self.say(
                "restore",
                3.0,
                step=restored,
                num_proven=1,
                verify_secs=1.0,
                **fields,
            )
        else:
            self.phase("init", 3.0)
        self.phase("compile").say("compile", 4.0, secs=4.0, cached=restored >= 0)
        return self.phase("train")

    def steps(self, first: int, last: int, secs: float, data: float = 0.0) -> Story:
        fields = {"metrics": {"loss": 1.0}, "num_skipped": 0}
        return self.say(
            "step",
            secs,
            step=last,
            first_step=first,
            secs=secs,
            data_secs=data,
            **fields,
        )

    def exit(self, status: int, secs: float = 0.0, step: int = -1) -> Story:
        return self.watch(
            "worker_exit", secs, worker_pid=self.worker, status=status, step=step
        )

    def decide(self, action: str, cause: str, reason: str) -> Story:
        fields = {"delay_secs": 0.0, "budget_left": 9}
        return self.watch(
            "decision", action=action, cause=cause, reason=reason, **fields
        )

    def account(self) -> Account:
        return account_of(self.events)

    def secs(self) -> dict[str, float]:
        """Seconds by cause, without those that have none."""
        secs = self.account().ledger.secs()
        return {str(cause): value for cause, value in secs.items() if value}

    def _add(self, kind: str, secs: float, /, **fields: Any) -> Story:
        self.now += secs
        event = {"kind": kind, "time": self.now, "host": "h"} | fields
        self.events.append((self.now, event))
        return self


@pytest.fixture
def story() -> Callable[[], Story]:
    return Story
