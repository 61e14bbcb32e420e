"""The files of a step: which there are, how long, and what each ends or sums up to.

World: host-only. Floor: above `layout`, below `manifest`. Read
`jaxft/checkpoint/manifest.py` next, which keeps what is found here.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxft.checkpoint import layout

# What is in a larger file of a database, nodes as well as chunks, ends in crc32c: the
# commit does not wait until all bytes have been read a second time.
MAX_DIGESTED_BYTES = 2**22
_BLOCK_BYTES = 2**20
_NUM_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the step.

    Attributes:
        path: relative to the step, with forward slashes.
        num_bytes: its length.
        sha256: of its bytes; empty for a chunk that proves itself by its crc32c, and
            for a large file of such chunks.
        crc32c: the last four bytes, in hex, of a chunk that proves itself; empty for
            other files, and where an older jaxft wrote it.
    """

    path: str
    num_bytes: int
    sha256: str
    crc32c: str = ""


def collect_files(
    step_path: str | os.PathLike[str],
    *,
    array_layout: str,
    known: Mapping[str, FileEntry] | None = None,
) -> dict[str, FileEntry]:
    """Length and sha256 of every file of a finished step but the manifest's.

    Args:
        step_path: the step's folder, whatever it is called by now.
        array_layout: `files` or `ocdbt`; chunks of `files` that end in crc32c are
            not read, nor large data files of `ocdbt`.
        known: what was written of files that are linked: it stays true whatever has
            become of them since. They are not read, if their length is as it was.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = list_files(step_path)
    linked = {
        path: entry
        for path, entry in (known or {}).items()
        if sizes.get(path) == entry.num_bytes
    }
    checksums: dict[str, str] = {}
    if array_layout == "files":
        is_proven = _self_proving(step_path, sizes, linked=linked)
        checksums = {path: _checksum(step_path, path) for path in is_proven}
    else:
        is_proven = {
            path
            for path, size in sizes.items()
            if size > MAX_DIGESTED_BYTES and is_database_part(path)
        }
    unknown = [path for path in sizes if path not in is_proven and path not in linked]
    digests = digest_files(step_path, unknown)
    return {
        path: linked.get(path)
        or FileEntry(
            path=path,
            num_bytes=size,
            sha256=digests.get(path, ""),
            crc32c=checksums.get(path, ""),
        )
        for path, size in sizes.items()
    }


def list_files(step_path: str | os.PathLike[str]) -> dict[str, int]:
    """Relative path -> length of every file of a step but the manifest's, sorted.

    Raises:
        OSError: a folder cannot be read.
    """
    sizes: dict[str, int] = {}

    def walk(folder: str, prefix: str) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if path != layout.MANIFEST_ITEM:
                        walk(entry.path, f"{path}/")
                else:
                    sizes[path] = entry.stat().st_size

    walk(os.fspath(step_path), "")
    return dict(sorted(sizes.items()))


def leaf_folder(path: str, files: Mapping[str, Any]) -> str:
    """The folder of the zarr3 array that a file is a chunk of; empty for others.

    Args:
        path: of the file, relative to the step.
        files: all files of the step by path.
    """
    parts = path.split("/")
    for index in range(len(parts) - 1, 1, -1):
        if parts[index] == "c":
            folder = "/".join(parts[:index])
            is_array = f"{folder}/zarr.json" in files
            return folder if is_array and parts[0] == layout.STATE_ITEM else ""
        if not parts[index].isdecimal():
            return ""
    return ""


def of_leaves(files: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Those files of a step, of layout `files`, that belong to leaves of these names.

    Args:
        files: all files of the step by path.
        names: the names that the leaves are stored under.
    """
    folders = {f"{layout.STATE_ITEM}/{name}" for name in names}
    return [
        path
        for path in files
        if leaf_folder(path, files) in folders or os.path.dirname(path) in folders
    ]


def is_database_part(path: str) -> bool:
    """Whether a file of layout `ocdbt` is one of those that hold nodes and values."""
    item, *folders, _ = path.split("/")
    return item == layout.STATE_ITEM and folders[-1:] == ["d"] and len(folders) <= 2


def _self_proving(
    step_path: str | os.PathLike[str],
    files: Mapping[str, int],
    *,
    linked: Collection[str],
) -> set[str]:
    """The chunk files, but for linked ones, whose array says they end in crc32c."""
    by_folder: dict[str, list[str]] = {}
    for path in files:
        if path not in linked and (folder := leaf_folder(path, files)):
            by_folder.setdefault(folder, []).append(path)
    proven: set[str] = set()
    for folder, chunks in by_folder.items():
        text = pathlib.Path(step_path, folder, "zarr.json").read_bytes()
        if _ends_in_checksum(json.loads(text).get("codecs", [])):
            proven.update(chunks)
    return proven


def _checksum(step_path: str | os.PathLike[str], path: str) -> str:
    """The last four bytes of a chunk, in hex."""
    fd = os.open(os.path.join(step_path, path), os.O_RDONLY)
    try:
        return os.pread(fd, 4, max(0, os.fstat(fd).st_size - 4)).hex()
    finally:
        os.close(fd)


def _ends_in_checksum(codecs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a zarr3 codec list leaves no byte of a chunk without crc32c."""
    if not codecs:
        return False
    last = codecs[-1]
    if last["name"] == "crc32c":
        return True
    inner = last.get("configuration", {})
    return last["name"] == "sharding_indexed" and all(
        _ends_in_checksum(inner.get(part, [])) for part in ("codecs", "index_codecs")
    )


def digest_files(
    step_path: str | os.PathLike[str], paths: Iterable[str]
) -> dict[str, str]:
    """Relative path -> sha256.

    Raises:
        OSError: one cannot be read.
    """
    paths = list(paths)
    folder = pathlib.Path(step_path)
    pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "jaxft-digest")
    try:
        digests = pool.map(lambda path: file_sha256(folder / path), paths)
        return dict(zip(paths, digests, strict=True))
    finally:
        # After an error, or an interrupt, nobody waits for the rest.
        pool.shutdown(cancel_futures=True)


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
