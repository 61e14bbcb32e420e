"""Real harm to files: a byte that flips, a disk that is full.

World: host-only. Floor: faults, below `inject`. Read `jaxft/faults/inject.py` next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import stat

from jaxft.config import ConfigError
from jaxft.faults.plan import PATH

# A larger file system may be somebody's.
MAX_SCRATCH_BYTES = 2**30
_SCRATCH_TYPES = frozenset({"tmpfs", "ramfs"})
_BLOCK_BYTES = 2**16


def check_scratch(folder: pathlib.Path, root: str) -> None:
    """Refuses to fill anything but a small scratch file system.

    Args:
        folder: where the file that fills it will be.
        root: the checkpoint root, which must lie on the same one.

    Raises:
        ConfigError: it is none.
    """
    place = _existing(folder)
    if os.stat(place).st_dev != os.stat(_existing(pathlib.Path(root))).st_dev:
        raise ConfigError(PATH, f"enospc: {root} is on another disk than {place}")
    status = os.statvfs(place)
    num_bytes = status.f_blocks * status.f_frsize
    kind = _file_system(place)
    if kind not in _SCRATCH_TYPES or not 0 < num_bytes < MAX_SCRATCH_BYTES:
        raise ConfigError(
            PATH,
            f"enospc fills the file system of the workdir, and {place} is on {kind} of "
            f"{num_bytes / 2**30:.1f} GiB: it takes a tmpfs below 1 GiB",
        )


def _existing(path: pathlib.Path) -> pathlib.Path:
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _file_system(path: pathlib.Path) -> str:
    """Type of the file system that a path is on, as the kernel calls it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "an unknown one"


def fill(path: pathlib.Path) -> None:
    """Writes a file until the disk takes no more."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (_BLOCK_BYTES, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(size))
    finally:
        os.close(fd)


def choose_byte(step: pathlib.Path, *, seed: int) -> tuple[pathlib.Path, int]:
    """A file with data of a committed step, and an offset in it.

    Raises:
        FileNotFoundError: the step holds no data.
    """
    files = sorted(p for p in (step / "state").rglob("*") if _has_data(p))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no data in this step", str(step))
    rng = random.Random(f"jaxft {seed}")
    path = rng.choice(files)
    return path, rng.randrange(path.stat().st_size)


def _has_data(path: pathlib.Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def flip_byte(path: pathlib.Path, offset: int) -> None:
    """Turns all bits of one byte around, in place, in a file that is read-only."""
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode | stat.S_IWUSR)
    try:
        with path.open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
            os.fsync(file.fileno())
    finally:
        path.chmod(mode)
