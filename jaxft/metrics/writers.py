"""What a person sees while a run goes on: one live line, and lasting lines.

World: host-only. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/metrics/report.py`, the closing summary, next.

The live line is redrawn in place by the two controls that every terminal knows. It
changes no mode of the terminal: a process that is killed has nothing to put back, and
whoever writes next (the supervisor, another worker) only has to clear the line.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from jaxft.config import Progress

# Without a terminal a line is printed this often: logs stay readable.
_PLAIN_SECS = 10.0
_LIVE_SECS = 0.25
# To the left edge, and clear from there on.
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """The live line of a run, on standard error.

    Args:
        num_steps: where the run ends.
        unit: what is counted a second, `tokens` or `rows`.
        restarts: restarts before this worker.
        mode: on a terminal only, always, or never.
        stream: standard error by default.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        unit: str,
        restarts: int = 0,
        mode: Progress = Progress.AUTO,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        # None where it was closed when Python began.
        self._stream: TextIO | None = stream or sys.stderr
        self._num_steps = num_steps
        self._unit = unit
        self._restarts = restarts
        self._quiet = mode is Progress.NEVER
        self._clock = clock
        self._drawn_at = -math.inf
        self._is_live = can_redraw(self._stream)

    def update(
        self, step: int, *, loss: float, rate: float, checkpoint: int | None
    ) -> None:
        """Shows where the run is; draws only as often as a person can read."""
        now = self._clock()
        wait = _LIVE_SECS if self._is_live else _PLAIN_SECS
        if self._quiet or (now - self._drawn_at < wait and step != self._num_steps):
            return
        self._drawn_at = now
        saved = "none yet" if checkpoint is None else f"step {checkpoint}"
        line = (
            f"step {step}/{self._num_steps}  loss {loss:.4f}  "
            f"{rate:,.0f} {self._unit}/s  checkpoint {saved}  "
            f"restarts {self._restarts}"
        )
        if self._is_live:
            # One column stays free: a full row makes some terminals go to the next.
            line = line[: _num_columns(self._stream) - 1]
            _write(self._stream, _CLEAR + line)
        else:
            _write(self._stream, line + "\n")

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        if not self._quiet:
            say(text, stream=self._stream)

    def close(self) -> None:
        """Takes the live line away."""
        if self._is_live and self._drawn_at > -math.inf:
            _write(self._stream, _CLEAR)


def say(text: str, *, stream: TextIO | None) -> None:
    """Prints a line that stays, in the place of a live line where there is one.

    A stream that is closed, broken, full or None ends no run: the line is lost.
    """
    _write(stream, f"{_CLEAR if can_redraw(stream) else ''}{text}\n")


def tolerate_lost_output() -> None:
    """Makes this process's standard streams swallow what nobody can take.

    Whatever is printed from here on, also by code of the user's own, raises nothing
    where the reader is gone, the disk is full or the stream was closed from the start.
    """
    sys.stdout = _tolerant(sys.stdout, fd=1)
    sys.stderr = _tolerant(sys.stderr, fd=2)


class _TolerantFile(io.FileIO):
    """A file whose writes succeed, whatever became of the bytes."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            num_bytes = super().write(data)
            if num_bytes is not None:  # It is where a pipe is full and must not wait.
                return num_bytes
        return memoryview(data).nbytes


def _tolerant(stream: TextIO | None, *, fd: int) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None: closed when Python began.
        return open(os.devnull, "w") if stream is None else stream
    return io.TextIOWrapper(
        io.BufferedWriter(_TolerantFile(fd, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


def can_redraw(stream: TextIO | None) -> bool:
    """Whether it is a terminal that can clear a line."""
    if stream is None:
        return False
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    return False


def _num_columns(stream: TextIO | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        fd = stream.fileno() if stream is not None else -1
        if num_columns := os.get_terminal_size(fd).columns:
            return num_columns
    return 80  # A terminal that does not know its size says 0.


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # As Python sets it where a descriptor was closed.
        return
    # Nobody looks any more: no reason to end a run.
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()
