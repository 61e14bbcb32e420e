"""What a step holds, leaf by leaf: one of ours, or any Orbax checkpoint.

World: host-only. Floor: above `array_store`, below `verify`. Read
`jaxft/checkpoint/array_store.py` before and `jaxft/checkpoint/diff.py` after.

Run record and manifest say what the leaves were; where there is none, Orbax's notes
and the arrays themselves do. Values come back as NumPy, in the dtype that was saved;
typed random keys as their key data.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxft import fingerprints
from jaxft.checkpoint import array_store, layout, run_record
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint.stored_tree import TREE_FILE, ArrayError

# Stored as bytes, for want of a type of their own; see `jaxft/checkpoint/leaves.py`.
BYTE_DTYPES = {
    "uint2": np.dtype(ml_dtypes.uint2),
    "uint4": np.dtype(ml_dtypes.uint4),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
}
PYTHON_DTYPES = {"int": "int64", "float": "float64", "bool": "bool"}

_IN_A_WORKDIR = "checkpoints"
_ITEMS = (layout.STATE_ITEM, "default", "pytree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of a step.

    Attributes:
        path: its keys, joined by slashes.
        name: what it is stored as.
        kind: `array`, `numpy`, ..., see `run_record.LeafKind`.
        dtype: as it was saved; `key<...>` for typed keys; empty for text.
        shape: of the leaf; the data of typed keys has one dimension more.
        entry: what the manifest says; None where there is none.
        is_stored: whether there is an array of it.
    """

    path: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    entry: manifests.LeafEntry | None = None
    is_stored: bool = True

    @property
    def type_text(self) -> str:
        """Dtype and shape, `float32[8,128]`; the kind where it has none."""
        if not self.dtype:
            return self.kind
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Contents:
    """A step, opened to look inside.

    Args:
        path: a step's folder, or an item folder of any Orbax checkpoint.

    Attributes:
        path: the same, absolute.
        manifest: None where there is none, or none that can be read.
        manifest_problem: why not, where it is there.
        record: the run record; None where there is none.
        store: the arrays.

    Raises:
        ArrayError: it is no checkpoint, or what describes its arrays is damaged.
        RecordError: its run record is damaged.
        FaultError: kind CONFIG: a newer jaxft wrote it.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(path)
        self.manifest: manifests.Manifest | None = None
        self.manifest_problem = ""
        self.record: dict[str, Any] | None = None
        try:
            self.manifest = manifests.read(self.path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except manifests.ManifestError as error:
            self.manifest_problem = str(error)
        if os.path.lexists(os.path.join(self.path, layout.RUN_ITEM)):
            self.record = run_record.read_record(self.path)
        self.store = array_store.ArrayStore(find_item(self.path))

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Path -> leaf, in the order of the tree.

        Raises:
            ArrayError: an array is missing or damaged.
            OSError: it cannot be read.
        """
        if self.record is None:
            return self._stored_leaves()
        entries = self.manifest.leaves if self.manifest else {}
        stored = {leaf.path: leaf for leaf in self.store.leaves.values()}
        found = {}
        for path, spec in run_record.leaf_specs(self.record).items():
            known = stored.get(path)
            found[path] = Leaf(
                path=path,
                name=known.name if known else path.replace("/", "."),
                kind=str(spec.kind),
                dtype=PYTHON_DTYPES.get(spec.kind, spec.dtype),
                shape=spec.shape,
                entry=entries.get(path),
                is_stored=known is not None and known.has_array,
            )
        return found

    def _stored_leaves(self) -> dict[str, Leaf]:
        found = {}
        self.store.open_ahead(self.store.names())
        for path, leaf in self.store.leaves.items():
            if leaf.has_array:
                spec = self.store.spec(leaf.name)
                dtype, shape = str(spec.dtype), spec.shape
                if leaf.key_impl:
                    dtype, shape = f"key<{leaf.key_impl}>", shape[:-1]
            elif leaf.kind == "string":
                dtype, shape = "", ()
            else:
                continue
            kind = "str" if leaf.kind == "string" else "array"
            found[path] = Leaf(
                path=path,
                name=leaf.name,
                kind=kind,
                dtype=dtype,
                shape=shape,
                is_stored=leaf.has_array,
            )
        return found

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """Path -> value, of the leaves that are text.

        Raises:
            ArrayError: they are damaged.
            OSError: they cannot be read.
        """
        return self.store.texts()

    def value_type(self, path: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of what reading a leaf gives.

        Raises:
            ArrayError: it has no array, or that is damaged.
            OSError: it cannot be read.
        """
        leaf = self.leaves[path]
        if 0 in leaf.shape:
            return np.dtype(leaf.dtype), leaf.shape
        if not leaf.is_stored:
            raise ArrayError(path, f"there is no array of it in {self.store.path}")
        spec = self.store.spec(leaf.name)
        return BYTE_DTYPES.get(leaf.dtype, spec.dtype), spec.shape

    def read_parts(
        self, path: str, *, max_bytes: int = array_store.PART_BYTES
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """A leaf in parts, checked against its fingerprint where it has one.

        Args:
            path: of the leaf.
            max_bytes: of parts in memory at a time.

        Yields:
            (offsets, part), in row-major order of the offsets.

        Raises:
            ArrayError: it is missing, damaged or, after the last part, not what was
                saved.
            OSError: it cannot be read.
        """
        leaf = self.leaves[path]
        dtype, shape = self.value_type(path)
        if 0 in shape:
            return
        digester = fingerprints.ArrayDigester(shape, dtype)
        for offsets, part in self.store.read_chunks(leaf.name, max_bytes=max_bytes):
            part = decode(part, leaf.dtype)
            if leaf.entry is not None:
                digester.add(part, offsets=offsets)
            yield offsets, part
        if leaf.entry is not None:
            digest = digester.result()
            if digest.fingerprint != leaf.entry.fingerprint:
                raise ArrayError(
                    path,
                    f"its values have changed: fingerprint {digest.fingerprint}, "
                    f"{leaf.entry.fingerprint} was saved",
                )

    def read_box(
        self, path: str, offsets: Sequence[int], *, shape: Sequence[int]
    ) -> np.ndarray:
        """A box of a leaf.

        Raises:
            ArrayError: it is missing or damaged.
            OSError: it cannot be read.
        """
        leaf = self.leaves[path]
        value = self.store.read(leaf.name, box=(offsets, shape))
        return decode(value, leaf.dtype)


def decode(value: np.ndarray, dtype: str) -> np.ndarray:
    """What was saved, from what is stored in its place."""
    if dtype not in BYTE_DTYPES:
        return value
    if dtype.startswith("uint"):
        return value.astype(BYTE_DTYPES[dtype])
    return value.view(BYTE_DTYPES[dtype])


def find_root(path: str) -> str:
    """The checkpoint root that a folder is or, as a workdir, has."""
    below = os.path.join(path, _IN_A_WORKDIR)
    return below if os.path.isdir(below) else path


def find_item(path: str | os.PathLike[str]) -> str:
    """The folder with the arrays: `path` itself, or an item below it.

    Raises:
        ArrayError: there is none, or there are several.
        OSError: it cannot be read.
    """
    folder = pathlib.Path(path)
    if (folder / TREE_FILE).is_file():
        return os.fspath(folder)
    for name in _ITEMS:
        if (folder / name).is_dir():
            return os.fspath(folder / name)
    found = [
        below
        for below in sorted(folder.iterdir() if folder.is_dir() else [])
        if (below / TREE_FILE).is_file()
    ]
    if len(found) != 1:
        several = ", ".join(below.name for below in found)
        reason = f"has several items: {several}" if found else "is no checkpoint"
        raise ArrayError("", f"{folder} {reason}")
    return os.fspath(found[0])
