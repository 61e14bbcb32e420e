"""Fingerprints of arrays where they lie: on the devices, before any copy.

World: device. Floor: `parallel`. Read `jaxft/parallel/partial_sums.py`, which is what
each device does, before this file and `jaxft/checkpoint/proof.py` next.

Each device sums over its own part; the host adds the sums of one replica of each
part. So there is no collective, processes need not wait for each other, and replicas
can be compared. Leaves of one shape, dtype and sharding share a program; small ones
are stacked, since thousands of them would cost more to start than to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxft import fingerprints
from jaxft.fingerprints import LeafDigest
from jaxft.parallel.partial_sums import block_sums, has_wide_index

# Equal leaves share programs: each one costs time to start, and the CPU backend makes
# whoever starts more than 32 wait. Small leaves are stacked, which is a copy; of large
# ones a program takes a few, since with each sum it takes longer to compile.
_STACK_LEAVES = 64
_STACK_BYTES = 1 << 20
_APART_LEAVES = 12  # On CPU in one reduction: the keys of their places are the same.

# The TPU compiler takes time in proportion to the size of a reduction: seconds for
# millions of elements. A loop over blocks of this many is compiled at once.
_BLOCK_ELEMENTS = 1 << 19

Partial = tuple[int, int, int]


# --- starting and waiting -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What arrays have in common that go through one program.

    Attributes:
        shape: of the whole leaf.
        dtype: what the elements are.
        sharding: of the leaf, or of the single device that holds the part.
        local: shape of a part.
        base: index in the whole leaf of the part's first element; unused by leaves
            that have a mesh, where it differs by device.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    local: tuple[int, ...]
    base: int = 0

    @property
    def num_stacked(self) -> int:
        """How many of them are stacked; 0 where they are too large for that."""
        num_bytes = max(1, math.prod(self.local) * self.dtype.itemsize)
        num_leaves = min(_STACK_LEAVES, _STACK_BYTES // num_bytes)
        return num_leaves if num_leaves > _APART_LEAVES else 0

    @property
    def needs_64_bits(self) -> bool:
        """Whether JAX must know integers of 64 bits here."""
        is_wide = self.dtype.itemsize == 8 and self.dtype.kind != "c"
        return (
            is_wide
            or self.dtype.itemsize == 16
            or has_wide_index(self.shape, self.dtype)
        )


@dataclasses.dataclass
class _Group:
    """Leaves whose sums arrive together, as `[device, leaf, sum]`."""

    names: list[str]
    kind: _Kind
    sums: jax.Array


def start_digests(leaves: Mapping[str, jax.Array]) -> PendingDigests:
    """Starts the digest of each leaf and does not wait for any.

    The leaves may be donated as soon as this returns. In a run of several processes
    each may start what it likes: nothing here waits for another process, but an
    array that spans processes must be started by all of them.

    Args:
        leaves: by name; typed keys count as their key data.

    Returns:
        The digests to come.
    """
    groups = []
    with _own_context():
        for kind, names, parts in _grouped(leaves):
            with _integers_of_64_bits(kind.needs_64_bits):
                groups.append(_Group(names, kind, _program(kind)(parts)))
    partial = {name for name, leaf in leaves.items() if not leaf.is_fully_addressable}
    return PendingDigests(list(leaves), groups, partial)


def prepare(leaves: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Saves the first `start_digests` of such leaves the time to compile.

    Args:
        leaves: as `start_digests` will get them; they are not kept.

    Returns:
        What compiles the programs, to be called once, in any thread. It takes a tenth
        of a second or more for each combination of shape, dtype and sharding.
    """
    with _own_context():
        wanted = [
            (kind, [_like(part) for part in parts])
            for kind, _, parts in _grouped(leaves)
        ]

    def compile_all() -> None:
        with _own_context():
            for kind, parts in wanted:
                with _integers_of_64_bits(kind.needs_64_bits):
                    _program(kind).lower(parts).compile()

    return compile_all


