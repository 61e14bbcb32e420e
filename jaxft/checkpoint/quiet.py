"""Keeps Orbax from printing the failures that jaxft tells itself, in one line.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/orbax_io.py` next, which reads and writes under it.

A failed save or read reaches its caller as one exception. Orbax logs it from each of
its threads as well, and what the failure cut off tells about itself once more:
TensorStore finds event loops closed, tasks and coroutines are collected that nobody
awaits. Here exactly that is dropped, by where it comes from, and only while one of our
own saves or reads goes on. (What takes longer than `drain` waits may still speak.)
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator
from types import TracebackType
from typing import Any

_SETTLE_SECS = 0.2
_ORBAX = "/orbax/checkpoint/"
# How the errors begin that TensorStore raises: the name of a status.
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")

_lock = threading.Lock()
_num_users = 0
# What was there before: `sys.excepthook`, `sys.unraisablehook`.
_others: tuple[Any, Any] = (sys.__excepthook__, sys.__unraisablehook__)


def begin() -> None:
    """Orbax is quiet until `end`, once for each `begin`; from any thread."""
    global _num_users, _others
    with _lock:
        _num_users += 1
        if _num_users == 1:
            _others = sys.excepthook, sys.unraisablehook
            sys.excepthook, sys.unraisablehook = _tell_uncaught, _tell_leftover
            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(_is_news)


def end() -> None:
    """The counterpart of `begin`."""
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            if sys.excepthook is _tell_uncaught:
                sys.excepthook = _others[0]
            if sys.unraisablehook is _tell_leftover:
                sys.unraisablehook = _others[1]
            for name in ("absl", "asyncio"):
                logging.getLogger(name).removeFilter(_is_news)


@contextlib.contextmanager
def quiet_orbax() -> Generator[None, None, None]:
    """Orbax is quiet inside."""
    begin()
    try:
        yield
    finally:
        end()


def drain() -> None:
    """Lets what a failure cut off end while it is still quiet."""
    time.sleep(_SETTLE_SECS)
    filters: Any = warnings.filters
    # It is this module that collects them, and so is said to warn.
    warnings.filterwarnings(
        "ignore",
        message="coroutine .* was never awaited",
        category=RuntimeWarning,
        module=re.escape(__name__),
    )
    ours = filters[0]
    gc.collect()
    if ours in filters:
        filters.remove(ours)


def _is_news(record: logging.LogRecord) -> bool:
    """False for a failure that Orbax logs with its trace, and for a wrong warning."""
    if str(record.msg).find("Skipping merge of OCDBT") >= 0:
        return False  # There is nothing to merge where the layout has no database.
    if not record.exc_info:
        return True
    text = record.getMessage()
    if _ORBAX in record.pathname or _ORBAX in text:
        return False
    _, error, trace = record.exc_info
    if "never retrieved" in text and _is_bare(trace):
        return not _STATUS.match(str(error))
    return not _passes_orbax(trace)


def _tell_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    # Called by TensorStore's threads themselves.
    if not (_is_bare(trace) and "loop is closed" in str(error)):
        _others[0](kind, error, trace)


def _tell_leftover(leftover: Any) -> None:
    source = leftover.object
    if inspect.iscoroutine(source) and _ORBAX in source.cr_code.co_filename:
        return
    is_cut_off = "loop is closed" in str(leftover.exc_value)
    if not is_cut_off and not _passes_orbax(leftover.exc_traceback):
        _others[1](leftover)


def _is_bare(trace: TracebackType | None) -> bool:
    """No frame but asyncio's: it comes out of TensorStore, not of a program."""
    frames = traceback.walk_tb(trace)
    return all("/asyncio/" in frame.f_code.co_filename for frame, _ in frames)


def _passes_orbax(trace: TracebackType | None) -> bool:
    frames = traceback.walk_tb(trace)
    return any(_ORBAX in frame.f_code.co_filename for frame, _ in frames)
