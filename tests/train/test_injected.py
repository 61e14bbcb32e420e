"""What a device is made to do wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.faults.exceptions import fault_of
from jaxft.records import FaultKind
from jaxft.train.injected import exhaust_memory, flip_bit, with_poison

pytestmark = pytest.mark.device


def loss(params, extra, batch, rng, *, train):
    assert set(batch) == {"x"}
    errors = (batch["x"] @ params["w"]) ** 2
    return {"loss": (jnp.sum(errors), jnp.float32(len(errors)))}, extra


POISONED = with_poison(loss, loss_field="loss", gradient_field="gradient")
PARAMS = {"w": jnp.arange(1.0, 4.0)}
ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def value_and_gradient(function, **fields):
    batch = {"x": ROWS} | {n: jnp.full(5, v, jnp.float32) for n, v in fields.items()}

    def total(params):
        return function(params, {}, batch, None, train=True)[0]["loss"][0]

    return jax.value_and_grad(total)(PARAMS)


def test_a_factor_of_one_changes_no_bit():
    plain, gradient = value_and_gradient(loss)
    for fields in ({}, {"loss": 1.0, "gradient": 1.0}):
        value, other = value_and_gradient(POISONED, **fields)
        assert value == plain
        assert (other["w"] == gradient["w"]).all()


def test_loss_and_gradient_are_poisoned_apart():
    plain, gradient = value_and_gradient(loss)
    value, bad = value_and_gradient(POISONED, loss=1.0, gradient=np.nan)
    assert value == plain
    assert jnp.isnan(bad["w"]).all()
    value, bad = value_and_gradient(POISONED, loss=np.nan, gradient=np.nan)
    assert jnp.isnan(value)
    assert jnp.isnan(bad["w"]).all()
    value, bad = value_and_gradient(POISONED, loss=2.0, gradient=4.0)
    assert value == 2 * plain
    assert (bad["w"] == 4 * gradient["w"]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_bit_of_one_element(dtype):
    def bits(x):
        return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")

    state = {"ids": jnp.arange(4), "params": {"a": jnp.ones((2, 3), dtype)}}
    new, where = flip_bit(state, leaf="", seed="1")
    assert "params/a[" in where
    changed = bits(new["params"]["a"]) ^ bits(state["params"]["a"])
    assert bin(int(changed.sum())).count("1") == 1
    assert (changed != 0).sum() == 1
    assert jnp.isfinite(new["params"]["a"].astype(jnp.float32)).all()
    assert new["params"]["a"].sharding == state["params"]["a"].sharding
    assert flip_bit(state, leaf="", seed="1")[1] == where
    with pytest.raises(ValueError, match="no float leaf"):
        flip_bit(state, leaf="ids", seed="1")


def test_a_sharded_leaf_stays_so():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    state = {"params": jax.device_put(jnp.ones(8), sharding)}
    new, _ = flip_bit(state, leaf="params", seed="2")
    assert new["params"].sharding == sharding
    assert (np.asarray(new["params"]) != 1).sum() == 1


def test_memory_runs_out_for_real():
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as error:
        exhaust_memory()
    assert fault_of(error.value).kind is FaultKind.OUT_OF_MEMORY
