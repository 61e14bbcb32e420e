"""Signals as bytes in a pipe, which a loop can wait for beside other things.

World: host-only. Floor: recovery. Read `jaxft/recovery/supervisor.py` and
`jaxft/recovery/local_job.py`, which wait for them, after this file.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any


class SignalPipe:
    """Stop signals and Ctrl-Z as bytes in a pipe, which a selector can wait for."""

    def __init__(self, signals: Sequence[signal.Signals]):
        # As nohup, jobs in the background and shells have it: what is ignored stays so.
        self._signals = [
            number
            for number in (*signals, signal.SIGTSTP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._earlier: dict[int, Any] = {}
        self._earlier_fd = -1

    def __enter__(self) -> SignalPipe:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        if threading.current_thread() is threading.main_thread():
            self._earlier_fd = signal.set_wakeup_fd(
                self._write_fd, warn_on_full_buffer=False
            )
            for number in self._signals:
                self._earlier[number] = signal.signal(number, _wake)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._earlier.items():
                if handler is not None:  # Not set from Python: it cannot come back.
                    signal.signal(number, handler)
            signal.set_wakeup_fd(self._earlier_fd)
        os.close(self.read_fd)
        os.close(self._write_fd)

    def read(self) -> list[int]:
        """The signals that came since the last call, in order."""
        try:
            return [n for n in os.read(self.read_fd, 4096) if n in self._signals]
        except BlockingIOError:
            return []


def _wake(number: int, frame: object) -> None:
    """Nothing to do: the number is in the pipe already."""
