"""Reads and writes one step folder through Orbax: the only door to it.

World: device. Floor: above `array_handler`, below `restore`. Read
`jaxft/checkpoint/array_handler.py` before and `jaxft/checkpoint/restore.py` after.

A step is written by Orbax's own async machinery in its own layout, so that
`ocp.CheckpointManager(root).restore(step)` of an untouched Orbax reads it. Ours are
the array handlers and the commit: the finished folder is sealed by whoever asked for
it, every file is made read-only and durable, then one rename makes the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxft import durable, records
from jaxft.checkpoint import (
    array_reader,
    causes,
    layout,
    leaf_requests,
    peers,
    quiet,
    run_record,
)
from jaxft.checkpoint.array_handler import ArrayOptions, Order, make_registry
from jaxft.checkpoint.gate import Gate
from jaxft.checkpoint.leaf_links import Links
from jaxft.checkpoint.manifest import Manifest
from jaxft.checkpoint.options import MayCommit, always
from jaxft.checkpoint.raw_chunks import RawChunks

PyTree = Any
# Orbax's own path type, which is `pathlib`'s as far as local folders are concerned.
Path = Any
# Called with the folder of a step that is finished, but not yet durable nor committed.
Seal = Callable[[pathlib.Path], None]

# At most so much is held at once while a step is read only to see whether it can be.
_PROBE_BYTES = 2**28


class _DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, with a commit that survives a power cut.

    Orbax moves the finished folder to a name that still says unfinished; there it
    is sealed and becomes durable and read-only, and the rename to the step's name is
    the commit. Of several processes only the primary does so, after all have written.
    """

    run_text: str
    gate: Gate
    seal: Seal | None = None
    may_commit: MayCommit = staticmethod(always)

    def __init__(self, temporary_path: Path | None, final_path: Path, **options: Any):
        self._step_path = final_path
        super().__init__(
            temporary_path,
            final_path.parent / f"{final_path.name}{layout.SEALED}",
            **options,
        )

    def get_final(self) -> Path:
        """The step's folder."""
        return self._step_path

    async def create(self) -> Path:
        """Makes the temporary folder; leftovers of the same step go first."""
        await asyncio.to_thread(remove_unfinished, os.fspath(self._step_path))
        return await super().create()

    async def finalize(self) -> None:
        """Commits."""
        await super().finalize()
        sealed = pathlib.Path(self._final_path)
        self.gate.wait()  # Where there is nothing else that would have waited.
        await asyncio.to_thread(self._add_items, sealed)
        if self.seal is not None:
            await asyncio.to_thread(self.seal, sealed)
        await asyncio.to_thread(
            _commit, self._final_path, self._step_path, self.may_commit
        )

    def _add_items(self, sealed: pathlib.Path) -> None:
        """The run record, and what tells Orbax of the items that we write ourselves.

        As items of Orbax's own they would cost the loop a folder and a thread each.
        """
        (sealed / layout.RUN_ITEM).mkdir()
        (sealed / layout.RUN_ITEM / run_record.RECORD_FILE).write_text(self.run_text)
        notes = sealed / layout.ORBAX_NOTES
        content = json.loads(notes.read_text())
        items = [layout.RUN_ITEM, *([layout.MANIFEST_ITEM] if self.seal else [])]
        reader = ocp.JsonCheckpointHandler.typestr()
        content["item_handlers"] |= dict.fromkeys(items, reader)
        notes.write_text(json.dumps(content))


def _commit(sealed: Path, step_path: Path, may_commit: MayCommit) -> None:
    """Everything durable and read-only, then the name, then the name durable."""
    durable.seal_folder(sealed)
    if os.path.lexists(step_path):
        raise FileExistsError(errno.EEXIST, "a step of this name is there", step_path)
    if problem := may_commit():
        raise PermissionError(errno.EPERM, problem, step_path)
    os.rename(sealed, step_path)
    durable.sync_folder(os.path.dirname(step_path))


def remove_unfinished(step_path: str) -> None:
    """Deletes what an interrupted save of this step left."""
    root, name = os.path.split(step_path)
    for found in layout.discover(root).unfinished:
        if os.path.basename(found[0]).startswith(f"{name}{layout.TMP_MARK}"):
            remove(found[0])


