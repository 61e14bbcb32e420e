"""How each leaf of a state is stored, and how it comes back as it was.

World: device. Floor: above `layout`, below `orbax_io`. Read
`jaxft/checkpoint/layout.py` before and `jaxft/checkpoint/orbax_io.py` after.

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

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxft import records
from jaxft.checkpoint import layout, run_record

PyTree = Any

# What zarr3 holds under the same name.
_PLAIN_DTYPE = re.compile(
    r"bool|int[24]|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)"
    r"|float4_e2m1fn|float8_(e3m4|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
# What it does not: integers by value, floats by their bits.
_BYTE_DTYPES = {
    "uint2": np.dtype(ml_dtypes.uint2),
    "uint4": np.dtype(ml_dtypes.uint4),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
}

_MAX_SHOWN = 20
_text = functools.cache(str)  # of a dtype


class TargetMismatchError(records.FaultError):
    """The target asks for another state than the stored one.

    Not a damaged checkpoint: the program has changed.

    Attributes:
        problems: one line a leaf.
    """

    def __init__(self, path: str, problems: list[str]):
        shown = problems[:_MAX_SHOWN]
        if len(problems) > _MAX_SHOWN:
            shown = [*shown, f"... and {len(problems) - _MAX_SHOWN} more"]
        text = "\n  ".join([f"the state in {path} does not fit the target:", *shown])
        super().__init__(records.Fault(kind=records.FaultKind.CONFIG, evidence=text))
        self.problems = problems


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
    return _walk_state(state, _encode_leaf)


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
    if not _PLAIN_DTYPE.fullmatch(dtype) and dtype not in _BYTE_DTYPES:
        raise layout.LeafError(f"leaf {name} has dtype {dtype}, which is not stored")


def _to_bytes(value: Any, dtype: str) -> Any:
    """The value in a dtype that the array format has."""
    if dtype not in _BYTE_DTYPES:
        return value
    if dtype.startswith("uint"):
        return value.astype(np.uint8)
    if isinstance(value, jax.Array):
        return jax.lax.bitcast_convert_type(value, jnp.uint8)
    return value.view(np.uint8)


def _from_bytes(value: Any, dtype: str) -> Any:
    """Undoes `_to_bytes`."""
    if dtype not in _BYTE_DTYPES:
        return value
    if dtype.startswith("uint"):
        return value.astype(_BYTE_DTYPES[dtype])
    if isinstance(value, jax.Array):
        return jax.lax.bitcast_convert_type(value, _BYTE_DTYPES[dtype])
    return value.view(_BYTE_DTYPES[dtype])


# --- restoring ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """How one leaf is to be read.

    Attributes:
        spec: what is stored.
        python: the Python type to read into, or None for an array.
        sharding: where a JAX array goes; None for NumPy and for uncommitted arrays.
        is_jax: whether a JAX array is wanted.
    """

    spec: run_record.LeafSpec
    python: type | None = None
    sharding: jax.sharding.Sharding | None = None
    is_jax: bool = False

    @property
    def stored_dtype(self) -> str:
        """Name of the dtype of the array on disk."""
        return "uint8" if self.spec.dtype in _BYTE_DTYPES else self.spec.dtype


def match(
    target: PyTree, specs: Mapping[str, run_record.LeafSpec], *, path: str
) -> dict[str, Request]:
    """Leaf path -> how to read it, in the order of the target's leaves.

    Args:
        target: the tree to come back. A leaf is a value of the stored type, or a
            `jax.ShapeDtypeStruct`. A JAX array comes back with the leaf's sharding,
            uncommitted where the leaf is. A struct without sharding is replicated
            over the mesh of the first leaf that has one; where none has, it comes
            back uncommitted on the default device.
        specs: the stored leaves.
        path: the step folder, for the error.

    Raises:
        TargetMismatchError: it lists every leaf that differs.
    """
    wanted = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(target)[0]:
        segments: tuple[str, ...] = ()
        for key in keys:
            segments = (*segments, _segment(key, segments))
        wanted["/".join(segments)] = leaf
    problems = [f"{name}: not in the checkpoint" for name in wanted.keys() - specs]
    problems += [f"{name}: not in the target" for name in specs.keys() - wanted]
    default = _default_sharding(target)
    requests = {}
    for name, leaf in wanted.items():
        if name not in specs:
            continue
        request = _request(leaf, specs[name], default)
        if isinstance(request, Request) and _is_too_wide(request):
            request = (
                f"stored {request.spec}: JAX holds no 64-bit values now; set "
                "jax_enable_x64 or ask for a NumPy array"
            )
        if isinstance(request, str):
            problems.append(f"{name}: {request}")
        else:
            requests[name] = request
    if problems:
        raise TargetMismatchError(path, sorted(problems))
    return requests


def _default_sharding(target: PyTree) -> jax.sharding.Sharding | None:
    for leaf in jax.tree.leaves(target):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec()
            )
    return None


_ARRAY_KINDS = (
    run_record.LeafKind.ARRAY,
    run_record.LeafKind.WEAK,
    run_record.LeafKind.NUMPY,
)


def _request(
    leaf: Any, spec: run_record.LeafSpec, default: jax.sharding.Sharding | None
) -> Request | str:
    """How to read one leaf, or what is wrong."""
    if isinstance(leaf, np.generic):
        want = run_record.LeafSpec(run_record.LeafKind.NUMPY_SCALAR, str(leaf.dtype))
        return Request(spec) if want == spec else f"stored {spec}, wanted {want}"
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        is_numpy = isinstance(leaf, np.ndarray)
        kind = spec.kind if spec.kind in _ARRAY_KINDS else run_record.LeafKind.ARRAY
        want = run_record.LeafSpec(kind, str(leaf.dtype), tuple(leaf.shape))
        if want != spec or (is_numpy and spec.dtype.startswith("key<")):
            return f"stored {spec}, wanted {want}"
        if is_numpy:
            return Request(spec)
        sharding = _sharding(leaf, default)
        if sharding is not None:
            try:
                sharding.shard_shape(spec.shape)
            except ValueError as error:
                return f"stored {spec} cannot be placed: {error}"
        return Request(spec, sharding=sharding, is_jax=True)
    want = type(leaf).__name__
    if spec.kind in run_record.PYTHON_KINDS and spec.kind == want:
        return Request(spec, python=type(leaf))
    if spec.kind is run_record.LeafKind.WEAK and spec.dtype.startswith(want):
        # A number that jit gave back as a weakly typed scalar, which acts like it: as
        # the step of a Flax TrainState, an int until the first update.
        return Request(spec, is_jax=True)
    return f"stored {spec}, wanted {want}"


def _is_too_wide(request: Request) -> bool:
    """Whether JAX would narrow the leaf to 32 bits, as it does until told not to."""
    if not request.is_jax or request.spec.dtype.startswith("key<"):
        return False
    dtype = jnp.dtype(request.spec.dtype)
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def _sharding(
    leaf: jax.Array | jax.ShapeDtypeStruct, default: jax.sharding.Sharding | None
) -> jax.sharding.Sharding | None:
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding or default


def decode(value: Any, request: Request, *, is_fresh: bool = False) -> Any:
    """The leaf as it was, from what Orbax read.

    Args:
        value: what was read.
        request: what for.
        is_fresh: the value is an array in its place that is nobody else's.

    Raises:
        ValueError: what was read has another type or shape than the record says.
    """
    spec = request.spec
    if request.python is not None:
        if type(value) is not request.python:
            raise ValueError(f"read a {type(value).__name__} where a {spec} was saved")
        return value
    if spec.is_empty:
        value = np.zeros(spec.shape, spec.dtype)
    else:
        value = _from_bytes(value, spec.dtype)
    if (str(value.dtype), tuple(value.shape)) != (spec.dtype, spec.shape):
        raise ValueError(
            f"read {value.dtype}{list(value.shape)} where a {spec} was saved"
        )
    if not request.is_jax:
        return value[()] if spec.kind is run_record.LeafKind.NUMPY_SCALAR else value
    if is_fresh and spec.dtype not in _BYTE_DTYPES:
        return value
    if spec.kind is run_record.LeafKind.WEAK:
        # A Python number is the only public source of weak types.
        value = jnp.asarray(np.asarray(value).item())
        return value if request.sharding is None else _put(value, request.sharding)
    if request.sharding is None:
        return _uncommitted(value)
    return _put(value, request.sharding)


def _uncommitted(value: Any) -> jax.Array:
    """A fresh array on the default device that goes wherever it is needed."""
    if is_key(value.dtype):
        data = jnp.array(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jnp.array(np.asarray(value))


def _put(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array in its place, in memory of its own.

    On CPU, JAX takes host memory over without a copy where its alignment allows, and
    such a buffer is never donated: a copy is as donatable as a fresh array.
    """
    if not isinstance(value, jax.Array) or value.sharding != sharding:
        value = jax.device_put(value, sharding)
    if next(iter(sharding.device_set)).platform != "cpu":
        return value
    return _copier(sharding)(value)


@functools.lru_cache(maxsize=1024)
def _copier(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(jnp.copy, out_shardings=sharding)