class PendingDigests:
    """Digests that the devices are still working on; see `start_digests`."""

    def __init__(self, names: list[str], groups: list[_Group], partial: set[str]):
        self._names = names
        self._known = set(names)
        self._groups = groups
        self._partial = partial  # leaves of which other processes hold parts
        self._fetched: dict[int, dict[int, np.ndarray]] = {}

    def partials(self) -> dict[str, list[Partial]]:
        """What this process holds of each leaf; waits for all.

        Returns:
            By name, (low lane, high lane, number of non-finite elements) of each part
            whose first replica is on a device of this process. Those of all processes
            together, in any order, are what `jaxft.fingerprints.combine` takes.
        """
        return self._collect(self._names)

    def result(self, names: Iterable[str] | None = None) -> dict[str, LeafDigest]:
        """The digests, in the order of the names; waits for these leaves only.

        Args:
            names: which; None for all.

        Raises:
            KeyError: a name was not started.
            ValueError: another process holds a part of one of them.
        """
        names = self._names if names is None else list(names)
        for name in names:
            if name not in self._known:
                raise KeyError(f"no digest was started of a leaf {name}")
            if name in self._partial:
                raise ValueError(
                    f"other processes hold parts of leaf {name}: combine `partials`"
                )
        return {
            name: fingerprints.combine(partials)
            for name, partials in self._collect(names).items()
        }

    def differing_replicas(self) -> list[str]:
        """Leaves of which two devices of this process hold unequal copies of a part."""
        found = dict.fromkeys(self._names, False)
        for number, sums in self._fetch(range(len(self._groups))).items():
            group = self._groups[number]
            first: dict[int, np.ndarray] = {}
            for device, base in enumerate(_bases(group.kind)):
                if device not in sums:
                    continue
                other = first.setdefault(base, sums[device])
                for name, differs in zip(
                    group.names, (other != sums[device]).any(axis=-1), strict=True
                ):
                    found[name] |= bool(differs)
        return [name for name, differs in found.items() if differs]

    def _collect(self, names: Sequence[str]) -> dict[str, list[Partial]]:
        found: dict[str, list[Partial]] = {name: [] for name in names}
        numbers = [
            number
            for number, group in enumerate(self._groups)
            if not found.keys().isdisjoint(group.names)
        ]
        for number, sums in self._fetch(numbers).items():
            group = self._groups[number]
            for device in _first_replicas(group.kind):
                for name, row in zip(
                    group.names, sums.get(device, np.empty(0)).tolist(), strict=False
                ):
                    if name in found:
                        found[name].append(tuple(row))
        return found

    def _fetch(self, numbers: Iterable[int]) -> dict[int, dict[int, np.ndarray]]:
        """Group -> device -> sums, of the devices of this process."""
        numbers = list(numbers)
        missing = [number for number in numbers if number not in self._fetched]
        shards = [self._groups[number].sums.addressable_shards for number in missing]
        # All at once: one transfer is started before the first one is waited for.
        fetched = jax.device_get([[shard.data for shard in some] for some in shards])
        for number, some, values in zip(missing, shards, fetched, strict=True):
            self._fetched[number] = {
                shard.index[0].start or 0: value[0]
                for shard, value in zip(some, values, strict=True)
            }
        return {number: self._fetched[number] for number in numbers}


def _grouped(
    leaves: Mapping[str, jax.Array],
) -> Iterator[tuple[_Kind, list[str], list[jax.Array]]]:
    """What goes through each call of a program: names, and their arrays or parts."""
    kinds: dict[_Kind, list[tuple[str, jax.Array]]] = {}
    for name, leaf in leaves.items():
        for kind, part in _parts(leaf):
            kinds.setdefault(kind, []).append((name, part))
    for kind, named in kinds.items():
        size = kind.num_stacked or _APART_LEAVES
        for at in range(0, len(named), size):
            names, parts = zip(*named[at : at + size], strict=True)
            yield kind, list(names), list(parts)


