"""Reads leaves through TensorStore within a budget of memory.

World: device. Floor: beside `leaves`, below `array_handler`. Read
`jaxft/checkpoint/chunking.py` before and `jaxft/checkpoint/array_handler.py` after.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jaxft.checkpoint.byte_budget import ByteBudget, gather
from jaxft.checkpoint.chunking import (
    ArrayOptions,
    Box,
    count_elements,
    cut,
    inside,
    make_box,
    meet,
)
from jaxft.checkpoint.raw_chunks import RawArray, RawChunks

# Dtypes whose elements lie in XLA's memory as in NumPy's; the narrower are packed.
_PLAIN_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|b?float(8_.*|16|32|64)|complex.*")


def fills(dtype: Any, place: jax.sharding.Sharding | None) -> bool:
    """Whether leaves of this kind are read into memory that JAX allocated.

    So it is on CPU. Such an array is as good as a fresh one: it can be donated.

    Args:
        dtype: of the leaf.
        place: where it goes; None is uncommitted on the default device.
    """
    if not _PLAIN_DTYPE.fullmatch(str(dtype)):
        return False
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return False
    if place is None:
        return jax.default_backend() == "cpu"
    device = next(iter(place.device_set))
    default = device.default_memory().kind
    return device.platform == "cpu" and place.memory_kind in (None, default)


def chunks_of(store: ts.TensorStore, box: Box) -> Iterator[Box]:
    """The parts of a box that lie in one chunk each."""
    sizes: Any = store.chunk_layout.read_chunk.shape
    # An array of rank 0 has no chunk shape.
    return cut(box, sizes or store.shape)


class Reader:
    """Reads leaves within a budget; each chunk once, whatever parts are wanted.

    Of one event loop.

    Args:
        options: see there.
        raw: chunks that need not be checked, since their values will be proven.
    """

    def __init__(self, options: ArrayOptions, *, raw: RawChunks | None = None):
        self._raw = raw or RawChunks({})
        self._flying = ByteBudget(options.flying_bytes)
        self._held = ByteBudget(max(1, options.memory_bytes // 2))

    async def to_host(self, store: ts.TensorStore) -> np.ndarray:
        """A whole leaf."""
        box = make_box([slice(None)] * store.rank, store.shape)
        (value,) = await self._read(store, [box])
        return value

    async def to_device(
        self, store: ts.TensorStore, place: jax.sharding.Sharding | None
    ) -> jax.Array:
        """A leaf in its place; None is uncommitted on the default device."""
        shape = tuple(store.shape)
        if fills(store.dtype.numpy_dtype, place):
            return await self._fill(store, place)
        if place is None:
            return jnp.array(await self.to_host(store))
        devices: dict[Any, list[jax.Device]] = {}
        for device, index in place.addressable_devices_indices_map(shape).items():
            key = tuple(
                (part.start, part.stop) for part in make_box(index or (), shape)
            )
            devices.setdefault(key, []).append(device)
        boxes = [tuple(slice(*part) for part in key) for key in devices]
        size = sum(count_elements(box) for box in boxes)
        async with self._held.reserve(size * store.dtype.numpy_dtype.itemsize):
            values = await self._read(store, boxes)
            parts = [
                jax.device_put(
                    value,
                    jax.sharding.SingleDeviceSharding(
                        device, memory_kind=place.memory_kind
                    ),
                )
                for value, group in zip(values, devices.values(), strict=True)
                for device in group
            ]
            if any(device.platform != "cpu" for device in place.addressable_devices):
                await asyncio.to_thread(jax.block_until_ready, parts)
        return jax.make_array_from_single_device_arrays(shape, place, parts)

    async def _fill(
        self, store: ts.TensorStore, place: jax.sharding.Sharding | None
    ) -> jax.Array:
        """Reads into a new array, of which nobody else knows yet."""
        dtype = store.dtype.numpy_dtype
        array = _maker(tuple(store.shape), dtype, place)()
        await asyncio.to_thread(jax.block_until_ready, array)
        boxes, outs = [], []
        for shard in array.addressable_shards:
            boxes.append(make_box(shard.index, store.shape))
            outs.append(_memory_of(shard.data))
        await self._read_into(outs, store, boxes)
        return array

    async def _read(
        self, store: ts.TensorStore, boxes: Sequence[Box]
    ) -> list[np.ndarray]:
        """The parts of an array."""
        dtype = store.dtype.numpy_dtype
        outs = [
            _empty([part.stop - part.start for part in box], dtype) for box in boxes
        ]
        await self._read_into(outs, store, boxes)
        return outs

    async def _read_into(
        self, outs: Sequence[np.ndarray], store: ts.TensorStore, boxes: Sequence[Box]
    ) -> None:
        whole = make_box([slice(None)] * store.rank, store.shape)
        raw = self._raw.of(store)
        reads = []
        for chunk in chunks_of(store, whole):
            shares = [
                (out, box, both)
                for out, box in zip(outs, boxes, strict=True)
                if (both := meet(chunk, box)) is not None
            ]
            if shares:
                reads.append(self._read_chunk(store, chunk, shares, raw=raw))
        await gather(reads)

    async def _read_chunk(
        self,
        store: ts.TensorStore,
        chunk: Box,
        shares: list[tuple[Any, Box, Box]],
        *,
        raw: RawArray | None,
    ) -> None:
        if raw and len(shares) == 1 and await _read_raw(raw, chunk, *shares[0]):
            return
        size = count_elements(chunk) * store.dtype.numpy_dtype.itemsize
        async with self._flying.reserve(size * min(2, len(shares))):
            if len(shares) == 1:
                ((out, box, both),) = shares
                target = ts.array(out)[ts.d[:].translate_to[[p.start for p in box]]]
                await target[both].write(store[both])
                return
            value = await store[chunk].read()
            for out, box, both in shares:
                out[inside(both, box)] = value[inside(both, chunk)]


async def _read_raw(
    raw: RawArray, chunk: Box, out: np.ndarray, box: Box, both: Box
) -> bool:
    """Reads a chunk that is wanted as it lies on disk; False where it is not."""
    target = out[inside(both, box)]
    if both != chunk or not target.flags.c_contiguous or not raw.has(chunk):
        return False
    return await asyncio.to_thread(raw.read, chunk, target)


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX takes over without a copy where it can."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


@functools.lru_cache(maxsize=1024)
def _maker(
    shape: tuple[int, ...], dtype: np.dtype, place: jax.sharding.Sharding | None
) -> Any:
    """What allocates arrays of a kind, each in memory of its own."""
    return jax.jit(lambda: jax.lax.empty(shape, dtype), out_shardings=place)


class _Memory:
    """The memory of an array on one CPU device, as NumPy takes it over.

    Whoever made the array and has shown it to nobody may write into it. What NumPy
    makes of this keeps the array alive.
    """

    def __init__(self, array: jax.Array):
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.unsafe_buffer_pointer(), False),
        }


def _memory_of(array: jax.Array) -> np.ndarray:
    """The memory of an array, to be written into; see `_Memory`."""
    return np.asarray(_Memory(array)).view(array.dtype).reshape(array.shape)
