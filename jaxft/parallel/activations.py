"""Keeps activations split by rows, whatever the parameters are split by.

World: device, traced. Floor: below the eight rooms. Used by models and the step.

Left alone, the compiler may let the shards of a parameter decide: with an embedding
table split over its features it computes the whole batch on every device, which is
correct, slow and large. One constraint at the border of each layer settles it.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec

_rows: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar(
    "rows", default=None
)


@contextlib.contextmanager
def rows_on(sharding: NamedSharding | None) -> Iterator[None]:
    """While a step is traced: how dim 0 of a batch is sharded."""
    token = _rows.set(sharding)
    try:
        yield
    finally:
        _rows.reset(token)


def constrain_rows(x: jax.Array) -> jax.Array:
    """`x` with dim 0 sharded like the batch and its other dims whole.

    Put it at the borders of a model's layers. Outside a sharded step, and where the
    rows cannot be divided, it is the identity.
    """
    sharding = _rows.get()
    if sharding is None or x.ndim == 0:
        return x
    axes = sharding.spec[0] if len(sharding.spec) else None
    if axes is None:
        return x
    names = (axes,) if isinstance(axes, str) else axes
    if x.shape[0] % math.prod(sharding.mesh.shape[name] for name in names):
        return x
    spec = PartitionSpec(axes, *(None,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))


def gather_features(table: jax.Array) -> jax.Array:
    """A table `[V, D]` with its features whole on each device, for a lookup.

    Rows of `V` may stay split. Looked up as it lies, a table split over `D` gives
    activations split over `D`, which the compiler can only mend by way of the whole.
    """
    sharding = _rows.get()
    if sharding is None:
        return table
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, None)
    return jax.lax.with_sharding_constraint(table, NamedSharding(sharding.mesh, spec))
