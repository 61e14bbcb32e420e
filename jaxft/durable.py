"""Files and names that a power cut leaves whole or not at all.

World: host-only. Floor: the lowest. Read `jaxft/checkpoint/decisions.py` or
`jaxft/limits.py`, which write so, next.

A file is written under a name of its own, made durable, and only then takes the name
that others read. Several hosts may do this in one folder at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from concurrent import futures

# How the names begin that nobody reads: a kill in the middle leaves one.
UNFINISHED = ".new-"

_NUM_SYNC_THREADS = 8
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def seal_folder(path: str | os.PathLike[str]) -> None:
    """Makes all that is in a folder durable, and its files read-only.

    A file of several names that is read-only already has gone through this under
    another one, and is left alone.

    Raises:
        OSError: it could not be done.
    """
    files, folders = _loose_paths(os.fspath(path))
    # Many small files wait for the disk one after the other, unless asked at once.
    with futures.ThreadPoolExecutor(_NUM_SYNC_THREADS, "jaxft-sync") as threads:
        list(threads.map(_seal_file, files))
        list(threads.map(sync_folder, folders))


def _loose_paths(folder: str) -> tuple[list[str], list[str]]:
    """(files that are not sealed, folders with inner ones first)."""
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner_files, inner_folders = _loose_paths(entry.path)
                files += inner_files
                folders += inner_folders
            elif (status := entry.stat()).st_nlink == 1 or status.st_mode & _WRITABLE:
                files.append(entry.path)
    return files, [*folders, folder]


def _seal_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_WRITABLE)
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(path: str | os.PathLike[str]) -> None:
    """Creates a folder and makes every new name on the way durable."""
    missing = []
    folder = pathlib.Path(path)
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    os.makedirs(path, exist_ok=True)
    for new in reversed(missing):
        sync_folder(new.parent)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """A place to write to that takes the name `path`, durably, at the end.

    A file of that name is replaced. When the body raises, it stays as it was.

    Raises:
        OSError: it could not be written.
    """
    folder, name = os.path.split(os.fspath(path))
    with _unfinished(folder, name) as temporary:
        yield temporary
        _sync_file(temporary)
        os.replace(temporary, path)
    sync_folder(folder or ".")


def replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a small file, durably, over the one of that name: a reader sees one whole.

    Raises:
        OSError: it could not be written; the one before it stays.
    """
    with whole_file(path) as temporary:
        pathlib.Path(temporary).write_bytes(data)


def write_once(
    path: str | os.PathLike[str], data: bytes, *, whole: bool = True
) -> None:
    """Writes a small file, durably; of all who try, on any host, one succeeds.

    Args:
        path: its name.
        data: its content.
        whole: only of account where the file system has no hard links. There two who
            try at the same moment may both succeed, but a reader sees a file whole;
            False: one succeeds, but a reader may see a part of it.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it could not be written.
    """
    folder, name = os.path.split(os.fspath(path))
    with _unfinished(folder, name) as temporary:
        pathlib.Path(temporary).write_bytes(data)
        _sync_file(temporary)
        _take_name(temporary, os.fspath(path), whole=whole)
    sync_folder(folder or ".")


def sweep(path: str | os.PathLike[str]) -> None:
    """Removes what kills have left of a file that nobody else writes now."""
    folder, name = os.path.split(os.fspath(path))
    for leftover in pathlib.Path(folder).glob(f"{UNFINISHED}*-{glob.escape(name)}"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _unfinished(folder: str, name: str) -> Iterator[str]:
    # A process's number is not enough: other hosts have the same.
    temporary = os.path.join(folder, f"{UNFINISHED}{secrets.token_hex(4)}-{name}")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _take_name(temporary: str, path: str, *, whole: bool) -> None:
    try:
        os.link(temporary, path)
        return
    except FileExistsError:
        # A server may have done it, and its answer been lost.
        if os.path.samefile(temporary, path):
            return
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    if not whole:
        with open(path, "xb") as file:
            file.write(pathlib.Path(temporary).read_bytes())
        _sync_file(path)
        return
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(temporary, path)
