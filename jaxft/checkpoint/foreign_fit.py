"""Holds the leaves of any checkpoint against a target: names, types and shapes.

World: device. Floor: above `foreign_source` and `leaves`, below `foreign`. Read
`jaxft/checkpoint/foreign.py` next.

No value is read: what does not fit is found before anything is loaded, all of it at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxft import patterns
from jaxft.checkpoint import contents, foreign_source, leaf_requests, leaves, run_record

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What may be different; see `foreign.load`."""

    optional: str
    allow_cast: str
    strict: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differences:
    """What does not fit, and is not allowed: leaf path -> in words.

    Attributes:
        missing: the target wants it, and it is not stored.
        valueless: nor has the target a value to keep, which would be allowed.
        unexpected: it is stored, and the target lacks it.
        casts: only the permission for another dtype is missing.
        others: another kind of value or another shape.
    """

    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    valueless: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: dict[str, str] = dataclasses.field(default_factory=dict)
    casts: dict[str, str] = dataclasses.field(default_factory=dict)
    others: dict[str, str] = dataclasses.field(default_factory=dict)

    def problems(self) -> list[str]:
        """All of them, a line a leaf, sorted."""
        return sorted(
            f"{name}: {text}"
            for field in dataclasses.fields(self)
            for name, text in getattr(self, field.name).items()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the leaves of a target are read; see `foreign.Loaded`.

    Attributes:
        missing: target paths that are not stored.
        unexpected: names of stored leaves that the target lacks.
        cast: target path -> (stored dtype, wanted dtype).
        requests: target path -> how it is read; of no use where something differs.
        differences: what stands against it.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: Mapping[str, tuple[str, str]]
    requests: Mapping[str, leaf_requests.Request]
    differences: Differences


def by_path(target: PyTree) -> dict[str, Any]:
    """Leaf path -> leaf, in tree order."""
    return {name: leaf for name, (_, leaf) in leaves.flatten(target).items()}


def compare(
    source: foreign_source.ForeignSource,
    names: Mapping[str, str],
    wanted: Mapping[str, Any],
    *,
    options: Options,
) -> Comparison:
    """How each leaf is read, and all that stands against it.

    Args:
        source: the checkpoint.
        names: path in the target -> stored path.
        wanted: path in the target -> leaf.
        options: what may be different.

    Raises:
        FaultError: kind NO_CHECKPOINT: what describes a leaf is damaged.
        OSError: it cannot be read.
    """
    found = Differences()
    missing = tuple(name for name in wanted if name not in names)
    optional = patterns.Patterns(options.optional)
    for name in missing:
        if options.strict and not optional.match(name):
            found.missing[name] = "not in the checkpoint, and not optional"
        elif isinstance(wanted[name], jax.ShapeDtypeStruct):
            found.valueless[name] = "not in the checkpoint, and has no value to keep"
    unexpected = tuple(name for name in names if name not in wanted)
    if options.strict:
        found.unexpected.update(dict.fromkeys(unexpected, "not in the target"))
    specs, cast = {}, {}
    allowed = patterns.Patterns(options.allow_cast)
    for name in [name for name in wanted if name in names]:
        stored = _spec_of(source, names[name])
        specs[name] = _spec_as(wanted[name], stored)
        pair = _dtype_of(stored), _dtype_of(specs[name])
        if pair[0] == pair[1]:
            continue
        # A Python number holds whatever number of its kind is stored.
        is_python = specs[name].kind in run_record.PYTHON_KINDS
        if not is_python:
            cast[name] = pair
        text = f"stored {stored}, wanted {pair[1]}"
        if not _is_same_kind(*pair):
            found.others[name] = f"{text}: that is another kind of value"
        elif not is_python and not allowed.match(name):
            found.casts[name] = f"{text}: allow the cast by name"
    requests = _match(wanted, specs, found=found, path=source.path)
    return Comparison(
        missing=missing,
        unexpected=unexpected,
        cast=cast,
        requests=requests,
        differences=found,
    )


def _match(
    wanted: Mapping[str, Any],
    specs: Mapping[str, run_record.LeafSpec],
    *,
    found: Differences,
    path: str,
) -> Mapping[str, leaf_requests.Request]:
    """How each leaf is read; what does not fit is added to what was found."""
    try:
        # Flat: a path is one key there. The whole target decides where things go.
        return leaf_requests.match(
            {name: wanted[name] for name in specs}, specs, path=path
        )
    except leaf_requests.TargetMismatchError as error:
        for name, _, text in (problem.partition(": ") for problem in error.problems):
            if name not in found.casts:
                found.others.setdefault(name, text)
        return {}


def _spec_of(source: foreign_source.ForeignSource, path: str) -> run_record.LeafSpec:
    """Type of a stored leaf; of typed keys that of the keys, not of their data."""
    spec = source.spec(path)
    if impl := source.key_impl(path):
        data = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        keys = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=impl), data)
        return run_record.LeafSpec(spec.kind, str(keys.dtype), keys.shape)
    return spec


def _spec_as(leaf: Any, stored: run_record.LeafSpec) -> run_record.LeafSpec:
    """The stored leaf as one of the target's kind and dtype, where it can be one."""
    kinds = run_record.LeafKind
    if stored.kind is kinds.TEXT:
        return stored
    if type(leaf) in (bool, int, float) and not stored.shape:
        return run_record.LeafSpec(kinds(type(leaf).__name__))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        kind = kinds.WEAK if getattr(leaf, "weak_type", False) else kinds.ARRAY
    elif isinstance(leaf, np.generic):
        kind = kinds.NUMPY_SCALAR
    elif isinstance(leaf, np.ndarray):
        kind = kinds.NUMPY
    else:
        return stored
    return run_record.LeafSpec(kind, str(leaf.dtype), stored.shape)


def _dtype_of(spec: run_record.LeafSpec) -> str:
    """Name of the dtype that a leaf has as an array."""
    return contents.PYTHON_DTYPES.get(spec.kind) or spec.dtype or str(spec.kind)


def _is_same_kind(old: str, new: str) -> bool:
    """Whether one dtype may become the other, if somebody allows it."""
    kinds = (np.floating, np.integer, np.complexfloating)
    return any(is_kind(old, kind) and is_kind(new, kind) for kind in kinds)


def is_kind(dtype: str, kind: Any) -> bool:
    """Whether a dtype is e.g. one of `np.integer`; typed keys are none."""
    try:
        return jax.numpy.issubdtype(np.dtype(dtype), kind)
    except TypeError:
        return False
