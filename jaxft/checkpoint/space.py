"""Proves before the first step that a root can hold checkpoints.

World: host-only. Floor: above `layout`. Read `jaxft/checkpoint/layout.py` before and
`jaxft/checkpoint/manager.py` after.

What a checkpoint needs of its file system is tried, not looked up: a file is written,
made durable, renamed, locked, hard-linked, in a folder that is removed again. Its name
is the root's own, so that the next probe finds what a kill has left of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator

from jaxft import durable, records
from jaxft.config import ConfigError

_SAMPLE = b"jaxft"
_PREFIX = ".jaxft-probe-"
# What a store lacks, or does, for a while: no setting is wrong.
_FOR_A_WHILE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class SpaceError(ValueError):
    """A root that cannot hold the checkpoints; one line says what is missing."""


class RoomError(SpaceError):
    """There is not enough room for what is kept."""


def refusal(
    error: Exception, *, setting: str = "checkpoint", newest: int | None
) -> ConfigError | records.FaultError:
    """What a failure before the first step ends the run as.

    Where steps are there already the settings have worked: a disk that is full, or
    read-only by now, is a failed save, and the same command goes on later.

    Args:
        error: the failure.
        setting: to blame, where the error names none.
        newest: the newest committed step, None for none.
    """
    known = isinstance(error, ConfigError)
    path, problem = (error.path, error.problem) if known else (setting, str(error))
    if newest is None or not _is_for_a_while(error):
        return ConfigError(path, problem)
    text = f"{problem}; the same command then goes on from step {newest}"
    kind = records.FaultKind.SAVE_FAILED
    return records.FaultError(records.Fault(kind=kind, step=newest, evidence=text))


def _is_for_a_while(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RoomError):
            return True
        if isinstance(error, OSError) and error.errno in _FOR_A_WHILE:
            return True
        error = error.__cause__
    return False


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a root can do beyond what it must.

    Attributes:
        has_links: whether it has hard links.
    """

    has_links: bool


def probe(root: str) -> Abilities:
    """Tries in, or where it is not there yet above, the root what saves will do.

    Raises:
        SpaceError: it names what does not work.
    """
    name = probe_name(root)
    _sweep(root, name)
    place = os.path.join(nearest_folder(root), name)
    with _ability(root, "make a folder"):
        os.mkdir(place, 0o700)
    try:
        return _try_all(root, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def probe_name(root: str) -> str:
    """The name of what is tried in, or above, a root: of no other root."""
    return _PREFIX + hashlib.sha256(os.fsencode(root)).hexdigest()[:16]


def _sweep(root: str, name: str) -> None:
    """Removes what a kill left of an earlier probe.

    It lies in the root, or where that was not there yet, in some folder above it.
    """
    folder = root
    while True:
        if os.path.isdir(left := os.path.join(folder, name)):
            shutil.rmtree(left, ignore_errors=True)
        if folder == (above := os.path.dirname(folder)):
            return
        folder = above


def _try_all(root: str, place: str) -> Abilities:
    first, second = os.path.join(place, "a"), os.path.join(place, "b")
    with open_for_probe(root, first) as fd:
        with _ability(root, "write a file"):
            os.write(fd, _SAMPLE)
        with _ability(root, "make a file durable (fsync)"):
            os.fsync(fd)
        with _ability(root, "lock a file (flock)"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with _ability(root, "make a folder durable (fsync)"):
        durable.sync_folder(place)
    with _ability(root, "rename a file"):
        os.rename(first, second)
    with _ability(root, "give back what was written"), open(second, "rb") as file:
        if file.read() != _SAMPLE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    try:
        os.link(second, first)
        has_links = os.path.samefile(first, second)
    except OSError:
        has_links = False
    return Abilities(has_links)


@contextlib.contextmanager
def open_for_probe(root: str, path: str) -> Iterator[int]:
    """A new file of the probe."""
    with _ability(root, "create a file"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _ability(root: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"{root} cannot hold checkpoints: it cannot {what}: {reason}"
        raise SpaceError(text) from error


def nearest_folder(root: str) -> str:
    """The root, or the folder above it that is there already."""
    while not os.path.lexists(root) and os.path.dirname(root) != root:
        root = os.path.dirname(root)
    return root


def check_space(
    root: str,
    *,
    state_bytes: int,
    num_kept: int,
    num_there: int,
    leftovers: Iterable[str] = (),
    free_bytes: Callable[[str], int] | None = None,
) -> None:
    """Asks for room for the steps that are kept and the one that is being written.

    A quota is not seen: it is found by the save that exceeds it.

    Args:
        root: the checkpoint root.
        state_bytes: of one step.
        num_kept: how many steps stay.
        num_there: how many are there already; they are deleted in turn.
        leftovers: folders of unfinished saves; they are deleted before the next one.
        free_bytes: free space of the disk that a folder is on; `statvfs` by default.

    Raises:
        RoomError: there is not enough.
    """
    free = (free_bytes or _free_bytes)(nearest_folder(root))
    free += sum(map(_own_bytes, leftovers))
    num_new = max(1, num_kept + 1 - num_there)
    if free >= num_new * state_bytes:
        return
    raise RoomError(
        f"{root} has {_shown(free)} free, and {num_new} more steps of "
        f"{_shown(state_bytes)} are to lie there ({num_kept} kept and one being "
        "written): free space, keep fewer (checkpoint.keep), or use another disk"
    )


def _free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _own_bytes(folder: str) -> int:
    """What is free when `folder` is deleted: files with other names stay."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def _shown(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
