"""One program for a single device, run on each device of a mesh.

World: device. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/train/virtual_shards.py`, which needs it, next.

A program for several devices may be fused otherwise than one for a single device,
and gives other last bits, even where no device needs another one. A program that is
compiled for one device is the same whatever the mesh is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxft.types import PyTree


class EachDevice:
    """A function that each local device applies to what it holds.

    Args:
        function: traceable.
        args: shapes with shardings on the mesh.
        out: the sharding of all results: whole on each device, or dim 0 of each
            device's own, one after the other.
        donate_argnums: as of `jax.jit`.

    Attributes:
        program: that of one device.
        out_info: shapes of the results, with `out`.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        *,
        out: NamedSharding,
        donate_argnums: tuple[int, ...] = (),
    ):
        lowered = [
            jax.jit(function, donate_argnums=donate_argnums).lower(
                *(jax.tree.map(lambda x, d=device: _shape_on(x, d), args))
            )
            for device in out.mesh.local_devices
        ]
        # The compiler does not hold Python's lock.
        with ThreadPoolExecutor(max_workers=len(lowered)) as pool:
            compiled = list(pool.map(lambda low: low.compile(), lowered))
        self.program = compiled[0]
        self.out_info = jax.tree.map(lambda x: _all_of(x, out), lowered[0].out_info)
        self._programs = dict(zip(out.mesh.local_devices, compiled, strict=True))
        self._out = out

    def __call__(self, held: Mapping[jax.Device, tuple[Any, ...]]) -> PyTree:
        """Runs it everywhere.

        Args:
            held: the arguments of each device; see `by_device`.
        """
        results = [
            jax.tree.leaves(program(*held[device]))
            for device, program in self._programs.items()
        ]
        shapes, treedef = jax.tree.flatten(self.out_info)
        return treedef.unflatten(
            jax.make_array_from_single_device_arrays(x.shape, self._out, list(parts))
            for x, parts in zip(shapes, zip(*results, strict=True), strict=True)
        )


def by_device(tree: PyTree) -> dict[jax.Device, PyTree]:
    """What each local device holds of a tree of arrays, without a copy."""
    leaves, treedef = jax.tree.flatten(tree)
    held: dict[jax.Device, list[jax.Array]] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held.setdefault(shard.device, []).append(shard.data)
    return {device: treedef.unflatten(parts) for device, parts in held.items()}


def axes_of(rows: NamedSharding) -> tuple[str, ...]:
    """The mesh axes that dim 0 is split over, outermost first."""
    axes = rows.spec[0] if len(rows.spec) else None
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def num_parts(rows: NamedSharding) -> int:
    """Into how many parts dim 0 is split."""
    return math.prod(rows.mesh.shape[name] for name in axes_of(rows))


def _shape_on(x: Any, device: jax.Device) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        x.sharding.shard_shape(x.shape),
        x.dtype,
        sharding=SingleDeviceSharding(device),
    )


def _all_of(x: Any, out: NamedSharding) -> jax.ShapeDtypeStruct:
    shape = x.shape
    if (parts := num_parts(out)) > 1:
        shape = (parts * x.shape[0], *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=out)
