"""Loads from any checkpoint: a part of it, under other names, in other dtypes.

World: device. Floor: above `foreign_fit` and `renames`. Read
`jaxft/checkpoint/foreign_fit.py` before.

Nothing is guessed: what the target lacks, what the checkpoint lacks and every dtype
that differs is an error that lists all of it, unless it is allowed by name. What was
allowed is in the result and in one event.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxft import patterns, records
from jaxft.checkpoint import (
    foreign_fit,
    foreign_source,
    leaf_requests,
    renames,
    run_record,
)

PyTree = Any

MEMORY_BYTES = foreign_source.MEMORY_BYTES
_PARAMS = "params"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load gave.

    Attributes:
        tree: in the structure and placement of the target; without one, nested dicts
            of NumPy arrays, Python numbers and text.
        path: the item folder that was read.
        missing: target paths that kept the target's own values.
        unexpected: stored paths, under their new names, that were left out.
        cast: target path -> (stored dtype, dtype now).
        num_bytes: of the leaves that were read.
    """

    tree: PyTree
    path: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0


def load(
    path: str | os.PathLike[str],
    target: PyTree = None,
    *,
    paths: str = "**",
    rename: Mapping[str, str] | None = None,
    optional: str = "",
    allow_cast: str = "",
    strict: bool = True,
    memory_bytes: int = MEMORY_BYTES,
    emit: records.Emit = records.ignore_event,
) -> Loaded:
    """Loads leaves of a checkpoint that any Orbax wrote; reads no other leaf.

    Args:
        path: an item, a step, or a root or workdir, of which the newest step is taken
            that was neither rolled back nor saved with values that are not finite.
        target: the tree to come back: arrays, `jax.ShapeDtypeStruct`, numbers, text.
            JAX arrays are placed as `leaf_requests.match` says. None for NumPy.
        paths: globs over stored paths; see `jaxft/patterns.py`.
        rename: stored path -> path in the target; see `jaxft/checkpoint/renames.py`.
        optional: globs over target paths: the target's own value where it is not
            stored.
        allow_cast: globs over target paths that may have another dtype of the same
            kind than the stored one; integers must keep their values.
        strict: False also leaves out stored leaves that the target lacks, and keeps
            the values of all target leaves that are not stored.
        memory_bytes: most that is held on the host at a time. Shards of large leaves
            go to their devices as they fill.
        emit: told what was loaded.

    Raises:
        TargetMismatchError: it lists every leaf that does not fit.
        FaultError: kind CONFIG: there is no such checkpoint, or a rename rule fits
            nothing. Kind NO_CHECKPOINT: a leaf that is wanted is damaged.
        OSError: it cannot be read.
    """
    source = foreign_source.ForeignSource(path, memory_bytes=memory_bytes)
    names = _select(source, paths=paths, rename=rename or {})
    options = foreign_fit.Options(
        optional=optional, allow_cast=allow_cast, strict=strict
    )
    return _load(source, names, target, options=options, emit=emit)


def init_params(
    path: str | os.PathLike[str],
    params: PyTree,
    *,
    paths: str = "",
    rename: Mapping[str, str] | None = None,
    optional: str = "",
    allow_cast: str = "",
    memory_bytes: int = MEMORY_BYTES,
    emit: records.Emit = records.ignore_event,
) -> Loaded:
    """Loads parameters, and nothing else, to begin another run with.

    Args:
        path: see `load`.
        params: the parameters as arrays or `jax.ShapeDtypeStruct`.
        paths: globs over stored paths, from which the parameters are taken; empty
            for `params/**` where a whole state is stored, and for all otherwise.
        rename: stored path -> path in the parameters' own tree or, below `params`,
            in a whole state. If any leaf is below `params` then only those count;
            else all that `paths` names do.
        optional: see `load`; globs over paths within the parameters.
        allow_cast: see `load`; the same.
        memory_bytes: see `load`.
        emit: told what was loaded.

    Returns:
        The parameters; what else a state consists of is made anew from them.

    Raises:
        TargetMismatchError: see `load`, here and below.
        FaultError: see `load`.
        OSError: see `load`.
    """
    source = foreign_source.ForeignSource(path, memory_bytes=memory_bytes)
    names = name_params(source, paths=paths, rename=rename or {})
    options = foreign_fit.Options(optional=optional, allow_cast=allow_cast, strict=True)
    return _load(source, names, params, options=options, emit=emit)


