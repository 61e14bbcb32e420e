"""Reads stored arrays to NumPy through TensorStore, with no device: its only door.

World: host-only. Floor: above `manifest`, below `verify`. Read
`jaxft/checkpoint/stored_tree.py` before and `jaxft/checkpoint/verify.py` after.

An item folder of any Orbax checkpoint will do: arrays in zarr2 or zarr3, each in a
folder of its own or all in one OCDBT database.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import glob
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from jaxft.checkpoint import layout, step_files, stored_tree
from jaxft.checkpoint.stored_tree import ArrayError

PART_BYTES = 2**26

_NODES_CACHE_BYTES = 10**8
# Reads at a time: storage over a network is far away rather than slow.
_NUM_READS = 32
# TensorStore says these with the words of the system, and nothing of the data is
# wrong: not now, or not for this process.
_UNREADABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """How one array is stored.

    Attributes:
        dtype: of its elements; uint32 for the data of typed keys.
        shape: of the whole array.
        chunk_shape: of what is written as one piece.
        read_shape: of the smallest part that can be read.
        codecs: of a chunk, outermost first, e.g. `bytes, zstd, crc32c`.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    read_shape: tuple[int, ...]
    codecs: tuple[str, ...]

    @property
    def num_chunks(self) -> int:
        """Pieces on disk."""
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return math.prod(-(-size // chunk) for size, chunk in pairs)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


# --- any store ----------------------------------------------------------------


def open_kvstore(
    url: str, *, context: Mapping[str, Any] | None = None, **fields: Any
) -> ts.KvStore:
    """Opens a place for files, on a disk or in an object store.

    Args:
        url: a folder, or `file://`, `s3://bucket/prefix`, `gs://...`, `memory://`.
        context: TensorStore's resources, e.g. `{"s3_request_concurrency": ...}`.
        **fields: of TensorStore's spec of that store, e.g. `endpoint`.

    Raises:
        ValueError: TensorStore cannot open it.
    """
    if "://" in url:
        spec = ts.KvStore.Spec(url if url.endswith("/") else f"{url}/").to_json()
    else:
        folder = os.path.abspath(os.path.expanduser(url))
        spec = {"driver": "file", "path": f"{folder}/"}
    opened = ts.KvStore.open(
        {**spec, **fields}, context=ts.Context(dict(context or {}))
    )
    return opened.result()


# --- the arrays of one item ---------------------------------------------------


def _no_database(path: str, *, has_database: bool) -> str:
    """What is wrong where a database is, and should not be, or the other way round."""
    if has_database:
        return f"{path} should have no database: manifest.ocdbt is there"
    parts = glob.glob(f"{glob.escape(path)}/ocdbt.process_*")
    if parts and not os.path.isdir(os.path.join(path, "d")):
        whose = "one process" if len(parts) == 1 else f"{len(parts)} processes"
        return (
            f"{path} is incomplete: what {whose} wrote was never merged, its save "
            "ended before that; use another step"
        )
    return f"{path} should have a database: manifest.ocdbt is missing"


class ArrayStore:
    """The arrays of one item folder, read only.

    Args:
        path: the folder, `<step>/state` say.
        num_threads: how many chunks are decoded at a time; 0 for one per core.

    Raises:
        ArrayError: what describes the arrays is damaged, or this is no item folder.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], *, num_threads: int = 0):
        self.path = os.path.abspath(path)
        notes = stored_tree.read_json(self.path, stored_tree.TREE_FILE)
        self._is_zarr3 = bool(notes.get("use_zarr3", False))
        has_database = os.path.isfile(os.path.join(self.path, "manifest.ocdbt"))
        self.is_ocdbt = bool(notes.get("use_ocdbt", has_database))
        if self.is_ocdbt != has_database:
            raise ArrayError("", _no_database(self.path, has_database=has_database))
        self.leaves = stored_tree.parse(notes, folder=self.path)
        owners: dict[str, list[str]] = {}
        for leaf in self.leaves.values():
            if leaf.has_array:
                owners.setdefault(leaf.name, []).append(leaf.path)
        self._owners = owners
        limit = num_threads or max(1, os.cpu_count() or 1)
        # Decoded chunks are not kept; the nodes of the database are.
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": _NODES_CACHE_BYTES},
                "file_io_concurrency": {"limit": max(_NUM_READS, limit)},
                "data_copy_concurrency": {"limit": limit},
            }
        )
        self._open_arrays: dict[str, ts.TensorStore] = {}
        self._opening: dict[str, Any] = {}

    def names(self) -> list[str]:
        """What the arrays are stored as."""
        return list(self._owners)

    def open_ahead(self, names: Iterable[str]) -> None:
        """Begins to open arrays: many are as quick as one.

        What is wrong with one is told by whoever asks for it.
        """
        for name in names:
            is_new = name not in self._open_arrays and name not in self._opening
            if is_new and len(self._owners.get(name, ())) == 1:
                self._opening[name] = self._start_opening(name)

    def spec(self, name: str) -> ArraySpec:
        """How one array is stored.

        Raises:
            ArrayError: it is not there, or damaged.
            OSError: it cannot be read.
        """
        array = self._open(name)
        rank = array.rank
        chunk = array.chunk_layout.write_chunk.shape or (1,) * rank
        part = array.chunk_layout.read_chunk.shape or (1,) * rank
        return ArraySpec(
            dtype=np.dtype(array.dtype.numpy_dtype),
            shape=tuple(array.shape),
            # A dimension that is not cut says so by zero.
            chunk_shape=tuple(map(_uncut, chunk, array.shape)),
            read_shape=tuple(map(_uncut, part, array.shape)),
            codecs=_codec_names(array.codec),
        )

    def read(
        self, name: str, *, box: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> np.ndarray:
        """One array.

        Args:
            name: what it is stored as.
            box: offsets and shape of a part of it; all of it by default.

        Raises:
            ArrayError: a chunk is missing or damaged; it is named.
            OSError: it cannot be read.
        """
        array = self._open(name)
        if box is not None:
            array = array[_slices(*box)]
        return np.asarray(self._result(name, array.read()))

    def read_chunks(
        self, name: str, *, max_bytes: int = PART_BYTES
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """One array in parts that cover it once, in row-major order of their corners.

        Args:
            name: what it is stored as.
            max_bytes: of parts in memory at a time: one with the caller and one on
                its way. What is stored as one piece is read as one piece.

        Yields:
            (offsets, part).

        Raises:
            ArrayError: a chunk is missing or damaged; it is named.
            OSError: it cannot be read.
        """
        array, spec = self._open(name), self.spec(name)
        boxes = plan_boxes(
            spec.shape,
            step=spec.read_shape,
            num_elements=max(1, max_bytes // (2 * spec.dtype.itemsize)),
        )
        ahead: collections.deque[tuple[tuple[int, ...], Any]] = collections.deque()
        for offsets, shape in boxes:
            ahead.append((offsets, array[_slices(offsets, shape)].read()))
            if len(ahead) > 1:
                first, future = ahead.popleft()
                yield first, np.asarray(self._result(name, future))
        for first, future in ahead:
            yield first, np.asarray(self._result(name, future))

    def damaged_chunks(self, name: str) -> Iterator[ArrayError]:
        """What is wrong with each damaged part of an array, read one by one.

        Raises:
            ArrayError: what describes the array is damaged.
            OSError: it cannot be read.
        """
        array, spec = self._open(name), self.spec(name)
        for offsets, shape in plan_boxes(
            spec.shape, step=spec.read_shape, num_elements=1
        ):
            try:
                self._result(name, array[_slices(offsets, shape)].read())
            except ArrayError as error:
                yield error

    def texts(self) -> dict[str, str]:
        """Leaf path -> value, of the leaves that are text.

        Raises:
            ArrayError: they are damaged.
            OSError: they cannot be read.
        """
        found = {}
        for leaf in self.leaves.values():
            if leaf.kind == "string":
                value: Any = self._all_texts
                for part in leaf.name.split("/"):
                    value = value.get(part) if isinstance(value, dict) else None
                if type(value) is not str:
                    file = os.path.join(self.path, stored_tree.TEXT_FILE)
                    raise ArrayError(leaf.path, f"no text of that name in {file}")
                found[leaf.path] = value
        return found

    @functools.cached_property
    def _all_texts(self) -> dict[str, Any]:
        """As Orbax keeps them: nested where a name has slashes."""
        return stored_tree.read_json(self.path, stored_tree.TEXT_FILE)

    def sizes_on_disk(self) -> dict[str, tuple[int, int]]:
        """Name -> (chunks, bytes of them) in the database; opens no array.

        Raises:
            ArrayError: this is no database, or it is damaged.
        """
        if not self.is_ocdbt:
            raise ArrayError("", f"{self.path} has no database")
        store = open_kvstore(self.path)
        try:
            return _database_sizes(store, self.names())
        except (ValueError, KeyError, IndexError) as error:
            raise ArrayError("", f"{self.path}: {_one_line(error)}") from error

    def _open(self, name: str) -> ts.TensorStore:
        if (array := self._open_arrays.get(name)) is None:
            owners = self._owners.get(name)
            if owners is None:
                raise ArrayError(name, f"is not among the arrays of {self.path}")
            if len(owners) > 1:
                raise ArrayError(
                    owners[0],
                    f"shares the array {name} with leaf {owners[1]}: the values of "
                    "one of them are lost",
                )
            opening = self._opening.pop(name, None) or self._start_opening(name)
            array = self._result(name, opening)
            self._open_arrays[name] = array
        return array

    def _start_opening(self, name: str) -> Any:
        store: dict[str, Any]
        if self.is_ocdbt:
            store = {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{self.path}/"},
                "path": f"{name}/",
                "cache_pool": "cache_pool#ocdbt",
            }
        else:
            store = {"driver": "file", "path": f"{self.path}/{name}/"}
        spec = {
            "driver": "zarr3" if self._is_zarr3 else "zarr",
            "kvstore": store,
            # Zeros in the place of a lost chunk would be wrong values.
            "fill_missing_data_reads": False,
        }
        return ts.open(spec, open=True, read=True, context=self._context)

    def _result(self, name: str, future: Any) -> Any:
        """Waits; what TensorStore raises is told as what it is."""
        try:
            return future.result()
        except Exception as error:
            text = _one_line(error)
            for number in _UNREADABLE:
                if os.strerror(number) in text:
                    raise OSError(number, text) from error
            path = self._owners[name][0]
            raise ArrayError(path, text) from error


def plan_boxes(
    shape: Sequence[int], *, step: Sequence[int], num_elements: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts an array along its chunks.

    Args:
        shape: of the array.
        step: shape of a chunk.
        num_elements: most of them in a box, but at least one chunk is.

    Yields:
        (offsets, shape) of each box, in row-major order.
    """
    if 0 in shape:
        return
    box = [min(size, chunk) for size, chunk in zip(shape, step, strict=True)]
    for dim in reversed(range(len(box))):
        room = max(1, num_elements // math.prod(box))
        box[dim] = min(shape[dim], box[dim] * room)
        if box[dim] < shape[dim]:
            break
    starts = [range(0, size, part) for size, part in zip(shape, box, strict=True)]
    for offsets in itertools.product(*starts):
        yield (
            offsets,
            tuple(
                min(part, size - start)
                for part, size, start in zip(box, shape, offsets, strict=True)
            ),
        )


def _slices(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    pairs = zip(offsets, shape, strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)


def measure_leaves(
    step_path: str | os.PathLike[str],
    *,
    names: Sequence[str],
    files: Mapping[str, step_files.FileEntry],
    array_layout: str,
) -> dict[str, tuple[int, int]]:
    """Name -> (chunks, bytes of them on disk), for the manifest of a new step.

    Args:
        step_path: the step's folder.
        names: of the leaves that have an array.
        files: what `step_files.collect_files` gave.
        array_layout: `files` or `ocdbt`.

    Raises:
        ArrayError: an array is not there.
    """
    item = pathlib.Path(step_path, layout.STATE_ITEM)
    if array_layout == "ocdbt":
        sizes = ArrayStore(item).sizes_on_disk()
        missing = [name for name in names if not sizes.get(name, (0, 0))[0]]
        if missing:
            raise ArrayError(missing[0], f"has no chunk in {item}")
        return {name: sizes[name] for name in names}
    found: dict[str, list[int]] = {}
    for path, entry in files.items():
        if folder := step_files.leaf_folder(path, files):
            name = folder.partition("/")[2]
            found.setdefault(name, []).append(entry.num_bytes)
    missing = [name for name in names if name not in found]
    if missing:
        raise ArrayError(missing[0], f"has no chunk in {item}")
    return {name: (len(found[name]), sum(found[name])) for name in names}


# --- what TensorStore says ----------------------------------------------------


def _uncut(part: int | None, size: int) -> int:
    return part or max(1, size)


def _codec_names(codec: ts.CodecSpec | None) -> tuple[str, ...]:
    """Names of what a chunk went through; `sharding_indexed` is not one of them."""
    if codec is None:
        return ()
    value = codec.to_json()
    if value.get("driver") == "zarr":
        compressor = value.get("compressor")
        return (compressor["id"],) if compressor else ()

    def walk(codecs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for one in codecs:
            inner = one.get("configuration", {})
            if one["name"] == "sharding_indexed":
                yield from walk(inner.get("codecs", []))
            elif one["name"] == "blosc":
                yield f"blosc:{inner.get('cname')}"
            else:
                yield one["name"]

    return tuple(walk(value.get("codecs", [])))


def _one_line(error: BaseException) -> str:
    """Its text without TensorStore's notes for programmers."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r" \[(?:tensorstore_spec|source locations)=", text)[0][:600]


def _database_sizes(
    store: ts.KvStore, names: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Name -> number and bytes of the values below it that are chunks."""
    sizes = dict.fromkeys(names, (0, 0))
    for key, size in _database_entries(store):
        folder, _, file = key.rpartition("/")
        if file in ("zarr.json", ".zarray"):
            continue
        while folder and folder not in sizes:
            folder = folder.rpartition("/")[0]
        if folder:
            num_chunks, num_bytes = sizes[folder]
            sizes[folder] = (num_chunks + 1, num_bytes + size)
    return sizes


def _database_entries(store: ts.KvStore) -> Iterator[tuple[str, int]]:
    """(key, length of its value) of the newest version of a database."""
    root = ts.ocdbt.dump(store).result()["versions"][-1]["root"]

    def dump(location: str, prefix: bytes) -> Iterator[tuple[str, int]]:
        node = ts.ocdbt.dump(store, location).result()
        for entry in node["entries"]:
            key = prefix + entry["key"]
            if "inline_value" in entry:
                yield key.decode(), len(entry["inline_value"])
            elif "indirect_value" in entry:
                yield key.decode(), int(entry["indirect_value"].rpartition(":")[2])
            else:
                below = prefix + entry["subtree_common_prefix"]
                yield from dump(entry["location"], below)

    if "location" in root:
        yield from dump(root["location"], b"")