def remove(path: str) -> None:
    """Deletes a file or folder; one that has vanished is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if os.path.isdir(path):
                raise
    else:
        pathlib.Path(path).unlink(missing_ok=True)


class Write:
    """One save in the background.

    Attributes:
        path: the step's folder.
    """

    def __init__(
        self,
        path: str,
        checkpointer: ocp.AsyncCheckpointer,
        *,
        gate: Gate,
        others: peers.Peers | None = None,
        meanwhile: Callable[[], None] | None = None,
    ):
        self.path = path
        self._meanwhile = meanwhile
        self._gate = gate
        self._others = others
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._start = time.monotonic()
        # A daemon: storage that never answers must not keep the process alive.
        threading.Thread(
            target=self._watch, args=(checkpointer,), name="jaxft-save", daemon=True
        ).start()

    def _watch(self, checkpointer: ocp.AsyncCheckpointer) -> None:
        try:
            with contextlib.suppress(InterruptedError):
                self._gate.wait()
                if self._meanwhile is not None:
                    self._meanwhile()
            checkpointer.wait_until_finished()
            if not os.path.isdir(self.path):
                raise FileNotFoundError(errno.ENOENT, "it did not commit", self.path)
        except BaseException as error:
            self._error = self._others.tell(error) if self._others else error
        # The save is over, well or not; what closing says about it comes too late.
        with contextlib.suppress(Exception):
            checkpointer.close()
        del checkpointer
        if self._error is not None:
            for link in causes.chain(self._error):
                link.__traceback__ = None  # it holds what has to be collected
            quiet.drain()
        quiet.end()
        self._over.set()

    def begin(self) -> None:
        """Lets it be written."""
        self._gate.open()

    def give_up(self) -> None:
        """Ends it, unless it has begun."""
        self._gate.give_up()

    @property
    def age_secs(self) -> float:
        """Time since the snapshot was taken."""
        return time.monotonic() - self._start

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def error(self) -> BaseException | None:
        """Why it failed, once it is over."""
        return self._error

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits until it is over; False when time ran out first."""
        return self._over.wait(timeout_secs)


def write_async(
    path: str,
    stored: PyTree,
    *,
    record: Mapping[str, Any],
    timeout_secs: float,
    arrays: ArrayOptions | None = None,
    links: Links | None = None,
    seal: Seal | None = None,
    may_commit: MayCommit = always,
    meanwhile: Callable[[], None] | None = None,
) -> Write:
    """Takes a step to be written; returns when the state may change or be donated.

    It is not written before `Write.begin`: whoever waits for this needs the processor.

    Args:
        path: the step's folder, absolute, not there yet.
        stored: what `leaves.encode` gave. NumPy arrays are copied before this
            returns; JAX arrays are copied to the host, or held where they are there
            already: a donated buffer that is held is not written to.
        record: the run record.
        timeout_secs: Orbax's deadline for the whole save, rounded up.
        arrays: how arrays are stored.
        links: leaves whose files are hard-linked instead of written. Only in the
            layout "files".
        seal: called once, by the primary process, with the folder when all processes
            have written: what it adds is committed with the rest, and what it raises
            fails the save.
        may_commit: asked by the primary process just before the commit.
        meanwhile: called in the background, beside the writing.
    """
    arrays = arrays or ArrayOptions()
    order = Order(links=links or Links())
    options: dict[str, Any] = {
        "run_text": json.dumps(dict(record)),
        "gate": order.gate,
        "may_commit": staticmethod(may_commit),
    }
    if seal is not None:
        options["seal"] = staticmethod(seal)
    path_class: Any = type("_SealedPath", (_DurablePath,), options)
    barrier = ocp.multihost.get_barrier_sync_fn()
    others = peers.Peers(path, barrier=barrier)
    async_options = ocp.options.AsyncOptions(
        timeout_secs=max(1, int(-(-timeout_secs // 1))),
        barrier_sync_fn=others.meet,
        # Made in a thread of their own they save a millisecond; but what is written
        # before this returns would race with them, and where that thread fails the
        # others wait for it up to Orbax's own time-out.
        create_directories_asynchronously=False,
    )
    # By the name of the item's folder.
    handlers: dict[str, Any] = {layout.STATE_ITEM: _state_handler(arrays, order=order)}
    items = {layout.STATE_ITEM: ocp.args.PyTreeSave(stored)}
    checkpointer = ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=async_options),
            **handlers,
        ),
        async_options=async_options,
        temporary_path_class=path_class,
    )
    quiet.begin()
    try:
        checkpointer.save(path, args=ocp.args.Composite(**items))
        return Write(
            path, checkpointer, gate=order.gate, others=others, meanwhile=meanwhile
        )
    except BaseException as error:
        order.gate.give_up()  # Else closing would wait for it.
        others.tell(error)
        with contextlib.suppress(Exception):
            checkpointer.close()
        quiet.drain()
        quiet.end()
        raise


def _state_handler(
    arrays: ArrayOptions, *, order: Order | None = None, raw: RawChunks | None = None
) -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=arrays.layout == "ocdbt",
        use_zarr3=True,
        type_handler_registry=make_registry(arrays, order=order, raw=raw),
    )