def name_params(
    source: foreign_source.ForeignSource, *, paths: str, rename: Mapping[str, str]
) -> dict[str, str]:
    """Path in the parameters -> stored path, of the leaves that `init_params` means.

    Raises:
        FaultError: see `load`.
    """
    prefix = f"{_PARAMS}/"
    if not paths:
        is_state = any(stored.startswith(prefix) for stored in source.segments)
        paths = f"{prefix}**" if is_state else "**"
    names = _select(source, paths=paths, rename=rename)
    below = {
        name.removeprefix(prefix): stored
        for name, stored in names.items()
        if name.startswith(prefix)
    }
    return below or names


def _select(
    source: foreign_source.ForeignSource, *, paths: str, rename: Mapping[str, str]
) -> dict[str, str]:
    """New name -> stored path, of the leaves that are meant."""
    chosen = patterns.Patterns(paths).select(source.segments)
    if not chosen:
        raise foreign_source.refuse(f"no leaf of {source.path} fits {paths!r}")
    try:
        names = renames.rename_paths(chosen, rename)
    except renames.RenameError as error:
        raise foreign_source.refuse(f"{source.path}: {error}") from error
    return {name: stored for stored, name in names.items()}


def _load(
    source: foreign_source.ForeignSource,
    names: Mapping[str, str],
    target: PyTree,
    *,
    options: foreign_fit.Options,
    emit: records.Emit,
) -> Loaded:
    if target is None:
        loaded = _load_numpy(source, names)
    else:
        loaded = _load_into(source, names, target, options=options)
    emit(
        "load",
        path=loaded.path,
        num_leaves=len(names) - len(loaded.unexpected),
        num_bytes=loaded.num_bytes,
        cast={name: list(dtypes) for name, dtypes in loaded.cast.items()},
        missing=list(loaded.missing),
        unexpected=list(loaded.unexpected),
    )
    return loaded


def _load_numpy(
    source: foreign_source.ForeignSource, names: Mapping[str, str]
) -> Loaded:
    read = source.read_all(names.values())
    values = {name: value for name, (_, value) in zip(names, read, strict=True)}
    segments = {
        name: source.segments[stored] if name == stored else tuple(name.split("/"))
        for name, stored in names.items()
    }
    try:
        tree = foreign_source.nest(values, segments)
    except ValueError as error:
        raise foreign_source.refuse(f"{source.path}: {error}") from error
    return Loaded(tree=tree, path=source.path, num_bytes=source.num_bytes)


# --- into a target ------------------------------------------------------------


def _load_into(
    source: foreign_source.ForeignSource,
    names: Mapping[str, str],
    target: PyTree,
    *,
    options: foreign_fit.Options,
) -> Loaded:
    wanted = foreign_fit.by_path(target)
    found = foreign_fit.compare(source, names, wanted, options=options)
    if problems := found.differences.problems():
        raise leaf_requests.TargetMismatchError(source.path, problems)
    values = dict(wanted)
    values |= _read_leaves(source, names, found.requests)
    tree = jax.tree.unflatten(jax.tree.structure(target), list(values.values()))
    return Loaded(
        tree=tree,
        path=source.path,
        missing=found.missing,
        unexpected=found.unexpected,
        cast=found.cast,
        num_bytes=source.num_bytes,
    )


def _read_leaves(
    source: foreign_source.ForeignSource,
    names: Mapping[str, str],
    requests: Mapping[str, leaf_requests.Request],
) -> dict[str, Any]:
    """Target path -> leaf, read, cast and placed."""
    large = [
        name
        for name, request in requests.items()
        if _sharding(request) is not None and source.is_large(names[name])
    ]
    small = [name for name in requests if name not in large]
    read = source.read_all(names[name] for name in small)
    values, name = {}, ""
    try:
        for name, (path, value) in zip(small, read, strict=True):
            values[name] = _place(value, requests[name], key_impl=source.key_impl(path))
        for name in large:
            values[name] = _stream(source, names[name], requests[name])
    except ValueError as error:
        text = f"{name}: {error}"
        raise leaf_requests.TargetMismatchError(source.path, [text]) from error
    return values


