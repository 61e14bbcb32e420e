"""How Orbax writes and reads our arrays: checked chunks, links, a memory budget.

World: device. Floor: beside `leaves`, below `orbax_io`. Read
`jaxft/checkpoint/leaves.py` before and `jaxft/checkpoint/orbax_io.py` after.

Orbax hands every leaf to the handler of its type. These are its own handlers with
three differences:

* a chunk ends in a crc32c, so that a flipped bit is an error and no value; the codec
  list is zarr's, and an untouched Orbax reads it;
* a leaf that is linked gets the files of the same leaf in a committed step, instead of
  new ones;
* chunks are small enough to be written and read within a declared budget of memory.

What Orbax keeps beside the arrays (`_sharding`, `array_metadatas`) is complete for
linked leaves too. Nothing of Orbax is changed for others in the process.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

# Private: Orbax has no public way to choose codecs, nor public names for the parts of
# its handler that stay in use here. `test_array_handler.py` fails when they move.
from orbax.checkpoint._src.metadata import (  # noqa: TID251
    array_metadata_store,
    sharding,
)

# Private as well, for the same reason.
from orbax.checkpoint._src.serialization import (  # noqa: TID251
    ocdbt_utils,
    tensorstore_utils,
)

from jaxft.checkpoint import array_snapshot, leaf_links
from jaxft.checkpoint.array_reader import Reader, chunks_of
from jaxft.checkpoint.byte_budget import ByteBudget, gather, gather_few
from jaxft.checkpoint.chunking import (
    ArrayOptions,
    Box,
    choose_chunk_shape,
    inside,
    make_box,
    make_codecs,
)
from jaxft.checkpoint.gate import Gate
from jaxft.checkpoint.leaf_links import Links
from jaxft.checkpoint.raw_chunks import RawChunks

# Where Orbax keeps the implementation of typed keys.
_KEY_IMPL = "random_key_impl"
_MAX_OPEN_LEAVES = 64
# A database writes its index anew for each few leaves that are finished together: of
# 10,000 in 64s that is 2 GB.
_MAX_OPEN_OF_DATABASE = 2048
# Replicas share the writing of a leaf only where each gets at least so much.
_MIN_REPLICA_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What the handlers of one save have in common.

    Attributes:
        links: what is not written.
        gate: is opened when all snapshots are taken.
    """

    links: Links = dataclasses.field(default_factory=Links)
    gate: Gate = dataclasses.field(default_factory=Gate)


def make_registry(
    options: ArrayOptions,
    *,
    order: Order | None = None,
    raw: RawChunks | None = None,
) -> ocp.type_handlers.TypeHandlerRegistry:
    """Handlers of every type that is stored, for one save or restore.

    Args:
        options: see there.
        order: of a save.
        raw: of a restore; see `array_reader.Reader`.
    """
    order = order or Order()
    if order.links.possible and options.layout != "files":
        raise ValueError(f"layout {options.layout} has no files to link")
    scalars = ScalarHandler(options, order)
    placeholder = type(ocp.PLACEHOLDER)
    return ocp.type_handlers.create_type_handler_registry(
        *((kind, scalars) for kind in (int, float, bytes, np.number)),
        (np.ndarray, NumpyHandler(options, order)),
        (jax.Array, ArrayHandler(options, order, raw=raw)),
        (str, ocp.type_handlers.StringHandler()),
        (placeholder, ocp.type_handlers.get_type_handler(placeholder)),
    )


def _is_primary() -> bool:
    return jax.process_index() == 0


def _future(function: Callable[[], Any], name: str, *, gate: Gate) -> Any:
    """Runs it in a thread of its own, once it may."""

    async def run() -> None:
        gate.wait()  # The thread has nothing else to do.
        await function()

    return ocp.future.CommitFutureAwaitingContractedSignals(run(), name=name)


async def _link(infos: Sequence[Any], links: Mapping[str, str]) -> list[Any]:
    """Links leaves of arrays; gives Orbax's entries about them."""
    if _is_primary():
        await leaf_links.link(infos, links)
    return await _linked_metadatas(infos, links)


