"""Who of a job's members is alive: each says so every second, all look.

World: host-only. Floor: recovery. Read `jaxft/recovery/generations.py` before and
`jaxft/recovery/council.py`, which goes by it, after this file.

    <workdir>/members/<name>.json     the newest beat, replaced as a whole

Clocks of two hosts need not agree: whoever looks goes by its own, from when it saw a
beat change. So a file that is found counts for nothing until it changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxft.recovery.generations import Seat

FOLDER = "members"
BEAT_SECS = 1.0


class Life(enum.StrEnum):
    """What is known of a member."""

    UNKNOWN = "unknown"
    ALIVE = "alive"
    SILENT = "silent"
    LEFT = "left"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """What one member looks like from here.

    Attributes:
        seat: who it says it is.
        life: whether it goes on saying so.
        silent_secs: since it was last seen to say so.
    """

    seat: Seat
    life: Life
    silent_secs: float = 0.0


class Members:
    """The members of one job, seen from one of them.

    Args:
        workdir: of the job.
        seat: this member.
        lost_secs: after what silence a member counts as lost.
        clock: seconds, never backwards.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        seat: Seat,
        *,
        lost_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = pathlib.Path(workdir) / FOLDER
        self.seat = seat
        self.lost_secs = lost_secs
        self._clock = clock
        self._serial = 0
        self._beaten_at = -1e18
        # Name -> its beat as it was last seen, when, and whether it was seen to change.
        self._seen: dict[str, tuple[dict[str, Any], float, bool]] = {}

    def beat(self) -> None:
        """Says that this member lives, once a second at most; a full disk is borne."""
        if self._clock() - self._beaten_at >= BEAT_SECS:
            self._beaten_at = self._clock()
            with contextlib.suppress(OSError):
                self._write()

    def leave(self) -> None:
        """Says that this member is gone for good."""
        with contextlib.suppress(OSError):
            self._write(has_left=True)

    def look(self, names: Sequence[str]) -> dict[str, Sight]:
        """What is known of each of `names` that ever said anything."""
        found = {}
        for name in names:
            if name == self.seat.name:
                found[name] = Sight(seat=self.seat, life=Life.ALIVE)
            elif (sight := self._look(name)) is not None:
                found[name] = sight
        return found

    def _look(self, name: str) -> Sight | None:
        now = self._clock()
        before = self._seen.get(name)
        beat = self._read(name)
        if beat is not None and (before is None or beat != before[0]):
            # The first one may have been there for long.
            self._seen[name] = before = (beat, now, before is not None)
        if before is None:
            return None
        beat, since, has_changed = before
        silent_secs = now - since
        if beat.get("has_left"):
            life = Life.LEFT
        elif silent_secs >= self.lost_secs:
            life = Life.SILENT
        else:
            life = Life.ALIVE if has_changed else Life.UNKNOWN
        seat = Seat(name=name, incarnation=str(beat.get("incarnation")))
        return Sight(seat=seat, life=life, silent_secs=silent_secs)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            beat = json.loads((self.folder / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None  # For who looks that is silence.
        return beat if isinstance(beat, dict) else None

    def _write(self, *, has_left: bool = False) -> None:
        self._serial += 1
        beat = {
            "incarnation": self.seat.incarnation,
            "serial": self._serial,
            "pid": os.getpid(),
            "has_left": has_left,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".{self.seat.name}.{self.seat.incarnation}"
        draft.write_text(json.dumps(beat) + "\n")
        draft.replace(self.folder / f"{self.seat.name}.json")
