"""This process's parts of the leaves of a save, in host memory.

World: device. Floor: beside `array_reader`, below `array_handler`. Read
`jaxft/checkpoint/chunking.py` before and `jaxft/checkpoint/array_handler.py` after.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

# Private: which process writes which part of a leaf is Orbax's choice, and has no
# public name. `test_array_handler.py` fails when it moves.
from orbax.checkpoint._src.serialization import replica_slices  # noqa: TID251

from jaxft.checkpoint import leaves
from jaxft.checkpoint.chunking import Box, make_box


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What this process writes of one leaf, in host memory.

    Attributes:
        info: Orbax's notes about the leaf.
        shape: of the whole leaf.
        write_shape: of the parts that are written, each by one process.
        parts: (place in the leaf, value) of those that are this one's.
        key: implementation of typed keys.
    """

    info: Any
    shape: tuple[int, ...]
    write_shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[Box, np.ndarray]]
    key: str | None


def split(
    pairs: list[tuple[jax.Array, Any]], *, max_bytes: int
) -> list[list[tuple[jax.Array, Any]]]:
    """(leaf, notes) in groups of at most so many bytes; a larger leaf goes alone."""
    if sum(value.nbytes for value, _ in pairs) <= max_bytes:
        return [pairs]
    batches: list[list[tuple[jax.Array, Any]]] = [[]]
    used = 0
    for value, info in pairs:
        size = sum(shard.data.nbytes for shard in value.addressable_shards)
        if used and used + size > max_bytes:
            batches.append([])
            used = 0
        batches[-1].append((value, info))
        used += size
    return batches


def take(pairs: list[tuple[jax.Array, Any]], **how: Any) -> list[Snapshot]:
    """Copies this process's parts to host memory, or holds them if they are there.

    Which parts those are is Orbax's choice; of a leaf on one device it is all.

    Args:
        pairs: (leaf, Orbax's notes about it).
        how: keywords of Orbax's own choice.
    """
    keys: list[str | None] = []
    arrays: list[jax.Array] = []
    for value, info in pairs:
        if jax.process_count() > 1 and value.is_fully_addressable:
            raise ValueError(
                f"leaf {info.name} is an array of one process alone: "
                "place it on a mesh of all"
            )
        is_key = leaves.is_key(value.dtype)
        keys.append(str(jax.random.key_impl(value)) if is_key else None)
        arrays.append(jax.random.key_data(value) if is_key else value)
    is_pinned = any(info.enable_pinned_host_transfer for _, info in pairs)
    single = {i for i, x in enumerate(arrays) if _is_single(x) and not is_pinned}
    for i in single:
        (device,) = arrays[i].devices()
        if device.platform != "cpu":  # Else it is there, and held.
            arrays[i].copy_to_host_async()
    rest = [i for i in range(len(arrays)) if i not in single]
    slices = replica_slices.transfer_arrays_to_host(
        [arrays[i] for i in rest],
        enable_pinned_host_transfer=is_pinned,
        **how,
    )
    parts: dict[int, tuple[tuple[int, ...], list[tuple[Box, np.ndarray]]]] = {}
    for i, found in zip(rest, slices, strict=True):
        fragments = found.to_fragments().fragments
        parts[i] = found.local_shape, [(f.index, f.value) for f in fragments]
    for i in single:
        shape = arrays[i].shape
        box = make_box([slice(None)] * len(shape), shape)
        parts[i] = shape, [(box, np.asarray(arrays[i]))]
    return [
        Snapshot(
            info=info,
            shape=arrays[i].shape,
            write_shape=parts[i][0],
            dtype=np.dtype(arrays[i].dtype),
            parts=parts[i][1],
            key=keys[i],
        )
        for i, (_, info) in enumerate(pairs)
    ]


def _is_single(array: jax.Array) -> bool:
    return array.is_fully_addressable and array.sharding.num_devices == 1