async def _linked_metadatas(
    infos: Sequence[Any], links: Mapping[str, str]
) -> list[Any]:
    """Orbax's entries about linked leaves, from the steps that they come from."""
    found: dict[str, Any] = {}
    items = {links[info.name][: -len(info.name) - 1] for info in infos}
    for item in items:
        # Orbax's path type, here of a local folder.
        path: Any = pathlib.Path(item)
        entries = await array_metadata_store.Store().read(path)
        for entry in _flat(entries):
            if links.get(entry.param_name) == os.path.join(item, entry.param_name):
                found[entry.param_name] = entry
    if missing := [info.name for info in infos if info.name not in found]:
        raise ValueError(f"leaf {missing[0]} of {items} has no array_metadatas entry")
    return [found[info.name] for info in infos]


def _flat(entries: Any) -> Iterator[Any]:
    """The entries of all processes' `array_metadatas`."""
    return itertools.chain(*(entries or {}).values())


# --- JAX arrays ---------------------------------------------------------------


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Of `jax.Array`."""

    def __init__(
        self, options: ArrayOptions, order: Order, *, raw: RawChunks | None = None
    ):
        self._raw = raw
        self._metadatas = array_metadata_store.Store()
        super().__init__(
            array_metadata_store=self._metadatas,
            min_slice_bytes_for_replica_parallel=_MIN_REPLICA_BYTES,
        )
        self._options = options
        self._links = order.links
        self._gate = order.gate

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Starts to write; returns when the values may change or be donated."""
        del args
        shardings = _shardings(values, infos) if _is_primary() else {}
        pairs = list(zip(values, infos, strict=True))
        max_bytes = self._options.memory_bytes // 2
        open_names = self._links.possible
        batches = array_snapshot.split(pairs, max_bytes=max_bytes)
        if open_names and len(batches) > 1:
            # Not all can be held until it is known.
            links, open_names = self._links.decide(), frozenset()
            pairs = [(value, info) for value, info in pairs if info.name not in links]
            batches = array_snapshot.split(pairs, max_bytes=max_bytes)
        *early, last = batches
        metadatas = []
        for batch in early:
            metadatas += await self._write(self._take(batch))
        snapshots = self._take(last)
        sure = [leaf for leaf in snapshots if leaf.info.name not in open_names]
        unsure = [leaf for leaf in snapshots if leaf.info.name in open_names]

        async def finish() -> None:
            deciding = asyncio.to_thread(self._links.decide)
            some, links = await gather([self._write(sure), deciding])
            rest = [leaf for leaf in unsure if leaf.info.name not in links]
            linked = [info for info in infos if info.name in links]
            tasks: list[Any] = [self._write(rest), _link(linked, links)]
            if _is_primary():
                tasks.append(_write_shardings(shardings, infos[0]))
            others, of_links, *_ = await gather(tasks)
            await infos[0].await_path_creation()
            # Each makes the folder: the primary one may fail before it comes to that.
            self._metadatas.set_primary_host(None)
            await self._metadatas.write(
                checkpoint_dir=infos[0].parent_dir,
                array_metadatas=[*metadatas, *some, *others, *of_links],
                process_index=jax.process_index(),
            )

        return [_future(finish, "arrays", gate=self._gate)]

    def _take(self, pairs: list[tuple[jax.Array, Any]]) -> list[Any]:
        return array_snapshot.take(
            pairs,
            replica_id=self._replica_id,
            use_replica_parallel=self._use_replica_parallel,
            min_slice_bytes_for_replica_parallel=_MIN_REPLICA_BYTES,
        )

    async def _write(self, snapshots: Sequence[array_snapshot.Snapshot]) -> list[Any]:
        """Writes parts in host memory; gives Orbax's entries about the leaves."""
        budget = ByteBudget(self._options.flying_bytes)

        async def write(leaf: array_snapshot.Snapshot) -> Any:
            await leaf.info.await_path_creation()
            tspec, entry = _write_spec(
                leaf.info,
                shape=leaf.shape,
                write_shape=leaf.write_shape,
                dtype=leaf.dtype,
                options=self._options,
                ext_metadata=None if leaf.key is None else {_KEY_IMPL: leaf.key},
            )
            if leaf.parts or _is_primary():
                await _write_parts(
                    tspec, leaf.parts, context=leaf.info.ts_context, budget=budget
                )
            return entry

        is_database = self._options.layout == "ocdbt"
        most = _MAX_OPEN_OF_DATABASE if is_database else _MAX_OPEN_LEAVES
        return await gather_few(write, snapshots, most=most)

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        """Reads into the sharding of each `ArrayRestoreArgs`."""
        assert args is not None
        reader = Reader(self._options, raw=self._raw)

        async def read(leaf: tuple[Any, Any]) -> jax.Array:
            info, arg = leaf
            store = await _open(info)
            if arg.global_shape is not None and store.shape != arg.global_shape:
                raise ValueError(
                    f"leaf {info.name} is {list(store.shape)} on disk, "
                    f"not {list(arg.global_shape)}"
                )
            return await reader.to_device(store, arg.sharding)

        leaves = zip(infos, args, strict=True)
        arrays = await gather_few(read, leaves, most=_MAX_OPEN_LEAVES)
        metadata = await self._metadatas.read(infos[0].parent_dir)
        impls = {
            entry.param_name: (entry.ext_metadata or {}).get(_KEY_IMPL)
            for entry in _flat(metadata)
        }
        return [
            jax.random.wrap_key_data(array, impl=impls[info.name])
            if impls.get(info.name)
            else array
            for info, array in zip(infos, arrays, strict=True)
        ]


