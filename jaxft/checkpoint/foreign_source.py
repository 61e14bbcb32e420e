"""Any Orbax checkpoint as leaves by path: ours or not, and no tree needed to ask.

World: host-only. Floor: above `array_store`, below `foreign`. Read
`jaxft/checkpoint/array_store.py` before and `jaxft/checkpoint/foreign.py` after.

A path may be a workdir or a root of steps, a step, or one item of it. Of a root the
newest step is meant; of one of ours, which was neither rolled back nor saved when its
values were not finite.
Only the leaves that are asked for are read. Those of a step of ours are compared with
the fingerprints in its manifest; of another one, what its own checksums prove is all
that there is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxft import fingerprints, records
from jaxft.checkpoint import (
    array_store,
    contents,
    decisions,
    layout,
    manifest,
    run_record,
    step_files,
    stored_tree,
)

# Most that is read at a time, by all threads together.
MEMORY_BYTES = 2**28
_NUM_THREADS = min(8, os.cpu_count() or 1)

_STEP = re.compile(r"(?:.*_)?(\d+)")
# Told of each part of a leaf: where it begins, and its elements.
OnPart = Callable[[tuple[int, ...], np.ndarray], None]


def refuse(text: str) -> records.FaultError:
    """A path or a wish that cannot be fulfilled."""
    return records.fault_error(records.FaultKind.CONFIG, text)


def damaged(text: str) -> records.FaultError:
    """A checkpoint that is there and is not what was written."""
    return records.fault_error(records.FaultKind.NO_CHECKPOINT, text)


# --- where the arrays are -----------------------------------------------------


def find_item(path: str | os.PathLike[str]) -> str:
    """The item folder that a path means.

    Args:
        path: an item, a step, a root of steps, or a workdir.

    Raises:
        FaultError: kind CONFIG: there is no such folder, it holds no checkpoint that
            may be loaded, or it holds several; it is named.
        OSError: it cannot be read.
    """
    try:
        folder = layout.absolute_root(path)
    except ValueError as error:
        raise refuse(
            f"{path} is no local folder: fetch the checkpoint first"
        ) from error
    if not os.path.isdir(folder):
        raise refuse(f"{folder} does not exist: there is no checkpoint to load")
    step = folder
    if not _has_item(folder):
        root = contents.find_root(folder)
        step = _newest_step(root) or root
    try:
        return contents.find_item(step)
    except stored_tree.ArrayError as error:
        raise refuse(f"{error}: nothing to load") from error


def _has_item(folder: str) -> bool:
    """Whether a folder is an item or a step, so that nobody looks for steps in it."""
    names = ["", *os.listdir(folder)]
    return any(
        os.path.isfile(os.path.join(folder, name, stored_tree.TREE_FILE))
        for name in names
    )


def _newest_step(root: str) -> str | None:
    found = decisions.discover(root)
    for info in reversed(found.committed):
        if _is_healthy(info.path):
            return info.path
    if found.committed or found.abandoned or found.set_aside:
        raise refuse(f"{root} has no step left that is a resume point: name one")
    return _newest_of_others(root)


def _is_healthy(step_path: str) -> bool:
    """Whether a step is a resume point, as far as it can say."""
    try:
        return manifest.read(step_path).healthy
    except (OSError, manifest.ManifestError):
        return True  # If that is damage, then who reads it is told.


def _newest_of_others(root: str) -> str | None:
    steps = {
        int(match[1]): name
        for name in os.listdir(root)
        if (match := _STEP.fullmatch(name)) and os.path.isdir(os.path.join(root, name))
    }
    return os.path.join(root, steps[max(steps)]) if steps else None


# --- its leaves ---------------------------------------------------------------


class ForeignSource:
    """The leaves of one checkpoint, by path.

    Args:
        path: see `find_item`.
        memory_bytes: most that is read at a time.

    Attributes:
        path: its item folder.
        segments: leaf path -> its keys.
        num_bytes: of what was read so far.

    Raises:
        FaultError: kind CONFIG: see `find_item`; or a newer jaxft wrote it. Kind
            NO_CHECKPOINT: what describes the arrays is damaged.
        OSError: it cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, memory_bytes: int = MEMORY_BYTES
    ):
        self.path = find_item(path)
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._memory_bytes = memory_bytes
        self._step_path = os.path.dirname(self.path)
        try:
            self._manifest = self._read_manifest()
            self._store = array_store.ArrayStore(self.path)
            self._check_files(stored_tree.TREE_FILE)
            self._specs = self._read_specs()
        except (
            stored_tree.ArrayError,
            manifest.ManifestError,
            run_record.RecordError,
        ) as error:
            raise damaged(f"{self.path} cannot be loaded: {error}") from error
        stored = self._store.leaves
        self.segments = {
            path: stored[path].segments if path in stored else tuple(path.split("/"))
            for path in self._specs
        }

    def _read_manifest(self) -> manifest.Manifest | None:
        """The manifest of a step of ours, where the item is its state."""
        if os.path.basename(self.path) != layout.STATE_ITEM:
            return None
        try:
            return manifest.read(self._step_path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _check_files(self, *names: str) -> None:
        """Compares small files of the item with the manifest."""
        if self._manifest is None:
            return
        for name in names:
            path = os.path.relpath(os.path.join(self.path, name), self._step_path)
            entry = self._manifest.files.get(path)
            file = os.path.join(self._step_path, path)
            if entry is None or step_files.file_sha256(file) != entry.sha256:
                raise manifest.ManifestError(f"{file} is not as it was written")

    def _read_specs(self) -> dict[str, run_record.LeafSpec | None]:
        """Leaf path -> type; None where only the array itself tells."""
        if self._is_ours():
            if self._manifest is not None:
                self._check_files(f"../{layout.RUN_ITEM}/{run_record.RECORD_FILE}")
            record = run_record.read_record(self._step_path)
            return dict(run_record.leaf_specs(record))
        text = run_record.LeafSpec(run_record.LeafKind.TEXT)
        return {
            path: text if leaf.kind == "string" else None
            for path, leaf in self._store.leaves.items()
            if leaf.has_array or leaf.kind == "string"
        }

    def _is_ours(self) -> bool:
        """Whether the run record beside the item is one of ours."""
        if self._manifest is not None:
            return True
        if os.path.basename(self.path) != layout.STATE_ITEM:
            return False
        try:
            run_record.read_record(self._step_path)
        except (OSError, run_record.RecordError):
            return False  # Orbax's own, with an item that is called like ours.
        return True

    def spec(self, path: str) -> run_record.LeafSpec:
        """Type and shape of a leaf; of typed keys those of their data.

        Raises:
            FaultError: kind NO_CHECKPOINT: its array is damaged.
            OSError: it cannot be read.
        """
        spec = self._specs[path]
        if spec is not None and not spec.dtype.startswith("key<"):
            return spec
        array = self._guard(path, lambda name: self._store.spec(name))
        kind = run_record.LeafKind.ARRAY
        if spec is None and self._store.leaves[path].kind == "scalar":
            by_dtype = {dtype: name for name, dtype in contents.PYTHON_DTYPES.items()}
            name = by_dtype.get(str(array.dtype), "")
            if name and not array.shape:
                return run_record.LeafSpec(run_record.LeafKind(name))
        return run_record.LeafSpec(kind, str(array.dtype), array.shape)

    def key_impl(self, path: str) -> str:
        """Name of the implementation of typed random keys; empty for other leaves."""
        leaf = self._store.leaves.get(path)
        return leaf.key_impl if leaf is not None else ""

    def is_large(self, path: str) -> bool:
        """Whether a leaf is too large to be read as a whole, beside others."""
        spec = self.spec(path)
        if spec.is_empty or spec.kind in run_record.PYTHON_KINDS:
            return False
        stored = self._guard(path, lambda name: self._store.spec(name))
        return stored.num_bytes > self._memory_bytes // _NUM_THREADS

    def read_all(self, paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """(path, value) of leaves, in their order, some of them read ahead.

        Raises:
            FaultError: see `read`.
            OSError: one cannot be read.
        """
        ahead: collections.deque[tuple[str, concurrent.futures.Future[Any]]]
        ahead = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "jaxft-load") as pool:
            for path in paths:
                ahead.append((path, pool.submit(self.read, path)))
                if len(ahead) >= _NUM_THREADS:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()

    def read(self, path: str) -> Any:
        """The value of a leaf: an array, a Python number, or text.

        Raises:
            FaultError: kind NO_CHECKPOINT: it is damaged; leaf and chunk are named.
            OSError: it cannot be read.
        """
        spec = self.spec(path)
        if spec.kind is run_record.LeafKind.TEXT:
            return self._read_text(path)
        if spec.is_empty:
            return np.zeros(spec.shape, spec.dtype)
        raw = self._guard(path, lambda name: self._store.read(name))
        self._prove(path, fingerprints.digest_array(raw))
        with self._lock:
            self.num_bytes += raw.nbytes
        value = contents.decode(raw, spec.dtype)
        wanted = contents.PYTHON_DTYPES.get(spec.kind, spec.dtype)
        if (str(value.dtype), value.shape) != (wanted, spec.shape):
            raise damaged(
                f"leaf {path} in {self.path}: {value.dtype}{list(value.shape)} is "
                f"stored, a {spec} was saved"
            )
        return value.item() if spec.kind in contents.PYTHON_DTYPES else value

    def read_parts(self, path: str, on_part: OnPart) -> None:
        """Reads an array in parts of bounded size.

        Args:
            path: of the leaf, which has elements.
            on_part: told of each; only when this returns are they proven.

        Raises:
            FaultError: see `read`.
            OSError: it cannot be read.
        """
        spec = self.spec(path)

        def read(name: str) -> fingerprints.LeafDigest:
            stored = self._store.spec(name)
            if stored.shape != spec.shape:
                raise stored_tree.ArrayError(path, f"is stored as {stored.shape}")
            digester = fingerprints.ArrayDigester(stored.shape, stored.dtype)
            parts = self._store.read_chunks(name, max_bytes=self._memory_bytes)
            for offsets, part in parts:
                digester.add(part, offsets=offsets)
                on_part(offsets, contents.decode(part, spec.dtype))
                self.num_bytes += part.nbytes
            return digester.result()

        self._prove(path, self._guard(path, read))

    def _read_text(self, path: str) -> str:
        try:
            self._check_files(stored_tree.TEXT_FILE)
            return self._store.texts()[path]
        except (stored_tree.ArrayError, manifest.ManifestError, KeyError) as error:
            raise damaged(f"leaf {path} in {self.path}: {error}") from error

    def _prove(self, path: str, digest: fingerprints.LeafDigest) -> None:
        """Compares what was read with the manifest, where there is one."""
        if self._manifest is None:
            return
        entry = self._manifest.leaves.get(path)
        if entry is None or entry.fingerprint != digest.fingerprint:
            raise damaged(f"leaf {path} in {self.path}: its values have changed")

    def _guard(self, path: str, ask: Callable[[str], Any]) -> Any:
        """What `ask(name)` gives; damage is told as what it is."""
        try:
            return ask(self._store.leaves[path].name)
        except KeyError as error:
            raise damaged(f"leaf {path} is not among {self.path}'s arrays") from error
        except stored_tree.ArrayError as error:
            raise damaged(f"{self.path}: {error}") from error


def nest(values: Mapping[str, Any], segments: Mapping[str, Sequence[str]]) -> Any:
    """Nested dicts of values by path; positions in sequences are keys like others.

    Raises:
        ValueError: one path is below the leaf of another.
    """
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        *parents, last = segments[path]
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path} is below another leaf")
        if last in node:
            raise ValueError(f"{path} is above another leaf")
        node[last] = value
    return tree
