"""Proves a step: reads every byte of it and compares with what was written.

World: host-only. Floor: above `array_store`. Read `jaxft/checkpoint/array_store.py`
and `jaxft/checkpoint/manifest.py` before.

A step is proven when its manifest matches its own digest, each file its length and
sha256, each chunk its crc32c, each leaf the fingerprint that was taken of the state
before it left the device, and when run record, manifest and Orbax's notes speak of
the same leaves. Memory is bounded, whatever the size of the step.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxft import fingerprints
from jaxft.checkpoint import array_store, contents, layout, run_record, step_files
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint.manifest import LeafEntry, Manifest, Problem
from jaxft.checkpoint.stored_tree import ArrayError

MEMORY_BYTES = 2**28

NO_MANIFEST = "there is no manifest: the step cannot be proven"

_MAX_CHUNKS_NAMED = 20
_STEP_NAME = re.compile(
    rf"(\d+)(?:\.(?:quarantined|abandoned)-.*|{layout.TMP_MARK}.*)?"
)
_STATE = f"{layout.STATE_ITEM}/"
# Nobody wrote these into the step, and a reader would take them for a part of it.
_SHADOWS = ("manifest.ocdbt", "_METADATA", "_sharding", "_strings.json", "zarr.json")


def verify_step(
    step_path: str | os.PathLike[str],
    *,
    full: bool = True,
    allow_unproven: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    progress: Callable[[int], None] | None = None,
) -> list[Problem]:
    """What is wrong with a step; nothing when it is proven.

    Args:
        step_path: the step's folder.
        full: reads everything; otherwise only the JSON and the lengths.
        allow_unproven: a step without manifest is no problem by itself: then its
            arrays are read, and are right as far as their own checksums tell.
        memory_bytes: for what is read, at a time.
        progress: told how many bytes of arrays were read since it was told last;
            from several threads, one at a time.

    Raises:
        FaultError: kind CONFIG: a newer jaxft wrote it.
        OSError: a part of it is there but cannot be read.
    """
    try:
        manifest = manifests.read(step_path)
    except (FileNotFoundError, NotADirectoryError):
        if not allow_unproven:
            return [Problem(_MANIFEST_PATH, NO_MANIFEST)]
        return _verify_unproven(
            step_path, full=full, memory_bytes=memory_bytes, progress=progress
        )
    except manifests.ManifestError as error:
        return [Problem(_MANIFEST_PATH, str(error))]
    problems = check_step(step_path, manifest, full=full)
    if full:
        gone = {problem.leaf for problem in problems}
        problems += check_leaves(
            step_path,
            manifest,
            paths=[path for path in manifest.leaves if path not in gone],
            memory_bytes=memory_bytes,
            progress=progress,
        )
    return problems


def check_step(
    step_path: str | os.PathLike[str], manifest: Manifest, *, full: bool
) -> list[Problem]:
    """What is wrong with a step as far as its files tell; its arrays are not read.

    Args:
        step_path: the step's folder.
        manifest: its manifest.
        full: also reads what has a sha256; otherwise only the JSON and the lengths.

    Raises:
        FaultError: kind CONFIG: a newer jaxft wrote it.
        OSError: a part of it is there but cannot be read.
    """
    problems = manifests.check_files(step_path, manifest, full=full)
    if not any(problem.path == _RECORD_PATH for problem in problems):
        problems += _check_record(step_path, manifest)
    return problems + _check_shadows(step_path, manifest)


_MANIFEST_PATH = f"{layout.MANIFEST_ITEM}/{manifests.MANIFEST_FILE}"
_RECORD_PATH = f"{layout.RUN_ITEM}/{run_record.RECORD_FILE}"


def is_healthy(step_path: str | os.PathLike[str]) -> bool:
    """Whether nothing is known that keeps a step from being a resume point.

    Raises:
        ManifestError: its manifest is damaged.
        FaultError: kind CONFIG: a newer jaxft wrote it.
        OSError: it cannot be read.
    """
    try:
        return manifests.read(step_path).healthy
    except (FileNotFoundError, NotADirectoryError):
        return True


def count_bytes(manifest: Manifest) -> int:
    """Bytes of arrays that a full verification reads, as they are in memory."""
    return sum(
        math.prod(leaf.shape) * run_record.item_bytes(leaf.dtype)
        for leaf in manifest.leaves.values()
    )


# --- leaves -------------------------------------------------------------------


def check_leaves(
    step_path: str | os.PathLike[str],
    manifest: Manifest,
    *,
    paths: Collection[str] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Callable[[int], None] | None = None,
) -> list[Problem]:
    """Reads leaves and compares their fingerprints with the manifest's.

    Args:
        step_path: the step's folder.
        manifest: its manifest.
        paths: which leaves; all of them by default.
        memory_bytes: for what is read, at a time.
        progress: see `verify_step`.

    Raises:
        OSError: a chunk that is there cannot be read.
    """
    chosen = [manifest.leaves[path] for path in paths] if paths is not None else None
    leaves = list(manifest.leaves.values()) if chosen is None else chosen
    if not leaves:
        return []
    try:
        store = _open(step_path)
    except ArrayError as error:
        return [_array_problem(step_path, error)]
    if store.is_ocdbt != (manifest.array_layout == "ocdbt"):
        reason = f"the manifest says that the arrays are {manifest.array_layout}"
        return [Problem(layout.STATE_ITEM, reason)]
    stored = {leaf.path: leaf for leaf in store.leaves.values() if leaf.has_array}
    meter = _Meter(progress)
    store.open_ahead(leaf.name for leaf in leaves)

    def check(leaf: LeafEntry, max_bytes: int) -> list[Problem]:
        known = stored.get(leaf.path)
        if known is None or known.name != leaf.name:
            return [Problem(leaf.path, "is not among the stored arrays", leaf.path)]
        try:
            reason = _compare(store, leaf, max_bytes=max_bytes, meter=meter)
        except ArrayError as error:
            return _name_chunks(step_path, store, leaf.name, error)
        return [Problem(leaf.path, reason, leaf.path)] if reason else []

    return _in_parallel(leaves, check, memory_bytes=memory_bytes, meter=meter)


def _open(step_path: str | os.PathLike[str]) -> array_store.ArrayStore:
    return array_store.ArrayStore(os.path.join(step_path, layout.STATE_ITEM))


def _in_parallel(
    leaves: Iterable[Any],
    check: Callable[[Any, int], list[Problem]],
    *,
    memory_bytes: int,
    meter: _Meter,
) -> list[Problem]:
    """Problems of all leaves, in their order; the memory is shared out."""
    num_threads = os.cpu_count() or 1
    max_bytes = max(1, memory_bytes // num_threads)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, "jaxft-verify")
    try:
        found = list(pool.map(lambda leaf: check(leaf, max_bytes), leaves))
    except BaseException:
        # An interrupt, or a disk that is gone: nobody waits for the rest.
        meter.stop()
        if meter.interrupt is not None:
            raise meter.interrupt from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [problem for problems in found for problem in problems]


class _Meter:
    """Tells of bytes that were read, from any thread; ends the threads when told to."""

    def __init__(self, progress: Callable[[int], None] | None):
        self._progress = progress
        self._lock = threading.Lock()
        self._is_stopped = False
        self.interrupt: BaseException | None = None

    def add(self, num_bytes: int) -> None:
        """Counts bytes.

        Raises:
            CancelledError: nobody wants to know any more.
        """
        with self._lock:
            if self._is_stopped:
                raise concurrent.futures.CancelledError
            if self._progress is None:
                return
            try:
                self._progress(num_bytes)
            except BaseException as error:
                # The other threads would go on until the caller has heard of it.
                self._is_stopped = True
                self.interrupt = error
                raise

    def stop(self) -> None:
        """From now on `add` raises."""
        with self._lock:
            self._is_stopped = True


def _compare(
    store: array_store.ArrayStore,
    leaf: LeafEntry,
    *,
    max_bytes: int,
    meter: _Meter,
) -> str:
    """What differs between a stored array and the manifest; empty when nothing."""
    spec = store.spec(leaf.name)
    if reason := _check_type(leaf, spec):
        return reason
    # Integers that are stored as bytes have the same words as these, and a byte that
    # is no value of theirs must not be lost.
    dtype = spec.dtype
    if leaf.dtype.startswith("float"):
        dtype = contents.BYTE_DTYPES.get(leaf.dtype, dtype)
    digester = fingerprints.ArrayDigester(spec.shape, dtype)
    for offsets, part in store.read_chunks(leaf.name, max_bytes=max_bytes):
        digester.add(part.view(dtype), offsets=offsets)
        meter.add(part.nbytes)
    digest = digester.result()
    if digest.fingerprint != leaf.fingerprint:
        return (
            f"its values have changed: fingerprint {digest.fingerprint}, "
            f"{leaf.fingerprint} was saved"
        )
    if digest.num_nonfinite != leaf.num_nonfinite:
        return (
            f"{digest.num_nonfinite} elements are not finite, the manifest says "
            f"{leaf.num_nonfinite}"
        )
    return ""


def _check_type(leaf: LeafEntry, spec: array_store.ArraySpec) -> str:
    """Whether the stored array is one of the leaf's type."""
    shape, dtype = spec.shape, str(spec.dtype)
    if leaf.dtype.startswith("key<"):
        shape, fits = shape[: len(leaf.shape)], dtype == "uint32"
    elif leaf.dtype in contents.BYTE_DTYPES:
        fits = dtype == "uint8"
    else:
        fits = dtype == leaf.dtype
    if fits and shape == leaf.shape:
        return ""
    return (
        f"{dtype}{list(spec.shape)} is stored, a {leaf.dtype}{list(leaf.shape)} "
        "was saved"
    )


