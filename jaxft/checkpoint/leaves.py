"""How each leaf of a state is stored.

World: device. Floor: above `layout`, below `leaf_requests`. Read
`jaxft/checkpoint/layout.py` before, and after it `jaxft/checkpoint/leaf_requests.py`,
the way back.

A state is stored as nested dicts and lists of what Orbax keeps bit for bit; beside
it the run record holds the same tree with the type of every leaf. What needs help:

* a leaf without elements is a type alone: nothing of it lies among the arrays;
* dtypes that the array format lacks are stored as unsigned bytes;
* a NumPy scalar is stored as a 0-d array;
* a weakly typed scalar comes back weakly typed, since what it is added to depends
  on it; weakly typed arrays of higher rank are refused.

Everything else, and every Python object that is no number and no text, is refused
with its path before anything is written.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxft.checkpoint import layout, run_record

PyTree = Any

# What zarr3 holds under the same name.
_PLAIN_DTYPE = re.compile(
    r"bool|int[24]|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)"
    r"|float4_e2m1fn|float8_(e3m4|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
# What it does not: integers by value, floats by their bits.
BYTE_DTYPES = {
    "uint2": np.dtype(ml_dtypes.uint2),
    "uint4": np.dtype(ml_dtypes.uint4),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
}

_text = functools.cache(str)  # of a dtype


@functools.cache
def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of typed random keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


# --- saving -------------------------------------------------------------------


def encode(state: PyTree) -> tuple[PyTree, Any]:
    """The tree that Orbax stores, and the tree of types for the run record.

    Args:
        state: any pytree of arrays, Python numbers and text below at least one key.

    Returns:
        Two trees of dicts (with text keys) and lists; containers of other kinds are
        dicts by attribute name. Arrays are the caller's own, not copies.

    Raises:
        LeafError: a leaf, or its path, cannot be stored; the text names it.
    """
    flat, treedef = jax.tree.flatten(state)
    if plan := _known_plan(flat, treedef):
        order, stored, types = plan
        return jax.tree.unflatten(stored, [flat[i] for i in order]), types
    return _walk_state(state, _encode_leaf)


def _known_plan(flat: list[Any], treedef: Any) -> Any:
    """See `_plan`; None where a leaf is to be looked at. The loop waits for this."""
    try:
        kinds = tuple(
            (x.dtype, x.shape, getattr(x, "weak_type", False))
            for x in flat
            if isinstance(x, jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and not x.is_deleted()
        )
        return _plan(treedef, kinds) if len(kinds) == len(flat) else None
    except TypeError:  # A node whose fixed part has no hash.
        return None


@functools.lru_cache(maxsize=8)
def _plan(treedef: Any, kinds: tuple[tuple[Any, tuple[int, ...], bool], ...]) -> Any:
    """What `encode` does with each state of JAX arrays of one kind.

    Returns:
        For each stored leaf its place among the state's, the structure of the stored
        tree, the types; None where one of them is not stored as it is.
    """
    places = iter(range(len(kinds)))
    specs = []

    def place(leaf: Any, path: tuple[str, ...]) -> tuple[int, str]:
        specs.append(_array_spec(leaf, "/".join(path)))
        return next(places), str(specs[-1])

    structs = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
        for dtype, shape, weak in kinds
    ]
    stored, types = _walk_state(jax.tree.unflatten(treedef, structs), place)
    if any(spec.is_empty or spec.dtype in BYTE_DTYPES for spec in specs):
        return None
    order, structure = jax.tree.flatten(stored)
    return order, structure, types


def check(target: PyTree) -> None:
    """Refuses what `encode` will refuse of a state like this one.

    Args:
        target: the state, as values or `jax.ShapeDtypeStruct`.

    Raises:
        LeafError: see `encode`.
    """

    def type_of(leaf: Any, path: tuple[str, ...]) -> tuple[Any, str]:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return None, str(_array_spec(leaf, "/".join(path)))
        return _encode_leaf(leaf, path)

    _walk_state(target, type_of)


def flatten(tree: PyTree) -> dict[str, tuple[str, Any]]:
    """Leaf path -> (the name it is stored under, the leaf itself), in tree order."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        segments: tuple[str, ...] = ()
        for key in keys:
            segments = (*segments, _segment(key, segments))
        found["/".join(segments)] = (".".join(segments), leaf)
    return found


def count_bytes(target: PyTree) -> int:
    """Bytes of all arrays of a state, given as values or `jax.ShapeDtypeStruct`."""
    total = 0
    for leaf in jax.tree.leaves(target):
        if hasattr(leaf, "dtype"):
            total += math.prod(leaf.shape) * leaf.dtype.itemsize
    return total