def _sharding(request: leaf_requests.Request) -> jax.sharding.Sharding | None:
    """Where an array goes shard by shard; None for what `decode` places."""
    is_array = request.spec.kind is run_record.LeafKind.ARRAY
    is_plain = is_array and not request.spec.dtype.startswith("key<")
    return request.sharding if is_plain and not request.spec.is_empty else None


def _place(value: Any, request: leaf_requests.Request, *, key_impl: str) -> Any:
    """One leaf as the target wants it.

    Raises:
        ValueError: an integer does not fit the dtype that is wanted.
    """
    spec = request.spec
    if key_impl:
        data = jax.numpy.asarray(value)
        return leaf_requests.decode(
            jax.random.wrap_key_data(data, impl=key_impl), request
        )
    if request.python is str:
        return value
    if request.python is not None:
        return request.python(np.asarray(value).item())
    value = _cast(np.asarray(value), spec.dtype)
    if (sharding := _sharding(request)) is not None:
        # Each process puts its own shards, and asks no other about them.
        value = jax.make_array_from_callback(
            spec.shape, sharding, functools.partial(operator.getitem, value)
        )
    return leaf_requests.decode(value, request)


def _cast(value: np.ndarray, dtype: str) -> np.ndarray:
    """The value in another dtype of its kind.

    Raises:
        ValueError: an integer does not fit.
    """
    if str(value.dtype) == dtype:
        return value
    if value.size and foreign_fit.is_kind(dtype, np.integer):
        bounds = ml_dtypes.iinfo(dtype)
        least, most = int(value.min()), int(value.max())
        if least < bounds.min or most > bounds.max:
            raise ValueError(f"holds {least} to {most}, which {dtype} cannot hold")
    return value.astype(dtype)


def _stream(
    source: foreign_source.ForeignSource, path: str, request: leaf_requests.Request
) -> jax.Array:
    """A large array, of which each shard leaves the host when it is full.

    Raises:
        ValueError: see `_place`.
    """
    sharding, spec = _sharding(request), request.spec
    assert sharding is not None
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None
        bounds = tuple(
            part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    filling = {bounds: _Shard(bounds, spec.dtype) for bounds in devices}
    arrays: list[jax.Array] = []

    def on_part(offsets: tuple[int, ...], part: np.ndarray) -> None:
        part = _cast(part, spec.dtype)
        for bounds in [
            key for key, shard in filling.items() if shard.add(offsets, part)
        ]:
            value = filling.pop(bounds).value
            for device in devices[bounds]:
                place = jax.sharding.SingleDeviceSharding(
                    device, memory_kind=sharding.memory_kind
                )
                arrays.append(jax.device_put(value, place))

    source.read_parts(path, on_part)
    array = jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)
    return leaf_requests.decode(array, request)


class _Shard:
    """A box of an array that is filled from parts.

    Args:
        bounds: (start, stop) of each dimension.
        dtype: of its elements.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], dtype: str):
        self._bounds = bounds
        self._dtype = dtype
        self._num_left = math.prod(stop - start for start, stop in bounds)
        self.value = np.empty(0, dtype)

    def add(self, offsets: Sequence[int], part: np.ndarray) -> bool:
        """Takes what it needs of a part; whether it is full now."""
        here, there = [], []
        for (start, stop), first, size in zip(
            self._bounds, offsets, part.shape, strict=True
        ):
            low, high = max(start, first), min(stop, first + size)
            if low >= high:
                return False
            here.append(slice(low - start, high - start))
            there.append(slice(low - first, high - first))
        if not self.value.size:  # Not before it is needed.
            shape = [stop - start for start, stop in self._bounds]
            self.value = np.empty(shape, self._dtype)
        taken = part[tuple(there)]
        self.value[tuple(here)] = taken
        self._num_left -= taken.size
        return self._num_left == 0
