"""What a person sees while a run goes on: one live line, and lasting lines.

World: host-only. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/metrics/report.py`, the closing summary, next.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.live
import rich.text

from jaxft.config import Progress

# Without a terminal a line is printed this often: logs stay readable.
_PLAIN_SECS = 10.0
_LIVE_SECS = 0.25


class ProgressLine:
    """The live line of a run, on standard error.

    Args:
        num_steps: where the run ends.
        unit: what is counted a second, `tokens` or `rows`.
        restarts: restarts before this worker.
        mode: on a terminal only, always, or never.
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
        console = rich.console.Console(file=stream or sys.stderr, highlight=False)
        self._console = console
        self._num_steps = num_steps
        self._unit = unit
        self._restarts = restarts
        self._quiet = mode is Progress.NEVER
        self._clock = clock
        self._drawn = -1e9
        self._live: rich.live.Live | None = None
        if console.is_terminal and not self._quiet:
            self._live = rich.live.Live(
                console=console, auto_refresh=False, transient=True
            )
            self._live.start()
        self._plain = mode is Progress.ALWAYS or not console.is_terminal

    def update(
        self, step: int, *, loss: float, rate: float, checkpoint: int | None
    ) -> None:
        """Shows where the run is; draws only as often as a person can read."""
        now = self._clock()
        wait = _LIVE_SECS if self._live else _PLAIN_SECS
        if now - self._drawn < wait and step != self._num_steps:
            return
        self._drawn = now
        saved = "none yet" if checkpoint is None else f"step {checkpoint}"
        line = (
            f"step {step}/{self._num_steps}  loss {loss:.4f}  "
            f"{rate:,.0f} {self._unit}/s  checkpoint {saved}  "
            f"restarts {self._restarts}"
        )
        if self._live:
            self._live.update(rich.text.Text(line), refresh=True)
        elif self._plain and not self._quiet:
            self._console.print(line, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Takes the live line away."""
        if self._live:
            self._live.stop()
            self._live = None