def _walk_state(
    state: PyTree, encode_leaf: Callable[[Any, tuple[str, ...]], tuple[Any, str]]
) -> tuple[PyTree, Any]:
    """The two trees of `encode`, of what `encode_leaf(leaf, path)` gives."""
    paths: list[tuple[str, ...]] = []

    def walk(node: Any, path: tuple[str, ...]) -> tuple[Any, Any]:
        children = _children(node)
        if children is None:
            if not path:
                raise layout.LeafError("the state is a single leaf: put it in a dict")
            paths.append(path)
            return encode_leaf(node, path)
        if node is None:
            return None, None
        pairs = {}
        for key, child in children:
            segment = _segment(key, path)
            if segment in pairs:
                raise layout.LeafError(
                    f"two keys below {list(path)} are stored as {segment!r}"
                )
            pairs[segment] = walk(child, (*path, segment))
        if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
            stored, types = zip(*pairs.values(), strict=True) if pairs else ((), ())
            return list(stored), list(types)
        return (
            {segment: stored for segment, (stored, _) in pairs.items()},
            {segment: types for segment, (_, types) in pairs.items()},
        )

    stored, types = walk(state, ())
    if not paths:
        raise layout.LeafError("the state has no leaf: there is nothing to save")
    layout.leaf_names(paths)
    return stored, types


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) pairs of a container; None for a leaf, of an array at once."""
    if isinstance(node, jax.Array):
        return None
    is_child = lambda other: other is not node
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_child)
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(path[0], child) for path, child in flat]


def _segment(key: Any, path: tuple[str, ...]) -> str:
    """One step of a leaf path as text."""
    match key:
        case jax.tree_util.SequenceKey(idx=name):
            return str(name)
        case jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case (
            jax.tree_util.DictKey(key=name) | jax.tree_util.FlattenedIndexKey(key=name)
        ):
            if type(name) in (str, int):
                return str(name)
            raise layout.LeafError(
                f"the key {name!r} below {list(path)} is a {type(name).__name__}: "
                "keys are text or int"
            )
    return str(key)


def _encode_leaf(value: Any, path: tuple[str, ...]) -> tuple[Any, str]:
    """What is stored for one leaf, and its type as text."""
    name = "/".join(path)
    if isinstance(value, jax.core.Tracer):
        raise layout.LeafError(f"leaf {name} is traced: save outside of jit")
    if isinstance(value, jax.Array):
        return _encode_array(value, name)
    if isinstance(value, np.generic):
        spec = _numpy_spec(np.asarray(value), name, run_record.LeafKind.NUMPY_SCALAR)
        return _to_bytes(np.asarray(value), spec.dtype), str(spec)
    if type(value) is np.ndarray:
        spec = _numpy_spec(value, name, run_record.LeafKind.NUMPY)
        return None if spec.is_empty else _to_bytes(value, spec.dtype), str(spec)
    if type(value) in (bool, float):
        return value, str(
            run_record.LeafSpec(run_record.LeafKind(type(value).__name__))
        )
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise layout.LeafError(f"leaf {name} is an int of more than 64 bits")
        return value, str(run_record.LeafSpec(run_record.LeafKind.INT))
    if type(value) is str:
        # Orbax keeps text under a JSON pointer made of the name.
        if "~" in name or any("/" in segment for segment in path):
            raise layout.LeafError(f"leaf {name} is text below a key with '/' or '~'")
        if not value.isascii() and value != value.encode(errors="replace").decode():
            raise layout.LeafError(f"leaf {name} is text that is not UTF-8")
        return value, str(run_record.LeafSpec(run_record.LeafKind.TEXT))
    raise layout.LeafError(
        f"leaf {name} is a {type(value).__module__}.{type(value).__qualname__}: "
        "only arrays, int, float, bool, str and None are stored"
    )


def _encode_array(value: jax.Array, name: str) -> tuple[Any, str]:
    if value.is_deleted():
        text = f"leaf {name} is deleted: it was donated before the save"
        raise layout.LeafError(text)
    spec = _array_spec(value, name)
    return None if spec.is_empty else _to_bytes(value, spec.dtype), str(spec)


def _array_spec(
    value: jax.Array | jax.ShapeDtypeStruct, name: str
) -> run_record.LeafSpec:
    """Type and shape of a JAX array that can be stored."""
    is_weak = getattr(value, "weak_type", False)  # which typed keys do not have
    if is_weak and (value.ndim or value.dtype not in _weak_dtypes()):
        raise layout.LeafError(
            f"leaf {name} is weakly typed: give it a dtype, "
            "e.g. jnp.asarray(x, x.dtype)"
        )
    kind = run_record.LeafKind.WEAK if is_weak else run_record.LeafKind.ARRAY
    spec = run_record.LeafSpec(kind, _text(value.dtype), value.shape)
    if not is_key(value.dtype):
        _check_dtype(spec.dtype, name)
    elif spec.is_empty:
        raise layout.LeafError(f"leaf {name} is an array of no random keys")
    return spec


def _weak_dtypes() -> set[Any]:
    """Dtypes of the weakly typed scalars that Python numbers become."""
    return {jnp.asarray(number).dtype for number in (0, 0.0, 0j)}


def _numpy_spec(
    value: np.ndarray, name: str, kind: run_record.LeafKind
) -> run_record.LeafSpec:
    if not value.dtype.isnative:
        raise layout.LeafError(f"leaf {name} is not in this machine's byte order")
    _check_dtype(str(value.dtype), name)
    return run_record.LeafSpec(kind, str(value.dtype), value.shape)


def _check_dtype(dtype: str, name: str) -> None:
    if not _PLAIN_DTYPE.fullmatch(dtype) and dtype not in BYTE_DTYPES:
        raise layout.LeafError(f"leaf {name} has dtype {dtype}, which is not stored")


def _to_bytes(value: Any, dtype: str) -> Any:
    """The value in a dtype that the array format has."""
    if dtype not in BYTE_DTYPES:
        return value
    if dtype.startswith("uint"):
        return value.astype(np.uint8)
    if isinstance(value, jax.Array):
        return jax.lax.bitcast_convert_type(value, jnp.uint8)
    return value.view(np.uint8)