def _name_chunks(
    step_path: str | os.PathLike[str],
    store: array_store.ArrayStore,
    name: str,
    error: ArrayError,
) -> list[Problem]:
    """All damaged chunks of a leaf, one by one; the first error is known already."""
    found = {error.reason: _array_problem(step_path, error)}
    try:
        for problem in store.damaged_chunks(name):
            found.setdefault(problem.reason, _array_problem(step_path, problem))
            if len(found) >= _MAX_CHUNKS_NAMED:
                break
    except ArrayError:
        pass  # What describes the array is damaged: the first error says so.
    return sorted(found.values(), key=lambda problem: problem.path)


def _array_problem(step_path: str | os.PathLike[str], error: ArrayError) -> Problem:
    """The error, by the file that is to blame where it is one of the step."""
    file = os.path.relpath(error.file, step_path) if error.file else ""
    if not file or file.startswith(".."):
        file = error.leaf or layout.STATE_ITEM
    return Problem(file, error.reason, error.leaf)


# --- what the parts of a step say of each other --------------------------------


def _check_record(
    step_path: str | os.PathLike[str], manifest: Manifest
) -> list[Problem]:
    """Whether run record, manifest and the folder's name mean the same step."""
    try:
        record = run_record.read_record(step_path)
        specs = run_record.leaf_specs(record)
    except (FileNotFoundError, NotADirectoryError):
        return [Problem(_RECORD_PATH, "is missing")]
    except run_record.RecordError as error:
        return [Problem(_RECORD_PATH, str(error))]
    problems = []
    if record["step"] != manifest.step:
        reason = f"is of step {record['step']}, the manifest of {manifest.step}"
        problems.append(Problem(_RECORD_PATH, reason))
    name = os.path.basename(os.path.abspath(step_path))
    match = _STEP_NAME.fullmatch(name)
    if match and int(match[1]) != manifest.step:
        reason = f"is of step {manifest.step}, the folder is called {name}"
        problems.append(Problem(_MANIFEST_PATH, reason))
    if record.get("timeline", 0) != manifest.timeline:
        reason = (
            f"is of timeline {record.get('timeline', 0)}, the manifest of "
            f"{manifest.timeline}"
        )
        problems.append(Problem(_RECORD_PATH, reason))
    return problems + _check_specs(specs, manifest)


