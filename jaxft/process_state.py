"""What the kernel says of a process: why it does not move.

World: host-only. Floor: the lowest. Read `jaxft/recovery/silence.py` or
`jaxft/faults/stacks.py`, which ask, next.
"""

from __future__ import annotations

import dataclasses
import pathlib

# States of a process (see `man proc`) that explain why it does not move.
_STATES = {"T": ", stopped by a signal", "D": ", waiting for a disk or a device"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What the kernel says of a process.

    Attributes:
        letter: its state, as in `man proc`; `?` when it cannot be read.
        is_traced: whether a debugger holds it.
    """

    letter: str = "?"
    is_traced: bool = False

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
    )
