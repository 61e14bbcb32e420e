"""How much memory this process may still take, on its host and in its control groups.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/options.py` next, its one user.

A container has less than its host: who goes by the host alone is killed in the middle
of a save. Each control group above the process may have a limit of its own, and what
the kernel would give back of its file cache counts as free, as it does for the host.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB", re.MULTILINE)
_GROUP = re.compile(r"^\d+:([^:]*):/(.*)$", re.MULTILINE)
# Files of a group: limit, usage, and what of the usage is file cache of no recent use.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """What this process may still take; None where the system does not say.

    Args:
        root: where `proc` and `sys` are.
    """
    found = _AVAILABLE.search(_text(root / "proc/meminfo"))
    known = [int(found[1]) * 1024] if found else []
    known += [
        free
        for folder, files in _groups(root)
        if (free := _free_bytes(folder, files)) is not None
    ]
    return min(known, default=None)


def _groups(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, tuple[str, str, str]]]:
    """Folders of the groups that this process is in, with those above them.

    Seen from inside a container, a group can have its own files at the top and the
    host's name in `proc`.
    """
    top = root / "sys/fs/cgroup"
    for controllers, path in _GROUP.findall(_text(root / "proc/self/cgroup")):
        if not controllers:
            mount, files = top, _V2
        elif "memory" in controllers.split(","):
            mount, files = top / "memory", _V1
        else:
            continue
        inside = pathlib.PurePosixPath(path)
        for part in (inside, *inside.parents):
            if ".." not in part.parts:
                yield mount / part, files


def _free_bytes(folder: pathlib.Path, files: tuple[str, str, str]) -> int | None:
    """What a group may still take; None where it has no limit."""
    limit, usage = _text(folder / files[0]).strip(), _text(folder / files[1]).strip()
    if not limit.isdecimal() or not usage.isdecimal():
        return None  # There is no such group here, or the limit is called `max`.
    stat = _text(folder / "memory.stat")
    cached = re.search(rf"^{files[2]} (\d+)$", stat, re.MULTILINE)
    used = int(usage) - (int(cached[1]) if cached else 0)
    return max(0, int(limit) - max(0, used))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
