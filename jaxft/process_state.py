"""What the kernel says of a process: its state, its memory, its command line.

World: host-only. Floor: the lowest. Read `jaxft/recovery/silence.py` or
`jaxft/faults/stacks.py`, which ask, next.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
from collections.abc import Sequence

# States of a process (see `man proc`) that explain why it does not move.
_STATES = {"T": ", stopped by a signal", "D": ", waiting for a disk or a device"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What the kernel says of a process.

    Attributes:
        letter: its state, as in `man proc`; `?` when it cannot be read.
        is_traced: whether a debugger holds it.
        has_pending: whether it has signals that it blocks.
    """

    letter: str = "?"
    is_traced: bool = False
    has_pending: bool = False

    @property
    def words(self) -> str:
        """What explains that it does not move; empty for nothing."""
        return _STATES.get(self.letter, "")


def process_state(pid: int | str) -> ProcessState:
    """Looks into `/proc/<pid>/status`; `self` is this process."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ProcessState()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return ProcessState(
        letter=(fields.get("State", "").split() or ["?"])[0],
        is_traced=fields.get("TracerPid", "0").strip() != "0",
        has_pending=any(
            int(fields.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd")
        ),
    )


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def show_words(words: Sequence[str]) -> None:
    """Lets lists of processes show `words` as the command line of this process.

    They are written where the kernel keeps the first ones, see `man proc_pid_stat`;
    where that is not to be found, or has less room, all stays as it was.
    """
    told = b"".join(os.fsencode(word) + b"\0" for word in words)
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        start, end = map(int, stat.rpartition(")")[2].split()[45:47])
        now = pathlib.Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    if not start or len(now) != end - start or len(told) > len(now):
        return
    ctypes.memmove(start, told.ljust(len(now), b"\0"), len(now))
