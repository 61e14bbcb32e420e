"""Where whole trees live on the mesh, why, and how batches get there.

World: device. Floor: `parallel`, above `types`. Read `jaxft/parallel/rules.py`,
which decides on single leaves, before this file and `jaxft/train/state.py` after
it. Planning needs shapes only and touches no device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxft.config import ConfigError, ShardingConfig
from jaxft.parallel.rules import LeafPlanner, Mesh, Placement
from jaxft.types import Batch, PyTree, TrainState

KeyPath = tuple[Any, ...]


def plan_shardings(
    shapes: PyTree,
    *,
    mesh: Mesh,
    config: ShardingConfig | None = None,
    axes: PyTree | None = None,
) -> PyTree:
    """A sharding for every leaf of any tree; see `plan_placements`."""
    return _shardings(plan_placements(shapes, mesh=mesh, config=config, axes=axes))


def plan_placements(
    shapes: PyTree,
    *,
    mesh: Mesh,
    config: ShardingConfig | None = None,
    axes: PyTree | None = None,
) -> PyTree:
    """Decides on every leaf of a tree.

    Args:
        shapes: tree of `jax.ShapeDtypeStruct`, arrays or scalars; shardings that
            they have are not looked at.
        mesh: the mesh; an axis that a rule names and the mesh lacks counts as one
            device.
        config: the rules; None for the defaults.
        axes: logical names as in `jaxft.types.Model.axes`; None for none.

    Returns:
        The same tree with a `Placement` at each leaf.

    Raises:
        ConfigError: a rule is malformed, cannot be obeyed, or matches no leaf;
            `axes` does not fit `shapes`.
    """
    planner = LeafPlanner.from_config(config, mesh=mesh)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    names = _flatten_axes(axes, treedef=treedef)
    placed = [
        planner.place(_join(path), leaf, names=leaf_names)
        for (path, leaf), leaf_names in zip(leaves, names, strict=True)
    ]
    planner.check_matched([_join(path) for path, _ in leaves])
    return treedef.unflatten(placed)


def plan_state_placements(
    state: TrainState,
    *,
    mesh: Mesh,
    config: ShardingConfig | None = None,
    axes: PyTree | None = None,
) -> TrainState:
    """Decides on every leaf of a state: the parameters first, the rest after them.

    Rules and `axes` speak of `params`, whose paths start below it. A leaf of
    `opt_state` or `extra` that mirrors a parameter (its path ends with the
    parameter's, its shape is the same: moments, accumulated gradients, averages)
    is placed like it; other leaves automatically. The scalars are replicated.

    Raises:
        ConfigError: as `plan_placements`.
    """
    params = plan_placements(state.params, mesh=mesh, config=config, axes=axes)
    planner = LeafPlanner.from_config(config, mesh=mesh)
    flat_params = jax.tree_util.tree_flatten_with_path(state.params)[0]
    models = {
        path: (np.shape(leaf), placement)
        for (path, leaf), placement in zip(
            flat_params, jax.tree.leaves(params), strict=True
        )
    }

    def place(path: KeyPath, leaf: Any) -> Placement:
        for start in range(len(path) + 1):
            if path[start:] in models:
                shape, placement = models[path[start:]]
                # The longest suffix decides: a factored moment of this parameter
                # must not be taken for another parameter with a shorter path.
                if shape == np.shape(leaf):
                    reason = f"like params/{_join(path[start:])}"
                    return Placement(placement.sharding, reason)
                break
        return planner.automatic(leaf)

    return state.replace(
        step=planner.automatic(state.step),
        num_skipped=planner.automatic(state.num_skipped),
        params=params,
        opt_state=jax.tree_util.tree_map_with_path(place, state.opt_state),
        rng=planner.automatic(state.rng),
        extra=jax.tree_util.tree_map_with_path(place, state.extra),
    )


def _shardings(placements: PyTree) -> PyTree:
    return jax.tree.map(lambda placement: placement.sharding, placements)


def _join(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _flatten_axes(axes: PyTree | None, *, treedef: Any) -> Sequence[Any]:
    """Logical names leaf by leaf, None where there are none."""
    if axes is None:
        return [None] * treedef.num_leaves
    try:
        # Up to the leaves of `shapes`: below them, tuples and None are names.
        return treedef.flatten_up_to(axes)
    except (ValueError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            "model.factory", f"Model.axes is not shaped like the parameters: {line}"
        ) from error


def _leaf_bytes(leaf: Any, sharding: Sharding) -> int:
    shape = sharding.shard_shape(np.shape(leaf))
    return math.prod(shape) * _dtype(leaf).itemsize


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)


def explain(shapes: PyTree, placements: PyTree) -> str:
    """A table for people: shape, spec, bytes per device and the reason, by leaf.

    Args:
        shapes: tree of arrays or `jax.ShapeDtypeStruct`.
        placements: the same tree of `Placement`, or of shardings, which have no
            reasons.

    Returns:
        Lines of text, the last with the totals. Specs are written as in path rules.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    rows = [("leaf", "shape", "dtype", "spec", "bytes/device", "why")]
    total, here = 0, 0
    for (path, leaf), placed in zip(
        leaves, treedef.flatten_up_to(placements), strict=True
    ):
        known = isinstance(placed, Placement)
        sharding = placed.sharding if known else placed
        num_bytes = _leaf_bytes(leaf, sharding)
        total += math.prod(np.shape(leaf)) * _dtype(leaf).itemsize
        here += num_bytes
        rows.append(
            (
                _join(path),
                "x".join(map(str, np.shape(leaf))) or "scalar",
                str(_dtype(leaf)),
                _spec_text(sharding, rank=len(np.shape(leaf))),
                f"{num_bytes:,}",
                placed.reason if known else "given",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index == 4 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(
        [*lines, f"{len(leaves)} leaves: {here:,} bytes per device of {total:,}"]
    )


def _spec_text(sharding: Sharding, *, rank: int) -> str:
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    texts = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in entries]
    return "-" if set(texts) <= {"-"} else ", ".join(texts)


def batch_sharding(
    mesh: Mesh, *, config: ShardingConfig | None = None
) -> NamedSharding:
    """The sharding of a batch: dim 0 over the axes of the first rule for `batch`.

    Raises:
        ConfigError: no rule speaks of `batch`.
    """
    planner = LeafPlanner.from_config(config, mesh=mesh)
    return planner.placement((planner.batch_axes(),), "rows of a batch").sharding


def check_batch(
    global_batch: int,
    *,
    num_microbatches: int,
    mesh: Mesh,
    config: ShardingConfig | None = None,
) -> None:
    """Refuses a global batch that its shards and microbatches cannot share equally.

    Raises:
        ConfigError: `data.global_batch` is no multiple of both together.
    """
    planner = LeafPlanner.from_config(config, mesh=mesh)
    num_shards = planner.size(planner.batch_axes())
    if global_batch % (num_shards * num_microbatches):
        raise ConfigError(
            "data.global_batch",
            f"{global_batch} rows do not split over {num_shards} batch shards x "
            f"{num_microbatches} microbatches: use a multiple of "
            f"{num_shards * num_microbatches}",
        )


def local_rows(sharding: NamedSharding, global_batch: int) -> list[int]:
    """Rows of the global batch that this process holds, ascending.

    Args:
        sharding: of the batch.
        global_batch: number of rows of all processes together.
    """
    return list(_local_plan(sharding, global_batch)[0])


def put_batch(
    rows: Mapping[str, np.ndarray],
    *,
    sharding: NamedSharding,
    global_batch: int | None = None,
    control: int = 0,
) -> tuple[Batch, jax.Array]:
    """Puts a batch and this process's control word on the devices in one transfer.

    Args:
        rows: name -> [local rows, ...], the rows that `local_rows` lists. They must
            not be written to afterwards: on CPU the arrays may be views of them.
        sharding: of the batch, from `batch_sharding`.
        global_batch: rows of all processes; None infers it from `rows`.
        control: this process's word.

    Returns:
        The batch, [global_batch, ...] each, and the words of all processes,
        int32 [number of devices], one device each.

    Raises:
        ValueError: the number of rows is not what this process holds.
    """
    mesh = sharding.mesh
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    num_rows = _count_rows(rows)
    if global_batch is None:
        held = len(_local_plan(sharding, mesh.size)[0])
        global_batch = num_rows * mesh.size // held
    local, parts = _local_plan(sharding, global_batch)
    if num_rows != len(local):
        raise ValueError(
            f"this process holds {len(local)} of {global_batch} rows, got {num_rows}"
        )
    if sharding.is_fully_addressable:
        words = np.full(mesh.size, control, np.int32)
        return jax.device_put((dict(rows), words), (sharding, spread))
    shards = [array[part] for array in rows.values() for _, part in parts]
    shards += [np.full(1, control, np.int32)] * len(parts)
    devices = [device for device, _ in parts] * (len(rows) + 1)
    # One call for all shards of all arrays; their grouping costs nothing more.
    placed = iter(jax.device_put(shards, devices))

    def gather(shape: tuple[int, ...], target: NamedSharding) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            shape, target, [next(placed) for _ in parts]
        )

    batch = {
        name: gather((global_batch, *array.shape[1:]), sharding)
        for name, array in rows.items()
    }
    return batch, gather((mesh.size,), spread)


def _count_rows(rows: Mapping[str, np.ndarray]) -> int:
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in rows.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the arrays of a batch need equal numbers of rows: {counts}")
    if not any(counts.values()):
        raise ValueError(f"a batch with no rows: {counts}")
    return next(iter(counts.values()))


@functools.lru_cache(maxsize=64)
def _local_plan(
    sharding: NamedSharding, global_batch: int
) -> tuple[tuple[int, ...], tuple[tuple[jax.Device, slice], ...]]:
    """Global rows of this process, and for each of its devices its part of them."""
    index_map = sharding.addressable_devices_indices_map((global_batch,))
    ranges = {
        device: range(*index[0].indices(global_batch))
        for device, index in index_map.items()
        if index is not None
    }
    local = tuple(sorted({row for rows in ranges.values() for row in rows}))
    # A device's rows are neighbours in the global batch, so they are here too.
    position = {row: number for number, row in enumerate(local)}
    parts = tuple(
        (device, slice(position[rows[0]], position[rows[0]] + len(rows)))
        for device, rows in ranges.items()
    )
    return local, parts
