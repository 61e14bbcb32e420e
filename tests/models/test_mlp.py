"""The small model: windows of tokens, features, remat, its config."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxft.config import Config, ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models import mlp
from jaxft.models.adapters import to_model

pytestmark = pytest.mark.device

ROOT = pathlib.Path(__file__).parents[2]


def _config(**options) -> ModelConfig:
    config = ModelConfig(width=8, num_layers=2, vocab_size=16)
    config.options.update(options)
    return config


def _model(config, plan="none", loss=mlp.softmax_loss):
    return to_model(
        mlp.make_model(config, RematConfig(plan=plan)), loss(LossConfig()), example={}
    )


def test_a_prediction_reads_its_window_and_nothing_later():
    net = mlp.make_model(_config(window=3), RematConfig())(nnx.Rngs(0))
    tokens = np.arange(10)[None] % 16
    base = net(jnp.asarray(tokens))
    changed = tokens.copy()
    changed[0, 4] = 15
    moved = np.any(np.asarray(net(jnp.asarray(changed)) != base), axis=-1)[0]
    assert moved.tolist() == [4 <= position < 7 for position in range(10)]


@pytest.mark.parametrize("plan", ["full", "0:names(hidden),1:none"])
def test_remat_keeps_gradients(plan):
    tokens = np.random.default_rng(0).integers(0, 16, (4, 9)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def grads(plan):
        model = _model(_config(), plan)
        params, extra = model.init(jax.random.key(0))
        loss = lambda params: model.loss(
            params, extra, batch, jax.random.key(0), train=True
        )[0]["loss"][0]
        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(np.testing.assert_array_equal, grads(plan), grads("none"))


def test_features_to_numbers():
    model = _model(_config(num_features=5, num_outputs=2), loss=mlp.squared_error)
    params, extra = model.init(jax.random.key(0))
    batch = {"inputs": np.ones((3, 5), np.float32), "targets": np.ones((3, 2), "f4")}
    sums, _ = model.loss(params, extra, batch, jax.random.key(0), train=True)
    assert float(sums["loss"][1]) == 3
    assert model.axes["hidden"][0] == {"kernel": ("embed", "mlp"), "bias": ("mlp",)}


@pytest.mark.parametrize(
    ("options", "path", "says"),
    [
        ({"windw": 3}, "model.options.windw", "num_features, num_outputs, window"),
        ({"window": 0}, "model.options.window", "must be a positive integer, is 0"),
        ({"num_features": 2.5}, "model.options.num_features", "is 2.5"),
    ],
)
def test_wrong_options_are_named(options, path, says):
    with pytest.raises(ConfigError) as caught:
        mlp.make_model(_config(**options), RematConfig())
    assert caught.value.path == path
    assert says in caught.value.problem


@pytest.mark.parametrize("factory", [mlp.softmax_loss, mlp.squared_error])
def test_losses_have_no_options(factory):
    config = LossConfig()
    config.options.smoothing = 0.1
    with pytest.raises(ConfigError, match=r"loss\.options\.smoothing"):
        factory(config)


def test_the_shipped_config_names_what_exists():
    path = ROOT / "configs" / "tiny_mlp.py"
    spec = importlib.util.spec_from_file_location("tiny_mlp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    assert isinstance(config, Config)
    made = mlp.make_model(config.model, config.remat)
    model = to_model(made, mlp.softmax_loss(config.loss), example={})
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert shapes.params["embedding"].shape == (256, config.model.width)
