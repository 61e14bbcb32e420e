"""Sums over a batch that are the same bits on any number of devices.

World: device. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/train/microbatch.py` before and `jaxft/train/shard_step.py`, which makes a
training step of it, after this file.

Floating-point addition is not associative: what one device adds up and what eight
add up differ in the last bits, and training amplifies them. So the batch is cut into
a fixed number of virtual shards, a power of two, and

* each shard is computed by a program for a single device that holds nothing else; in
  one for all devices a transformer's gradients were not the same on one and on two;
* the results are added as a binary tree over the shards, (0+1)+(2+3) and so on: the
  lower levels on each device, which holds neighbouring shards, the upper ones by
  exchange with the device whose number differs in one bit, the lowest bit first. Both
  partners add the same two numbers, so all end with the same bits, without a moment
  at which a device holds more than a few of the results;
* what happens after a sum is in a program of its own, so that no compiler fuses one
  into the other on one mesh and not on another.

Parameters that are split over devices are gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxft.config import ConfigError
from jaxft.train.each_device import EachDevice, axes_of, by_device, num_parts
from jaxft.types import Batch, PyTree, TrainState

# (operands, rows of one shard, its typed key) -> tree of arrays to be added up.
Compute = Callable[[PyTree, Batch, jax.Array], PyTree]


class ShardSums:
    """A function of a part of a batch, summed over all its virtual shards.

    Args:
        compute: see `Compute`; it may not look at anything else.
        num_shards: K; a power of two, a multiple of the batch shards of the mesh.
        rows: the sharding of a batch.
        operands: what `compute` needs of a state.
        key: (rng, step) of a state -> the typed key; shard `k` gets `fold_in(key, k)`.

    Raises:
        ConfigError: `num_shards` does not fit the mesh.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        num_shards: int,
        rows: NamedSharding,
        operands: Callable[[TrainState], PyTree],
        key: Callable[[jax.Array, jax.Array], jax.Array],
    ):
        check_mesh(num_shards, rows=rows)
        self.num_shards = num_shards
        self._compute = compute
        self._operands = operands
        self._key = key
        self._axes = axes_of(rows)
        mesh = rows.mesh
        self._num_parts = num_parts(rows)
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._lead = NamedSharding(mesh, PartitionSpec(self._axes or None))
        self._rows = rows

    def compile(self, state: TrainState, batch: Batch) -> CompiledSums:
        """Compiles for a state and a batch, arrays or shapes with shardings.

        Raises:
            ConfigError: the rows of the batch cannot be divided.
        """
        state, batch = jax.tree.map(self._shape, (state, batch))
        leaves, treedef = jax.tree.flatten(self._operands(state))
        split = [x for x in leaves if not x.sharding.is_fully_replicated]

        def prepare(
            split: list[jax.Array], batch: Batch, rng: jax.Array, step: jax.Array
        ) -> tuple[list[Any], list[Any], list[Any]]:
            numbers = jnp.arange(self.num_shards)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(
                self._key(rng, step), numbers
            )
            keys = keys.reshape(self._num_parts, -1)
            each = range(keys.shape[1])
            parts = [
                {n: self._part(x, index) for n, x in batch.items()} for index in each
            ]
            return split, parts, [keys[:, index] for index in each]

        def compute(leaves: list[jax.Array], part: Batch, keys: jax.Array) -> PyTree:
            sums = self._compute(jax.tree.unflatten(treedef, leaves), part, keys[0])
            return jax.tree.map(lambda x: x[None], sums)

        prepared = jax.jit(
            prepare, out_shardings=(self._whole, self._lead, self._lead)
        ).lower(split, batch, state.rng, state.step)
        _, parts, keys = prepared.out_info
        compute_each = EachDevice(
            compute,
            (
                _on(leaves, self._whole),
                _on(parts[0], self._lead),
                _on(keys[0], self._lead),
            ),
            out=self._lead,
        )
        sums = compute_each.out_info
        programs = {
            "prepare": prepared.compile(),
            "reduce": jax.jit(self._reduce).lower(sums).compile(),
        }
        if len(parts) > 1:
            add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
            programs["add"] = add.lower(sums, sums).compile()
        out_info = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=self._whole),
            sums,
        )
        return CompiledSums(
            programs, compute=compute_each, operands=self._operands, out_info=out_info
        )

    def peak_bytes(self, state: TrainState, result: PyTree) -> int:
        """About what the sums take on one device beside state and activations.

        Args:
            state: shapes with shardings; operands that are split are held whole.
            result: shapes of what one shard gives.
        """
        gathered = sum(
            _num_bytes(x)
            for x in jax.tree.leaves(self._operands(state))
            if not x.sharding.is_fully_replicated
        )
        each = sum(map(_num_bytes, jax.tree.leaves(result)))
        num_local = self.num_shards // self._num_parts
        # One at each level of the local tree, the newest, and what an exchange brings.
        return gathered + each * (num_local.bit_length() + 1)

    def _shape(self, x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            sharding = self._rows  # Rows of the host, as `TrainStep.place` puts them.
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def _part(self, x: jax.Array, index: int) -> jax.Array:
        """Of each device's rows those of its shard `index`; nothing moves."""
        if x.shape[0] % self.num_shards:
            raise ConfigError(
                "data.global_batch",
                f"{x.shape[0]} rows do not split over train.virtual_shards "
                f"{self.num_shards}",
            )
        shape = (self._num_parts, -1, x.shape[0] // self.num_shards, *x.shape[1:])
        return x.reshape(shape)[:, index].reshape(-1, *x.shape[1:])

    def _reduce(self, sums: PyTree) -> PyTree:
        """[parts, ...] each -> [...], the upper levels of the tree."""

        def exchange(x: jax.Array) -> jax.Array:
            x = x[0]
            for bit in range(self._num_parts.bit_length() - 1):
                pairs = [(i, i ^ (1 << bit)) for i in range(self._num_parts)]
                x = x + jax.lax.ppermute(x, self._axes, pairs)
            return x

        return jax.shard_map(
            lambda sums: jax.tree.map(exchange, sums),
            mesh=self._rows.mesh,
            in_specs=self._lead.spec,
            out_specs=PartitionSpec(),
            # It cannot know that all devices end with the same.
            check_vma=False,
        )(sums)


class CompiledSums:
    """A compiled `ShardSums`: (state, batch) -> sums, replicated.

    Attributes:
        programs: what it runs, by name.
        out_info: shapes of the sums, with shardings.
    """

    def __init__(
        self,
        programs: Mapping[str, jax.stages.Compiled],
        *,
        compute: EachDevice,
        operands: Callable[[TrainState], PyTree],
        out_info: PyTree,
    ):
        self.programs = {**programs, "compute": compute.program}
        self.out_info = out_info
        self._compute = compute
        self._operands = operands

    def __call__(self, state: TrainState, batch: Batch) -> PyTree:
        """Adds up over the virtual shards of `batch`."""
        run = self.programs
        leaves = jax.tree.leaves(self._operands(state))
        split = [x for x in leaves if not x.sharding.is_fully_replicated]
        split, parts, keys = run["prepare"](split, batch, state.rng, state.step)
        gathered = iter(split)
        leaves = [
            x if x.sharding.is_fully_replicated else next(gathered) for x in leaves
        ]
        held = by_device(leaves)
        # Sums of 2 ** level neighbouring shards, as a binary counter holds them.
        done: list[tuple[int, PyTree]] = []
        for part, key in zip(parts, keys, strict=True):
            level, total = (
                0,
                self._compute(
                    {d: (held[d], *rest) for d, rest in by_device((part, key)).items()}
                ),
            )
            while done and done[-1][0] == level:
                total, level = run["add"](done.pop()[1], total), level + 1
            done.append((level, total))
        (_, total) = done.pop()
        return _wait_on_cpu(run["reduce"](_wait_on_cpu(total)))


def check_mesh(num_shards: int, *, rows: NamedSharding) -> None:
    """Refuses a number of virtual shards that the mesh cannot share.

    Raises:
        ConfigError: it names `train.virtual_shards` or the mesh axis.
    """
    if num_shards < 1 or num_shards & (num_shards - 1):
        raise ConfigError(
            "train.virtual_shards", f"must be a power of two or 0, is {num_shards}"
        )
    sizes = rows.mesh.shape
    if sizes.get("tensor", 1) > 1:
        raise ConfigError(
            "train.virtual_shards",
            f"needs mesh.tensor=1, is {sizes['tensor']}: layers that are split over "
            "devices add up in another order on another number of them",
        )
    if num_shards % num_parts(rows):
        raise ConfigError(
            "train.virtual_shards",
            f"{num_shards} shards do not divide over {num_parts(rows)} devices along "
            f"{' and '.join(axes_of(rows))}: use a power of two of both",
        )


def _num_bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _on(tree: PyTree, sharding: Sharding) -> PyTree:
    """Shapes with this sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def _wait_on_cpu(tree: PyTree) -> PyTree:
    """`tree`, once it is there, where several devices share the threads of a CPU.

    Programs that exchange something would take all threads to wait for others that
    have none left to begin with.
    """
    sharding = jax.tree.leaves(tree)[0].sharding
    local = sharding.addressable_devices
    if len(local) > 1 and next(iter(local)).platform == "cpu":
        jax.block_until_ready(tree)
    return tree
