"""Lets saves in flight end when a program leaves without `close`.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/manager.py` next, the one user.

`atexit` is too late: before it the interpreter closes all thread pools, and without
them Orbax cannot finish. Python 3.12.0 to 3.12.2 start no thread at all once their end
has begun (python/cpython#113964): there it is the last frame of the program whose end
is watched.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import CodeType
from typing import Any, Protocol


class Finishes(Protocol):
    """Something with work in the background."""

    def finish(self) -> None:
        """Waits for it; never raises."""
        ...


_open: weakref.WeakSet[Finishes] = weakref.WeakSet()
_is_armed = False


def finish_at_exit(one: Finishes) -> None:
    """Has `one.finish()` called at the end of the program, if it still lives."""
    global _is_armed
    if not _is_armed:
        _is_armed = True
        # Now, not at the import: the last one registered runs first, and the thread
        # pools have registered their own ends by the time that somebody saves.
        # Private: only what is registered here runs before the pools are closed.
        threading._register_atexit(_finish_all)  # pyrefly: ignore[missing-attribute]
        if (3, 12) <= sys.version_info < (3, 12, 3):
            _watch_last_frame()
    _open.add(one)


def _finish_all() -> None:
    for one in list(_open):
        one.finish()


def _watch_last_frame() -> None:
    """Has saves end when the program's outermost frame does, however it ends."""
    monitoring: Any = sys.monitoring  # pyrefly: ignore[missing-attribute]
    tool = next((id for id in range(6) if monitoring.get_tool(id) is None), None)
    if tool is None or threading.current_thread() is not threading.main_thread():
        return
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    last = frame.f_code

    def ends(code: CodeType, *_: Any) -> None:
        if code is last and threading.current_thread() is threading.main_thread():
            _finish_all()

    monitoring.use_tool_id(tool, "jaxft")
    events = monitoring.events
    monitoring.register_callback(tool, events.PY_RETURN, ends)
    monitoring.register_callback(tool, events.PY_UNWIND, ends)
    monitoring.set_local_events(tool, last, events.PY_RETURN)
    monitoring.set_events(tool, events.PY_UNWIND)  # there is no local one
