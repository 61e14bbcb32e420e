"""What a precision policy casts, and what it must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.config import ConfigError, PrecisionConfig
from jaxft.parallel.precision import make_precision

pytestmark = pytest.mark.device


def test_names_become_dtypes():
    precision = make_precision(
        PrecisionConfig(compute_dtype="bfloat16", param_dtype="bfloat16")
    )
    assert precision.param_dtype == jnp.bfloat16
    assert precision.compute_dtype == jnp.bfloat16
    assert precision.accum_dtype == jnp.float32


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "accum_dtype"])
@pytest.mark.parametrize("name", ["int32", "float", "float8_e4m3fn", "", "bf16"])
def test_other_dtypes_are_refused(field, name):
    with pytest.raises(ConfigError, match="is not one of float64") as caught:
        make_precision(PrecisionConfig(**{field: name}))
    assert caught.value.path == f"precision.{field}"


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "accum_dtype"])
def test_float16_is_refused_with_the_reason_and_what_to_use(field):
    with pytest.raises(ConfigError, match=r"overflow; use bfloat16$") as caught:
        make_precision(PrecisionConfig(**{field: "float16"}))
    assert caught.value.path == f"precision.{field}"


def test_float64_needs_64_bit_mode():
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64"):
        make_precision(PrecisionConfig(param_dtype="float64"))


def test_only_wide_floats_are_cast():
    precision = make_precision(PrecisionConfig(compute_dtype="bfloat16"))
    tree = {
        "float32": jnp.ones((2, 3)),
        "float16": jnp.ones(3, jnp.float16),
        "numpy": np.ones(3, np.float32),
        "int": jnp.arange(3),
        "bool": jnp.array(True),
        "key": jax.random.key(0),
        "complex": jnp.ones(2, jnp.complex64),
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "none": None,
        "python": 1.5,
    }
    cast = precision.cast_compute(tree)
    for name in ("float32", "float16", "numpy"):
        assert cast[name].dtype == jnp.bfloat16, name
        assert cast[name].shape == tree[name].shape
    for name in ("int", "bool", "key", "complex", "float8", "none", "python"):
        assert cast[name] is tree[name], name
    back = precision.cast_params(cast)
    assert back["float32"].dtype == back["float16"].dtype == jnp.float32


def test_casts_are_differentiable_and_traceable():
    precision = make_precision(PrecisionConfig(compute_dtype="bfloat16"))

    def loss(params):
        return (precision.cast_compute(params)["w"] ** 2).sum().astype(jnp.float32)

    grads = jax.jit(jax.grad(loss))({"w": jnp.array([1.0, 2.0])})
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], [2.0, 4.0])
