"""Reads leaves through TensorStore within a budget of memory.

World: device. Floor: beside `leaves`, below `array_handler`. Read
`jaxft/checkpoint/chunking.py` before and `jaxft/checkpoint/array_handler.py` after.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
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


def chunks_of(store: ts.TensorStore, box: Box) -> Iterator[Box]:
    """The parts of a box that lie in one chunk each."""
    sizes: Any = store.chunk_layout.read_chunk.shape
    # An array of rank 0 has no chunk shape.
    return cut(box, sizes or store.shape)


class Reader:
    """Reads leaves within a budget; each chunk once, whatever parts are wanted.

    Of one event loop.
    """

    def __init__(self, options: ArrayOptions):
        self._flying = ByteBudget(options.flying_bytes)
        self._held = ByteBudget(max(1, options.memory_bytes // 2))

    async def to_host(self, store: ts.TensorStore) -> np.ndarray:
        """A whole leaf."""
        box = make_box([slice(None)] * store.rank, store.shape)
        (value,) = await self._read(store, [box])
        return value

    async def to_device(
        self, store: ts.TensorStore, place: jax.sharding.Sharding
    ) -> jax.Array:
        """A leaf in its place."""
        shape = tuple(store.shape)
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

    async def _read(
        self, store: ts.TensorStore, boxes: Sequence[Box]
    ) -> list[np.ndarray]:
        """The parts of an array."""
        dtype = store.dtype.numpy_dtype
        outs = [
            _empty([part.stop - part.start for part in box], dtype) for box in boxes
        ]
        whole = make_box([slice(None)] * store.rank, store.shape)
        reads = []
        for chunk in chunks_of(store, whole):
            shares = [
                (out, box, both)
                for out, box in zip(outs, boxes, strict=True)
                if (both := meet(chunk, box)) is not None
            ]
            if shares:
                reads.append(self._read_chunk(store, chunk, shares))
        await gather(reads)
        return outs

    async def _read_chunk(
        self, store: ts.TensorStore, chunk: Box, shares: list[tuple[Any, Box, Box]]
    ) -> None:
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


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX takes over without a copy where it can."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