def read_state(
    path: str,
    target: PyTree,
    *,
    record: Mapping[str, Any],
    memory_bytes: int = ArrayOptions.memory_bytes,
    proof: Manifest | None = None,
) -> PyTree:
    """Reads the state of a step into the structure and placement of `target`.

    Args:
        path: the step's folder.
        target: see `leaf_requests.match`.
        record: the step's run record.
        memory_bytes: host memory to use beyond the result.
        proof: the step's manifest, where the caller compares the fingerprint of every
            leaf with it afterwards: then checksums of chunks need not be computed.

    Raises:
        TargetMismatchError: the target is another tree.
        RecordError: the run record is damaged.
        Exception: whatever Orbax and TensorStore raise about damaged files; `probe`
            tells those from failures that are not the checkpoint's.
    """
    requests = leaf_requests.match(target, run_record.leaf_specs(record), path=path)
    arrays = ArrayOptions(memory_bytes=memory_bytes)
    files = proof.files if proof else {}
    raw = RawChunks(
        {
            os.path.join(path, file): entry.crc32c
            for file, entry in files.items()
            if entry.crc32c
        }
    )
    values = _restore(path, record, requests, arrays, raw=raw)
    treedef = jax.tree.structure(target)
    # One leaf after the other, so that at most one is there twice.
    result = [
        _decode(values.pop(name, None), request) for name, request in requests.items()
    ]
    return jax.tree.unflatten(treedef, result)


def _decode(value: Any, request: leaf_requests.Request) -> Any:
    is_fresh = isinstance(value, jax.Array) and array_reader.fills(
        value.dtype, request.sharding
    )
    return leaf_requests.decode(value, request, is_fresh=is_fresh)


def _restore(
    path: str,
    record: Mapping[str, Any],
    requests: Mapping[str, leaf_requests.Request],
    arrays: ArrayOptions,
    *,
    raw: RawChunks | None = None,
) -> dict[str, Any]:
    """Leaf path -> value as stored, for the requested leaves that have elements."""
    items = _map_types(record["state"], requests, _item)
    args = _map_types(record["state"], requests, _restore_args)
    orbax_path: Path = pathlib.Path(path, layout.STATE_ITEM)
    restored = _state_handler(arrays, raw=raw).restore(
        orbax_path,
        args=ocp.args.PyTreeRestore(item=items, restore_args=args),
    )
    return dict(_walk_values(restored))


def _map_types(
    node: Any, requests: Mapping[str, leaf_requests.Request], make: Any, path: str = ""
) -> Any:
    """The record's tree of types with `make(request)` for each leaf on disk."""
    if isinstance(node, dict):
        return {
            key: _map_types(child, requests, make, f"{path}/{key}" if path else key)
            for key, child in node.items()
        }
    if isinstance(node, list):
        return [
            _map_types(child, requests, make, f"{path}/{i}" if path else str(i))
            for i, child in enumerate(node)
        ]
    if node is None or run_record.parse_leaf(node).is_empty:
        return None
    return make(requests.get(path))


def _walk_values(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(leaf path, value) of a restored tree."""
    if isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in pairs:
            yield from _walk_values(child, f"{path}/{key}" if path else str(key))
    elif node is not None:
        yield path, node


def _item(request: leaf_requests.Request | None) -> Any:
    """What stands for a leaf in the tree that Orbax is to restore."""
    if request is None:
        return ocp.PLACEHOLDER
    spec = request.spec
    if request.python is not None or spec.dtype.startswith("key<"):
        return 0
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(request.stored_dtype))


def _restore_args(request: leaf_requests.Request | None) -> ocp.RestoreArgs:
    """How Orbax is to read a leaf."""
    if request is None:
        return ocp.RestoreArgs()
    if request.python is not None:
        return ocp.RestoreArgs(restore_type=request.python)
    spec = request.spec
    is_key = spec.dtype.startswith("key<")
    if not request.is_jax or spec.kind is run_record.LeafKind.WEAK:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=request.sharding,
        global_shape=None if is_key else spec.shape,
    )


def probe(path: str) -> str:
    """Why the state of a step cannot be read by anyone; empty when it can.

    Reads all of it as host arrays, in parts of bounded size, without any target: a
    restore that fails where this succeeds is not the checkpoint's fault.

    Raises:
        FaultError: the step is of an unknown format.
        MemoryError: and other failures of this process.
    """
    try:
        record = run_record.read_record(path)
        part: dict[str, leaf_requests.Request] = {}
        size = 0
        for name, spec in run_record.leaf_specs(record).items():
            part[name] = _host_request(spec)
            size += 16 * int(np.prod(spec.shape, dtype=np.int64))
            if size > _PROBE_BYTES:
                _read_part(path, record, part)
                part, size = {}, 0
        _read_part(path, record, part)
    except Exception as error:
        if isinstance(error, records.FaultError) or causes.is_process_failure(error):
            raise
        return f"{type(error).__name__}: {records.first_line(error)}"
    return ""


def _host_request(spec: run_record.LeafSpec) -> leaf_requests.Request:
    types = {"int": int, "float": float, "bool": bool, "str": str}
    is_key = spec.dtype.startswith("key<")
    return leaf_requests.Request(spec, python=types.get(spec.kind), is_jax=is_key)


def _read_part(
    path: str, record: Mapping[str, Any], part: Mapping[str, leaf_requests.Request]
) -> None:
    arrays = ArrayOptions(memory_bytes=_PROBE_BYTES)
    values = _restore(path, record, part, arrays)
    for name, request in part.items():
        leaf_requests.decode(values.pop(name, None), request)
