"""How each leaf of a target is read, and how it becomes again what it was.

World: device. Floor: above `leaves`, below `orbax_io`. Read
`jaxft/checkpoint/leaves.py` before, which says how leaves are stored, and
`jaxft/checkpoint/orbax_io.py` after.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import records
from jaxft.checkpoint import leaves, run_record

PyTree = Any

_MAX_SHOWN = 20


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
        return "uint8" if self.spec.dtype in leaves.BYTE_DTYPES else self.spec.dtype


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
    wanted = {name: leaf for name, (_, leaf) in leaves.flatten(target).items()}
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
    if is_fresh and spec.dtype not in leaves.BYTE_DTYPES:
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
    if leaves.is_key(value.dtype):
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


def _from_bytes(value: Any, dtype: str) -> Any:
    """The value in the dtype that the array format lacks."""
    if dtype not in leaves.BYTE_DTYPES:
        return value
    if dtype.startswith("uint"):
        return value.astype(leaves.BYTE_DTYPES[dtype])
    if isinstance(value, jax.Array):
        return jax.lax.bitcast_convert_type(value, leaves.BYTE_DTYPES[dtype])
    return value.view(leaves.BYTE_DTYPES[dtype])