def _write_spec(
    info: Any,
    *,
    shape: Sequence[int],
    write_shape: Sequence[int],
    dtype: np.dtype,
    options: ArrayOptions,
    ext_metadata: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Any]:
    """TensorStore's spec of a leaf to be written, and Orbax's entry about it."""
    is_ocdbt = options.layout == "ocdbt"
    spec = tensorstore_utils.build_array_write_spec(
        info,
        global_shape=tuple(shape),
        local_shape=tuple(write_shape),
        dtype=dtype,
        use_ocdbt=is_ocdbt,
        process_index=ocdbt_utils.get_process_index_for_subdir(is_ocdbt),
        ext_metadata=ext_metadata,
    )
    chunk = choose_chunk_shape(
        shape, write_shape, item_bytes=dtype.itemsize, max_bytes=options.chunk_bytes
    )
    tspec = _amend(spec.json, chunk, codec=options.codec, item_bytes=dtype.itemsize)
    return tspec, dataclasses.replace(spec.metadata, chunk_shape=chunk)


def _amend(
    tspec: dict[str, Any], chunk: Sequence[int], *, codec: str, item_bytes: int
) -> dict[str, Any]:
    """Orbax's spec with our chunks and codecs."""
    metadata = tspec["metadata"] | {
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk)},
        },
        "codecs": make_codecs(codec, item_bytes=item_bytes),
    }
    tspec = tspec | {"metadata": metadata, "store_data_equal_to_fill_value": True}
    if tspec["kvstore"]["driver"] == "file":
        # The folder is nobody else's until it is whole: no lock files and renames.
        tspec["kvstore"] = tspec["kvstore"] | {
            "file_io_locking": {"mode": "non_atomic"}
        }
    return tspec


async def _open(info: Any) -> ts.TensorStore:
    """A stored array; what is missing in it is an error when it is read."""
    await info.await_path_creation()
    tspec = ocp.type_handlers.get_json_tspec_read(
        info, use_ocdbt=info.is_ocdbt_checkpoint
    )
    tspec["fill_missing_data_reads"] = False  # whatever Orbax's own file says
    return await ts.open(ts.Spec(tspec), open=True, read=True, context=info.ts_context)