def _check_specs(
    specs: Mapping[str, run_record.LeafSpec], manifest: Manifest
) -> list[Problem]:
    """Whether every leaf that has bytes has a fingerprint of the right type."""
    wanted = {
        path: (contents.PYTHON_DTYPES.get(spec.kind, spec.dtype), spec.shape)
        for path, spec in specs.items()
        if not spec.is_empty and spec.kind is not run_record.LeafKind.TEXT
    }
    problems = [
        Problem(path, "has no fingerprint in the manifest", path)
        for path in wanted
        if path not in manifest.leaves
    ]
    for path, leaf in manifest.leaves.items():
        if path not in wanted:
            problems.append(Problem(path, "is not in the run record", path))
        elif wanted[path] != (leaf.dtype, leaf.shape):
            dtype, shape = wanted[path]
            reason = (
                f"is {leaf.dtype}{list(leaf.shape)} in the manifest, "
                f"{dtype}{list(shape)} in the run record"
            )
            problems.append(Problem(path, reason, path))
    return problems + _check_unproven(manifest)


def _check_unproven(manifest: Manifest) -> list[Problem]:
    """Files that have neither a digest nor a leaf whose fingerprint proves them."""
    names = {f"{layout.STATE_ITEM}/{leaf.name}" for leaf in manifest.leaves.values()}
    is_ocdbt = manifest.array_layout == "ocdbt"
    problems = []
    for path, entry in manifest.files.items():
        if entry.sha256 or step_files.leaf_folder(path, manifest.files) in names:
            continue
        if is_ocdbt and step_files.is_database_part(path) and manifest.leaves:
            continue
        problems.append(Problem(path, "nothing proves it: no digest, no leaf"))
    return problems


