"""Compares two steps leaf by leaf.

World: host-only. Floor: above `contents`, beside `verify`. Read
`jaxft/checkpoint/contents.py` before.

Leaves with the same type and fingerprint are equal and are not read. The others are,
in parts: how many elements differ in any bit, and by how much at most.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Iterator

import numpy as np

from jaxft.checkpoint import array_store
from jaxft.checkpoint.contents import Contents, Leaf
from jaxft.patterns import Patterns

MEMORY_BYTES = 2**27


class Change(enum.StrEnum):
    """How a leaf of one step stands to that of another."""

    EQUAL = "equal"
    VALUES = "values"
    TYPE = "type"
    ONLY_A = "only_a"
    ONLY_B = "only_b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDiff:
    """What differs in one leaf.

    Attributes:
        path: of the leaf.
        change: in one word.
        type_a: dtype and shape in the first step; empty where it is not there.
        type_b: in the second.
        num_elements: of the leaf, where the shapes are the same.
        num_different: of them, those that differ in any bit.
        max_abs: the largest absolute difference; infinite where a number stands
            against one that is not finite, or two of those against each other.
        max_rel: the largest difference relative to the larger of the two.
    """

    path: str
    change: Change
    type_a: str = ""
    type_b: str = ""
    num_elements: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0


def diff(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    *,
    paths: str = "**",
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[LeafDiff]:
    """Every leaf of two checkpoints, in the order of the first one's tree.

    Args:
        path_a: the folder of a step, or an item folder of any Orbax checkpoint.
        path_b: another one.
        paths: globs of the leaves to look at, see `jaxft/patterns.py`.
        memory_bytes: for what is read, at a time.

    Raises:
        ArrayError: an array is missing or damaged.
        RecordError: a run record is damaged.
        FaultError: kind CONFIG: a newer jaxft wrote one of them.
        OSError: something cannot be read.
    """
    select = Patterns(paths).match
    a, b = Contents(path_a), Contents(path_b)
    for path, leaf in a.leaves.items():
        if not select(path):
            continue
        if (other := b.leaves.get(path)) is None:
            yield LeafDiff(path=path, change=Change.ONLY_A, type_a=leaf.type_text)
        else:
            yield _compare(a, b, leaf, other, memory_bytes=memory_bytes)
    for path, leaf in b.leaves.items():
        if path not in a.leaves and select(path):
            yield LeafDiff(path=path, change=Change.ONLY_B, type_b=leaf.type_text)


def _compare(
    a: Contents, b: Contents, leaf_a: Leaf, leaf_b: Leaf, *, memory_bytes: int
) -> LeafDiff:
    path = leaf_a.path
    same_type = leaf_a.type_text == leaf_b.type_text
    found = LeafDiff(
        path=path,
        change=Change.EQUAL if same_type else Change.TYPE,
        type_a=leaf_a.type_text,
        type_b=leaf_b.type_text,
    )
    if not leaf_a.dtype or not leaf_b.dtype:  # Text has no dtype.
        if same_type and a.texts.get(path) != b.texts.get(path):
            return dataclasses.replace(found, change=Change.VALUES, num_different=1)
        return found
    if leaf_a.shape != leaf_b.shape:
        return found
    found = dataclasses.replace(found, num_elements=math.prod(leaf_a.shape))
    if 0 in leaf_a.shape or (same_type and _is_proven_equal(leaf_a, leaf_b)):
        return found
    if a.value_type(path)[1] != b.value_type(path)[1]:
        return found  # Random keys of different implementations.
    found = _measure(a, b, found, memory_bytes=memory_bytes)
    if same_type and found.num_different:
        return dataclasses.replace(found, change=Change.VALUES)
    return found


def _is_proven_equal(a: Leaf, b: Leaf) -> bool:
    if a.entry is None or b.entry is None:
        return False
    return a.entry.fingerprint == b.entry.fingerprint


def _measure(
    a: Contents, b: Contents, found: LeafDiff, *, memory_bytes: int
) -> LeafDiff:
    """The differences of two arrays of one shape, in bounded parts."""
    path = found.path
    (dtype_a, shape), (dtype_b, _) = a.value_type(path), b.value_type(path)
    chunk = a.store.spec(a.leaves[path].name).read_shape
    # Both parts, and four times as much for wide copies of them.
    widest = 16 * 4 + dtype_a.itemsize + dtype_b.itemsize
    num_elements = max(1, memory_bytes // widest)
    num_different, max_abs, max_rel = 0, 0.0, 0.0
    for offsets, size in array_store.plan_boxes(
        shape, step=chunk, num_elements=num_elements
    ):
        part_a = a.read_box(path, offsets, shape=size)
        part_b = b.read_box(path, offsets, shape=size)
        count, largest, relative = _differ(part_a, part_b)
        num_different += count
        max_abs, max_rel = max(max_abs, largest), max(max_rel, relative)
    return dataclasses.replace(
        found, num_different=num_different, max_abs=max_abs, max_rel=max_rel
    )


def _differ(a: np.ndarray, b: np.ndarray) -> tuple[int, float, float]:
    """Elements that differ in any bit, and the largest differences among them."""
    if a.dtype == b.dtype:
        width = a.dtype.itemsize
        bits_a = np.ascontiguousarray(a).reshape(-1, 1).view(np.uint8)
        bits_b = np.ascontiguousarray(b).reshape(-1, 1).view(np.uint8)
        differs = (bits_a.reshape(-1, width) != bits_b.reshape(-1, width)).any(axis=1)
    else:
        differs = _wide(a).reshape(-1) != _wide(b).reshape(-1)
    num_different = int(differs.sum())
    if not num_different:
        return 0, 0.0, 0.0
    wide_a, wide_b = _wide(a.reshape(-1)[differs]), _wide(b.reshape(-1)[differs])
    with np.errstate(all="ignore"):
        distance = np.abs(wide_a - wide_b).astype(np.float64)
        scale = np.maximum(np.abs(wide_a), np.abs(wide_b)).astype(np.float64)
        relative = np.where(scale == 0, 0.0, distance / scale)
    distance[~np.isfinite(distance)] = np.inf
    relative[~np.isfinite(relative)] = np.inf
    return num_different, float(distance.max()), float(relative.max())


def _wide(value: np.ndarray) -> np.ndarray:
    """The values in a type that holds their differences."""
    if value.dtype.kind == "c":
        return value.astype(np.complex128)
    if value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        return value.astype(np.longdouble)
    return value.astype(np.float64)
