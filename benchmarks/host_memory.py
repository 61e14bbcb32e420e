"""What the benchmarks know of the memory of their own process."""

from __future__ import annotations

import gc
import pathlib
import re


def reset_peak() -> None:
    """From now on `VmHWM` counts anew."""
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def read_memory(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process, in MB."""
    text = pathlib.Path("/proc/self/status").read_text()
    return float(re.search(rf"{field}:\s+(\d+) kB", text)[1]) / 1e3
