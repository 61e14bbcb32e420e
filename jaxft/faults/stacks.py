"""What every thread of this process is doing, as text for people.

World: host-only. Floor: faults. Read `jaxft/faults/watchdog.py`, which asks when
nothing moves, next.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import types

from jaxft.process_state import process_state
from jaxft.records import MAX_EVIDENCE_BYTES

# Files of debuggers: whoever sits in one of their frames waits for a person.
_DEBUGGERS = frozenset({"pdb.py", "bdb.py", "pydevd.py"})
# Lines of one thread in a short text, two for each call.
_NUM_LINES = 24
# XLA is at work below this file of JAX: a compilation, however it came about.
_COMPILER = os.path.join("jax", "_src", "compiler.py")


def all_stacks(*, last: int) -> str:
    """Every thread by name, the newest call last; thread `last` comes last.

    Before it come those that read its input, for it may wait for them.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}

    def rank(ident: int) -> tuple[bool, bool, int]:
        is_reader = names.get(ident, "").startswith("jaxft-read")
        return ident == last, is_reader, ident

    return "\n".join(
        f"Thread {names.get(ident, ident)} (most recent call last):\n"
        + "\n".join(_lines(frames[ident]))
        for ident in sorted(frames, key=rank)
    )


def frames_of(ident: int) -> list[types.FrameType]:
    """The frames of a thread, the newest first."""
    frame = sys._current_frames().get(ident)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def where(frames: list[types.FrameType]) -> str:
    """The newest of `frames` in a few words: file, line and function.

    Who waits for another thread is named, not the wait.
    """
    named = [f for f in frames if f.f_code.co_filename != threading.__file__]
    return _place((named or frames)[0]) if frames else "nowhere"


def excerpt(text: str, *, max_bytes: int = MAX_EVIDENCE_BYTES) -> str:
    """What fits of `all_stacks`: the newest calls of each thread, the last threads."""
    if len(text.encode()) <= max_bytes:
        return text
    threads = []
    for thread in re.split(r"\n(?=Thread )", text):
        header, *lines = thread.split("\n")
        newest = lines if len(lines) <= _NUM_LINES else ["  ...", *lines[-_NUM_LINES:]]
        threads.append("\n".join([header, *newest]))
    data = "\n".join(threads).encode()
    if len(data) <= max_bytes:
        return data.decode()
    return data[-max_bytes:].decode(errors="ignore").partition("\n")[2]


def is_compiling(frames: list[types.FrameType]) -> bool:
    """Whether XLA compiles for these frames; False where JAX has moved the place."""
    return any(frame.f_code.co_filename.endswith(_COMPILER) for frame in frames)


def is_debugged(frames: list[types.FrameType]) -> bool:
    """Whether a debugger holds these frames, or a native one this process."""
    if any(os.path.basename(f.f_code.co_filename) in _DEBUGGERS for f in frames):
        return True
    return process_state("self").is_traced


def _place(frame: types.FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


def _lines(frame: types.FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None:
        source = linecache.getline(
            frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        ).strip()
        place = f"  {_place(frame)}"
        lines.append(f"{place}\n    {source}" if source else place)
        frame = frame.f_back
    return lines[::-1]
