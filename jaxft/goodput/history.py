"""All events of a workdir in the order of their happening, a line at a time.

World: host-only. Floor: goodput, the lowest, above `events`. Read `jaxft/events.py`
before and `jaxft/goodput/account.py`, its one user here, after it.

A run of months has thousands of files, one for each process that ever was, and
gigabytes of lines: a file is opened when its first event is due and closed at its end,
and no line is kept.

Times of day are only asked when there is nothing better. Within one boot of one host
all processes share a clock that is never set back; the first event that is seen of a
boot ties it to the time of day. So a clock that is set, whenever and however far,
neither makes seconds nor loses them. (A machine that sleeps stops that clock: these
seconds are no part of a run.) Lines without such a clock count by the time of day, and
where that goes back, go on from where it was.
"""

from __future__ import annotations

import heapq
import os
import pathlib
import time
from collections.abc import Callable, Iterator

from jaxft.events import Clock, Event, boot_id, parse_line

# A boot of a host.
_Boot = tuple[str, str]


def _ignore(num_bytes: int) -> None:
    """For a caller that does not wait for long."""


class History:
    """The events of one folder; of several processes those of the first.

    Args:
        folder: a workdir's `events`; a missing one is an empty history.

    Attributes:
        num_bytes: of all files, as it was opened.

    Raises:
        OSError: the folder is there and cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        # Boot -> what is added to its clock to have the time of day.
        self._anchors: dict[_Boot, float] = {}
        found = [
            (first, path)
            for path in sorted(pathlib.Path(folder).glob("*.jsonl"))
            if (first := next(_events_of(path), None)) is not None
        ]
        # Several processes live and die together: one tells it all, and the story of
        # each of them is not the next part of that of the other.
        teller = min((_process_index(first) for first, _ in found), default=0)
        found = [item for item in found if _process_index(item[0]) == teller]
        self.num_bytes = sum(path.stat().st_size for _, path in found)
        # Whoever began first ties its boot to the time of day.
        found.sort(key=lambda item: item[0]["time"])
        for first, _ in found:
            if (mono := _mono(first)) is not None:
                self._anchors.setdefault(_boot(first), first["time"] - mono)
        starts = [(self._first_secs(first), path) for first, path in found]
        self._files = sorted(starts, key=lambda item: item[0])

    def __bool__(self) -> bool:
        """Whether there is any event."""
        return bool(self._files)

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        """Each event with its time: seconds since the epoch, never less than before."""
        return self.read()

    def read(
        self, progress: Callable[[int], None] = _ignore
    ) -> Iterator[tuple[float, Event]]:
        """The same, and `progress` is told how many bytes more have been read."""
        waiting = list(reversed(self._files))
        # (time of the next event, number of its file, the event, the rest)
        heap: list[tuple[float, int, Event, Iterator[tuple[float, Event]]]] = []
        num_opened = 0
        while heap or waiting:
            while waiting and (not heap or waiting[-1][0] <= heap[0][0]):
                rest = self._timed(waiting.pop()[1], progress)
                num_opened += 1
                if (item := next(rest, None)) is not None:
                    heapq.heappush(heap, (item[0], num_opened, item[1], rest))
            if not heap:
                continue
            secs, number, event, rest = heap[0]
            if (item := next(rest, None)) is not None:
                heapq.heapreplace(heap, (item[0], number, item[1], rest))
            else:
                heapq.heappop(heap)
            yield secs, event

    def now(self, *, clock: Clock = time.time, uptime: Clock = time.monotonic) -> float:
        """This moment on the clock of the history, for a run that goes on here."""
        boot = boot_id()
        for (_, other), anchor in self._anchors.items():
            if boot and boot == other:
                return anchor + uptime()
        return clock()

    def _first_secs(self, first: Event) -> float:
        mono = _mono(first)
        return first["time"] if mono is None else self._anchors[_boot(first)] + mono

    def _timed(
        self, path: pathlib.Path, progress: Callable[[int], None]
    ) -> Iterator[tuple[float, Event]]:
        """The events of one file with their times, never less than before."""
        last_secs, last_day, set_back = -1e18, -1e18, 0.0
        for event in _events_of(path, progress):
            mono = _mono(event)
            if mono is None:
                set_back += max(0.0, last_day - event["time"])
                last_day = event["time"]
                secs = last_day + set_back
            else:
                anchor = event["time"] - mono
                secs = self._anchors.setdefault(_boot(event), anchor) + mono
            # Threads of one process may write in another order than they looked.
            last_secs = max(last_secs, secs)
            yield last_secs, event


def _events_of(
    path: pathlib.Path, progress: Callable[[int], None] = _ignore
) -> Iterator[Event]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                progress(len(line))
                if (event := parse_line(line)) is not None:
                    yield event
    except (FileNotFoundError, IsADirectoryError):  # It was taken away meanwhile.
        return


def _process_index(event: Event) -> int:
    index = event.get("process_index")
    return index if isinstance(index, int) else 0


def _boot(event: Event) -> _Boot:
    boot = str(event.get("boot") or "")
    # Where boots have no names, a process is as long as a clock can be trusted.
    return str(event.get("host")), boot or f"process {event.get('pid')}"


def _mono(event: Event) -> float | None:
    mono = event.get("mono")
    if isinstance(mono, bool) or not isinstance(mono, int | float):
        return None
    return float(mono) if -1e18 < mono < 1e18 else None
