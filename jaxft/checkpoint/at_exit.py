"""Lets saves in flight end when a program leaves without `close`.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/manager.py` next, the one user.

`atexit` is too late: before it the interpreter closes all thread pools, and without
them Orbax cannot finish. Python 3.12 starts no thread at all once its end has begun:
there a save is waited for after an uncaught exception, and one that is in flight when
the program simply ends can be lost.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Finishes(Protocol):
    """Something with work in the background."""

    def finish(self) -> None:
        """Waits for it; never raises."""
        ...


_open: weakref.WeakSet[Finishes] = weakref.WeakSet()
_others_hook: Callable[..., object] | None = None


def finish_at_exit(one: Finishes) -> None:
    """Has `one.finish()` called at the end of the program, if it still lives."""
    global _others_hook
    if _others_hook is None:
        # Now, not at the import: the last one registered runs first, and the thread
        # pools have registered their own ends by the time that somebody saves.
        _others_hook = sys.excepthook
        # Private: only what is registered here runs before the pools are closed.
        threading._register_atexit(_finish_all)  # pyrefly: ignore[missing-attribute]
        if sys.version_info[:2] == (3, 12):
            sys.excepthook = _finish_after
    _open.add(one)


def _finish_all() -> None:
    for one in list(_open):
        one.finish()


def _finish_after(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    (_others_hook or sys.__excepthook__)(kind, error, trace)
    if threading.current_thread() is threading.main_thread():
        _finish_all()