def _check_shadows(
    step_path: str | os.PathLike[str], manifest: Manifest
) -> list[Problem]:
    """Files that came later and that a reader would believe."""
    found = []
    for path in step_files.list_files(step_path):
        folder, _, name = path.rpartition("/")
        if path in manifest.files or not f"{folder}/".startswith(_STATE):
            continue
        if name in _SHADOWS or folder == f"{_STATE}array_metadatas":
            found.append(Problem(path, "was not there when the step was written"))
    return found


# --- steps without a manifest --------------------------------------------------


def _verify_unproven(
    step_path: str | os.PathLike[str],
    *,
    full: bool,
    memory_bytes: int,
    progress: Callable[[int], None] | None,
) -> list[Problem]:
    """Whether an older step, or a stock one, can be read at all."""
    problems = []
    try:
        if run_record.read_record(step_path).get("has_manifest"):
            problems.append(Problem(_MANIFEST_PATH, "is missing"))
    except (FileNotFoundError, NotADirectoryError):
        pass  # Not of jaxft.
    except run_record.RecordError as error:
        problems.append(Problem(_RECORD_PATH, str(error)))
    try:
        store = array_store.ArrayStore(contents.find_item(step_path))
        store.texts()
    except ArrayError as error:
        return [*problems, _array_problem(step_path, error)]
    meter = _Meter(progress)

    def check(name: str, max_bytes: int) -> list[Problem]:
        try:
            for _, part in store.read_chunks(name, max_bytes=max_bytes):
                meter.add(part.nbytes)
        except ArrayError as error:
            return _name_chunks(step_path, store, name, error)
        return []

    if full:
        store.open_ahead(store.names())
        problems += _in_parallel(
            store.names(), check, memory_bytes=memory_bytes, meter=meter
        )
    return problems
