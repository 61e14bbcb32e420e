"""Rows stay split inside a step, and outside of one nothing happens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.config import MeshConfig
from jaxft.parallel.activations import constrain_rows, gather_features, rows_on
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.sharding import batch_sharding

pytestmark = pytest.mark.device


def test_outside_a_step_it_is_the_identity() -> None:
    x = jnp.ones((8, 4))
    assert constrain_rows(x) is x
    assert gather_features(x) is x


def test_rows_are_split_like_the_batch() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rows = batch_sharding(mesh)

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        with rows_on(rows):
            return constrain_rows(2 * x)

    features = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    x = jax.device_put(np.ones((8, 4), np.float32), features)
    expected = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    assert double(x).sharding.is_equivalent_to(expected, 2)
    # Rows that cannot be divided, and scalars, are left as they are.
    odd = jax.device_put(np.ones((3, 4), np.float32), features)
    assert double(odd).sharding.is_equivalent_to(features, 2)
    assert double(jnp.float32(1)) == 2


def test_a_lookup_needs_whole_features_only() -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))

    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        with rows_on(batch_sharding(mesh)):
            return gather_features(x)

    split = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    table = jax.device_put(np.ones((16, 8), np.float32), split)
    expected = NamedSharding(mesh, PartitionSpec("tensor", None))
    assert whole(table).sharding.is_equivalent_to(expected, 2)


def test_the_context_ends() -> None:
    with pytest.raises(ValueError, match="stop"), rows_on(batch_sharding(make_mesh())):
        raise ValueError("stop")
    x = jnp.ones((8, 4))
    assert constrain_rows(x) is x