def _parts(leaf: jax.Array) -> list[tuple[_Kind, jax.Array]]:
    """A leaf as what programs take: whole where they can, else by its shards."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    sharding, shape = leaf.sharding, leaf.shape
    if isinstance(sharding, SingleDeviceSharding) or _has_mesh(sharding):
        local = sharding.shard_shape(shape)
        return [(_Kind(shape, leaf.dtype, sharding, local), leaf)]
    parts = []
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            data = shard.data
            base = _first_index(shard.index, shape)
            kind = _Kind(shape, leaf.dtype, data.sharding, data.shape, base)
            parts.append((kind, data))
    return parts


def _has_mesh(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and bool(sharding.mesh.axis_names)


def _like(part: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        part.shape,
        part.dtype,
        sharding=part.sharding if part.committed else None,
        weak_type=part.weak_type,
    )


def _own_context() -> contextlib.AbstractContextManager[Any]:
    # The mesh of the caller may be another one than a leaf's.
    return jax.set_mesh(None)


def _integers_of_64_bits(needed: bool) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


# --- where the parts are ------------------------------------------------------


def _first_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Row-major index of the first element of a part."""
    first = 0
    for part, dim in zip(index, shape, strict=True):
        first = first * dim + (part.start or 0)
    return first


@functools.lru_cache(maxsize=4096)
def _bases(kind: _Kind) -> tuple[int, ...]:
    """By position in the mesh, the index of the first element of a device's part."""
    if not isinstance(kind.sharding, NamedSharding):
        return (kind.base,)
    indices = kind.sharding.devices_indices_map(kind.shape)
    devices = kind.sharding.mesh.devices.flat
    return tuple(_first_index(indices[device], kind.shape) for device in devices)


@functools.lru_cache(maxsize=4096)
def _first_replicas(kind: _Kind) -> tuple[int, ...]:
    """Positions in the mesh that together hold every part once."""
    first: dict[int, int] = {}
    for position, base in enumerate(_bases(kind)):
        first.setdefault(base, position)
    return tuple(first.values())


# --- what the devices do ------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _program(kind: _Kind) -> Any:
    """Arrays of one kind -> `[device, array, sum]`, each device its own row."""
    # As a constant of the program: the mesh says which device it is, not where it lies.
    index_dtype = np.uint64 if kind.needs_64_bits else np.uint32
    bases = np.array(_bases(kind), index_dtype)
    device = next(iter(kind.sharding.device_set))
    num_elements = _BLOCK_ELEMENTS if device.platform == "tpu" else sys.maxsize

    def sums(parts: list[jax.Array], base: Any) -> jax.Array:
        apart = [part[None] for part in parts]
        stacks = [jnp.stack(parts)] if kind.num_stacked else apart
        size = len(stacks) if device.platform == "cpu" else 1
        rows = [
            block_sums(
                stacks[at : at + size],
                base=base,
                shape=kind.shape,
                num_elements=num_elements,
            )
            for at in range(0, len(stacks), size)
        ]
        return jnp.concatenate(rows)[None]

    def on_mesh(leaves: list[jax.Array], place: NamedSharding) -> jax.Array:
        mesh = place.mesh

        def on_device(parts: list[jax.Array]) -> jax.Array:
            return sums(parts, jnp.asarray(bases)[jax.lax.axis_index(mesh.axis_names)])

        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=place.spec,
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )(leaves)

    def digest(leaves: list[jax.Array]) -> jax.Array:
        if kind.sharding.memory_kind not in (None, "device"):
            leaves = jax.device_put(leaves, jax.memory.Space.Device)
        if isinstance(kind.sharding, NamedSharding):
            return on_mesh(leaves, kind.sharding)
        return sums(leaves, bases[0])

    return jax.jit(digest, compiler_options=_compiler_options(device.platform))


@functools.lru_cache(maxsize=8)
def _compiler_options(platform: str) -> dict[str, int] | None:
    """On CPU the widest vectors there are, whose registers hold the sums of all leaves.

    Where a processor has no vectors of 512 bits, the compiler cuts them: it is a wish.
    """
    if platform != "cpu":
        return None
    options = {"xla_cpu_prefer_vector_width": 512}
    probe = jax.jit(lambda: jnp.uint32(0), compiler_options=options)
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError:
        return None  # XLA keeps no promises about its options.
    return options
