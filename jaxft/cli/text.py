"""How the toolbox prints: tables, sizes, times, JSON.

World: host-only. Floor: cli, the lowest.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# A unit, the next smaller one, and seconds of both.
_SPANS = (
    ("d", "h", 86400, 3600),
    ("h", "min", 3600, 60),
    ("min", "s", 60, 1),
)
_REDRAW_SECS = 0.2
_CLEAR = "\r\x1b[K"


def size(num_bytes: float) -> str:
    """Bytes with three digits, `1.23 GB`."""
    value, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def span(secs: float) -> str:
    """A time as long as people say it: `0.25 s`, `12.3 s`, `5 min 12 s`, `3 d 4 h`."""
    if secs < 99.95:
        return f"{secs:.2f} s" if secs < 9.995 else f"{secs:.1f} s"
    left = round(secs)
    for unit, smaller, size, rest in _SPANS:
        if left >= size:
            return f"{left // size} {unit} {left % size // rest} {smaller}"
    raise AssertionError(secs)


def date(secs: float) -> str:
    """A time as people here write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(secs))


def plural(number: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {'leaves' if noun == 'leaf' else f'{noun}s'}"


def table(rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as they need; those in `right` end at their right side."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def print_json(value: Any) -> None:
    """One JSON object; numbers that are not finite are text."""
    print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return value


class Progress:
    """A line on stderr that says how far something is, on a terminal alone.

    Args:
        what: is being done.
        num_bytes: all of it.
    """

    def __init__(self, what: str, *, num_bytes: int):
        self._what = what
        self._num_bytes = max(1, num_bytes)
        self._done = 0
        self._drawn_at = -math.inf
        self._is_live = sys.stderr.isatty()

    def add(self, num_bytes: int) -> None:
        """Counts bytes."""
        self._done += num_bytes
        now = time.monotonic()
        if self._is_live and now - self._drawn_at >= _REDRAW_SECS:
            self._drawn_at = now
            share = min(100, 100 * self._done // self._num_bytes)
            text = f"{self._what}: {share} % of {size(self._num_bytes)}"
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the line away."""
        if self._is_live and self._drawn_at > -math.inf:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
