"""Low-rank adapters: start as the model, train alone, lie as their matrices do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.config import ConfigError, MeshConfig, ModelConfig, RematConfig, TrainConfig
from jaxft.models import lora, transformer
from jaxft.models.adapters import from_nnx
from jaxft.parallel.mesh import make_mesh
from jaxft.patterns import Patterns
from jaxft.train.optimizer import train_only
from jaxft.train.step import make_train_step

pytestmark = pytest.mark.device
SIZES = {"width": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 16}


def _config(**options):
    return ModelConfig(**SIZES, options=options)


def _batch(step=0):
    tokens = np.random.default_rng(step).integers(0, 16, (8, 9), np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _train(mesh, *, num_steps=3):
    model = lora.make_model(_config(rank=2), RematConfig())
    optimizer = train_only(optax.adamw(1e-2, weight_decay=0.1), Patterns("lora/**"))
    step = make_train_step(model, optimizer, mesh=mesh, config=TrainConfig())
    state = first = step.init()
    first = jax.tree.map(np.asarray, first.params)
    for number in range(num_steps):
        state, output = step(state, _batch(number))
    return first, state, output


@pytest.mark.slow
def test_it_starts_as_the_model_itself():
    config = _config()
    adapted = lora.make_model(config, RematConfig())
    params = adapted.init(jax.random.key(0)).params
    plain = from_nnx(
        transformer.make_model(ModelConfig(**SIZES), RematConfig()),
        transformer.next_token_loss(lora.LossConfig()),
    )
    rng = jax.random.key(1)
    loss = adapted.loss(params, {}, _batch(), rng, train=True)[0]["loss"][0]
    same = plain.loss(params["base"], {}, _batch(), rng, train=True)[0]["loss"][0]
    assert float(loss) == float(same)
    assert set(params["lora"]) == {
        f"layers/mlp/{name}" for name in ("up", "gate", "down")
    }


def test_only_the_adapters_change_and_only_they_have_optimizer_state():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    first, state, output = _train(mesh)
    assert bool(output.finite)
    for old, new in zip(
        jax.tree.leaves(first["base"]),
        jax.tree.leaves(state.params["base"]),
        strict=True,
    ):
        np.testing.assert_array_equal(old, np.asarray(new))
    for path, pair in state.params["lora"].items():
        assert np.any(np.asarray(pair["b"])), path
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params["lora"]))


def test_an_adapter_lies_as_its_matrix_does():
    model = lora.make_model(_config(rank=2), RematConfig())
    axes = model.axes["lora"]["layers/mlp/up"]
    assert axes == {"a": ("layers", "embed", None), "b": ("layers", None, "mlp")}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rnak": 2}, r"config\.model\.options\.rnak: there are"),
        ({"rank": 0}, r"config\.model\.options\.rank: must be a positive"),
        ({"adapted": "no/such"}, r"config\.model\.options\.adapted: 'no/such' names"),
    ],
    ids=["misspelt", "no rank", "nothing"],
)
def test_wrong_options_are_named(options, where):
    with pytest.raises(ConfigError, match=where):
        lora.make_model(_config(**options), RematConfig()).init(jax.random.key(0))


def test_trainable_must_name_a_parameter():
    optimizer = train_only(optax.sgd(1.0), Patterns("adapters/**"))
    with pytest.raises(ConfigError, match=r"optimizer\.trainable: 'adapters/\*\*'"):
        optimizer.init({"w": jnp.ones(2)})