async def _write_parts(
    tspec: dict[str, Any],
    fragments: Sequence[tuple[Box, np.ndarray]],
    *,
    context: ts.Context,
    budget: ByteBudget,
) -> None:
    """Creates one array and writes parts of it, chunk by chunk."""
    spec = ts.Spec(tspec)
    # The others know what the primary writes about the array.
    store = await ts.open(
        spec,
        open=True,
        create=_is_primary(),
        assume_metadata=not _is_primary(),
        context=context,
    )

    async def write(chunk: Box, value: np.ndarray) -> None:
        async with budget.reserve(value.nbytes):
            # Nobody writes into a snapshot, so that it need not be copied.
            await store[chunk].write(value, can_reference_source_data_indefinitely=True)

    writes = []
    for index, value in fragments:
        box = make_box(index, store.shape)
        writes += [
            write(chunk, value[inside(chunk, box)]) for chunk in chunks_of(store, box)
        ]
    await gather(writes)


def _shardings(values: Sequence[jax.Array], infos: Sequence[Any]) -> dict[str, str]:
    """The content of Orbax's file of shardings."""
    texts: dict[Any, str | None] = {}
    content = {}
    for value, info in zip(values, infos, strict=True):
        place = value.sharding
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            place = jax.random.key_data(value).sharding
        if place not in texts:
            known = sharding.from_jax_sharding(place)
            texts[place] = None if known is None else known.to_serialized_string()
        if (text := texts[place]) is not None:
            name = base64.urlsafe_b64encode(info.name.encode()).decode()
            content[name] = text
    return content


async def _write_shardings(content: Mapping[str, str], info: Any) -> None:
    """Orbax's file of shardings, which a restore without target goes by."""
    await info.await_path_creation()
    path = os.path.join(os.fspath(info.parent_dir), "_sharding")
    await asyncio.to_thread(pathlib.Path(path).write_text, json.dumps(content))


# --- NumPy arrays and numbers -------------------------------------------------


class NumpyHandler(ocp.type_handlers.NumpyHandler):
    """Of `np.ndarray`: the same on every process, written by the primary."""

    def __init__(self, options: ArrayOptions, order: Order):
        super().__init__()
        self._options = options
        self._links = order.links
        self._gate = order.gate

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Starts to write copies."""
        del args
        if not _is_primary():
            return []
        pairs = [
            (np.array(value, order="C"), info)
            for value, info in zip(values, infos, strict=True)
        ]

        async def finish() -> None:
            links = await asyncio.to_thread(self._links.decide)
            written = [pair for pair in pairs if pair[1].name not in links]
            linked = [info for info in infos if info.name in links]
            await gather([self._write(written), leaf_links.link(linked, links)])

        return [_future(finish, "numpy", gate=self._gate)]

    async def _write(self, pairs: Sequence[tuple[np.ndarray, Any]]) -> None:
        budget = ByteBudget(self._options.flying_bytes)

        async def write(value: np.ndarray, info: Any) -> None:
            await info.await_path_creation()
            shape = value.shape
            tspec, _ = _write_spec(
                info,
                shape=shape,
                write_shape=shape,
                dtype=value.dtype,
                options=self._options,
            )
            box = make_box([slice(None)] * value.ndim, shape)
            await _write_parts(
                tspec, [(box, value)], context=info.ts_context, budget=budget
            )

        await gather([write(*pair) for pair in pairs])

    async def deserialize(
        self, infos: Sequence[Any], args: Any = None
    ) -> Sequence[np.ndarray]:
        """Reads whole arrays."""
        del args
        reader = Reader(self._options)

        async def read(info: Any) -> np.ndarray:
            return await reader.to_host(await _open(info))

        return await gather([read(info) for info in infos])


class ScalarHandler(ocp.type_handlers.ScalarHandler):
    """Of Python numbers, as 0-d arrays."""

    def __init__(self, options: ArrayOptions, order: Order):
        super().__init__()
        self._arrays = NumpyHandler(options, order)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Starts to write."""
        del args
        return await self._arrays.serialize([np.asarray(v) for v in values], infos)

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Reads numbers of the wanted Python types."""
        values = await self._arrays.deserialize(infos)
        if any(value.ndim for value in values):
            raise ValueError("an array is stored where a number should be")
        types = [arg.restore_type for arg in args or [ocp.RestoreArgs()] * len(infos)]
        return [
            kind(value.item()) if kind else value.item()
            for kind, value in zip(types, values, strict=True)
        ]
