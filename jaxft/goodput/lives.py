"""When a worker's life begins and ends, as far as the events tell.

World: host-only. Floor: goodput, the lowest, above `events`. Read
`jaxft/goodput/ledger.py` and `jaxft/goodput/incidents.py`, which go by it, after it.

A supervisor says `launch` and `worker_exit`; a worker says `start`, and `end` or
`fault` as its last word. Any of them may be missing: a killed process says nothing
more, a full disk takes no line, a worker may run without a supervisor. Process ids
come again (in containers always the same): they tell two processes apart, no more.
"""

from __future__ import annotations

import dataclasses
import enum

from jaxft.events import Event

_OF_WORKERS = ("work", "worker", "notebook")
# After its last word a worker that does such things has lived on.
_SIGNS_OF_LIFE = ("phase", "step")


class Border(enum.Enum):
    """What an event means for the life of a worker."""

    NONE = "none"
    BEGIN = "begin"
    LAST_WORD = "last word"
    BACK = "back"
    EXIT = "exit"
    OVER = "over"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """An event's meaning.

    Attributes:
        border: what begins or ends with it.
        unseen: of a beginning: the worker before ended without a word of anybody.
        new_command: of a beginning: no command ran just before it.
        alone: of a last word: there is no supervisor to see the end.
    """

    border: Border = Border.NONE
    unseen: bool = False
    new_command: bool = False
    alone: bool = False


# What nearly all events mean.
NO_TURN = Turn()


class Lives:
    """Follows the lives of workers through the events, in their order.

    Attributes:
        alive: whether a worker is known to live now.
    """

    def __init__(self) -> None:
        self.alive = False
        self._supervised = False
        self._has_spoken = False
        self._is_gone = True
        self._worker: object = None
        self._supervisor: object = None
        self._in_command = False

    def take(self, event: Event) -> Turn:
        """What `event` means."""
        kind, pid = event["kind"], event.get("pid")
        if kind == "launch":
            is_same = self._supervisor == pid and self._in_command
            is_new = not is_same or event["attempt"] == 0
            self._supervisor, self._in_command = pid, True
            return self._begin(event["worker_pid"], supervised=True, is_new=is_new)
        if kind == "worker_exit" and self._worker == event["worker_pid"]:
            is_known = not self._is_gone
            self.alive, self._is_gone = False, True
            return Turn(border=Border.EXIT) if is_known else NO_TURN
        if kind == "supervisor_end":
            self.alive, self._in_command, self._is_gone = False, False, True
            return Turn(border=Border.OVER)
        if event.get("role") not in _OF_WORKERS:
            return NO_TURN
        return self._take_word(kind, pid)

    def _take_word(self, kind: str, pid: object) -> Turn:
        """A worker says something of its own."""
        is_other = pid != self._worker
        if is_other or (kind == "start" and (self._has_spoken or not self.alive)):
            # Its launch is not in the history.
            turn = self._begin(pid, supervised=False, is_new=True)
            self._has_spoken = True
            return turn
        self._has_spoken = True
        if kind in ("end", "fault") and self.alive:
            self.alive = False
            return Turn(border=Border.LAST_WORD, alone=not self._supervised)
        if kind in _SIGNS_OF_LIFE and not self.alive and not self._is_gone:
            self.alive = True
            return Turn(border=Border.BACK)
        return NO_TURN

    def _begin(self, pid: object, *, supervised: bool, is_new: bool) -> Turn:
        unseen = self.alive
        self.alive, self._supervised = True, supervised
        self._worker, self._has_spoken, self._is_gone = pid, False, False
        if not supervised:
            self._in_command, self._supervisor = False, None
        return Turn(border=Border.BEGIN, unseen=unseen, new_command=is_new)
