"""Estimates from tracing alone: bytes by hand, order, like layers once, any model."""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxft import remat
from jaxft.config import ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models import transformer
from jaxft.models.adapters import to_model
from jaxft.remat.estimate import record_layers
from jaxft.remat.layers import apply_layers, scan_layers
from jaxft.remat.policies import parse_plan

B, D, F = 8, 16, 64
X = jax.ShapeDtypeStruct((B, D), jnp.float32)
LAYER = {
    "a": jax.ShapeDtypeStruct((D, F), jnp.float32),
    "b": jax.ShapeDtypeStruct((F, D), jnp.float32),
}


def layer_fn(x, layer):
    hidden = checkpoint_name(x @ layer["a"], "up")
    return x + jnp.sin(hidden) @ layer["b"], None


def _stacked(num_layers):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype), LAYER
    )


def _record(fn, *args, **options):
    with record_layers(**options) as recorder:
        jax.eval_shape(lambda *given: fn(*given), *args)  # Traced anew each time.
    return recorder.layers()


def _scan(x, stack):
    plan = parse_plan("none", jax.tree.leaves(stack)[0].shape[0])
    return scan_layers(layer_fn, x, stack=stack, plan=plan)[0]


def test_bytes_and_flops_are_those_by_hand():
    layers = _record(_scan, X, _stacked(3))
    assert layers.scanned
    assert layers.alike
    assert len(layers.options) == 3
    by_policy = {option.policy: option for option in layers.options[0]}
    carry, hidden, product = B * D * 4, B * F * 4, 2 * B * D * F
    assert by_policy["full"].kept_bytes == carry
    # The second product's result is read by nothing: it is not made again.
    assert by_policy["full"].recomputed_flops == pytest.approx(product, rel=0.15)
    assert by_policy["names(up)"].kept_bytes == carry + hidden
    assert by_policy["names(up)"].recomputed_flops < 0.1 * product
    assert by_policy["offload(up)"].kept_bytes == carry
    assert by_policy["offload(up)"].host_bytes == hidden
    # The input, the sine and the cosine of the hidden features.
    assert by_policy["none"].kept_bytes == carry + 2 * hidden
    assert by_policy["none"].recomputed_flops == 0
    assert layers.forward_flops[0] == pytest.approx(2 * product, rel=0.05)


def test_no_offload_where_host_memory_is_no_other_memory():
    layers = _record(_scan, X, _stacked(3), offload=False)
    assert not any("offload" in option.policy for option in layers.options[0])


def test_a_loop_says_the_same_as_a_scan():
    def loop(x, layers):
        plan = parse_plan("none", len(layers))
        return apply_layers(layer_fn, x, layers=layers, plan=plan)[0]

    looped = _record(loop, X, [LAYER] * 3)
    assert not looped.scanned
    assert looped.options == _record(_scan, X, _stacked(3)).options


def test_what_is_the_same_for_all_layers_and_what_nobody_reads_is_not_kept():
    def masked(x, layer):
        mask = jnp.tril(jnp.ones((B, D), bool))
        return jnp.where(mask, x @ layer["a"] @ layer["b"], 0.0), None

    def scan(x, stack):
        plan = parse_plan("none", 2)
        return scan_layers(masked, x, stack=stack, plan=plan)[0]

    layers = _record(scan, X, _stacked(2))
    (none,) = (o for o in layers.options[0] if o.policy == "none")
    assert none.kept_bytes == B * D * 4 + B * F * 4


def test_a_hundred_layers_are_traced_once():
    calls = []

    def counted(x, layer):
        calls.append(1)
        return layer_fn(x, layer)

    def loop(x, layers):
        plan = parse_plan("none", len(layers))
        return apply_layers(counted, x, layers=layers, plan=plan)[0]

    started = time.monotonic()
    layers = _record(loop, X, [LAYER] * 100)
    assert len(layers.options) == 100
    # Once for the estimate, and a hundred times by the model's own trace.
    assert len(calls) == 101
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("scan", [True, False])
def test_the_shipped_model_tells_of_its_layers(scan):
    config = ModelConfig(width=32, num_layers=3, num_heads=2, scan_layers=scan)
    config.num_kv_heads, config.mlp_width = 2, 64
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    loss = transformer.next_token_loss(LossConfig())
    model = to_model(transformer.make_model(config, RematConfig()), loss, example=batch)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    layers = _record(
        lambda p, e, b, k: model.loss(p, e, b, k, train=True)[1],
        variables.params,
        variables.extra,
        batch,
        jax.random.key(0),
    )
    assert (len(layers.options), layers.scanned) == (3, scan)
    kept = {o.policy: o.kept_bytes for o in layers.options[0]}
    assert kept["full"] < kept["names(attn)"] < kept["names(attn,up)"] < kept["none"]
    flops = {o.policy: o.recomputed_flops for o in layers.options[0]}
    assert flops["full"] > flops["names(attn)"] > flops["names(attn,up)"] > 0
    marked = ",".join(sorted(transformer.CHECKPOINT_NAMES))
    assert f"names({marked})" in kept


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(D)(jnp.sin(checkpoint_name(nn.Dense(F)(x), "up")))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        return x + self.b(jnp.sin(checkpoint_name(self.a(x), "up")))


def _linen():
    block, x = LinenBlock(), jnp.ones((B, D))
    return (lambda variables, x: block.apply(variables, x)), block.init(
        jax.random.key(0), x
    )


def _nnx():
    return (lambda block, x: block(x)), NnxBlock(nnx.Rngs(0))


def _plain():
    keys = jax.random.split(jax.random.key(0))
    shapes = {"a": (D, F), "b": (F, D)}
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return (lambda layer, x: layer_fn(x, layer)[0]), params


@pytest.mark.parametrize("make", [_linen, _nnx, _plain])
@pytest.mark.parametrize(
    "plan", ["full", "dots", "0:names(up),1-2:full", "offload(up)"]
)
def test_wrap_serves_any_model_and_changes_no_gradient(make, plan):
    fn, parameters = make()
    x = jnp.linspace(0.0, 1.0, B * D).reshape(B, D)

    def loss(parameters, plan):
        y = x
        for i in range(2):
            y = remat.wrap(fn, layer=i, plan=plan)(parameters, y)
        return jnp.sum(jnp.square(y))

    grads = [
        jax.jit(jax.grad(lambda p, plan=plan: loss(p, plan)))(parameters)
        for plan in (plan, "none")
    ]
    for got, wanted in zip(*map(jax.tree.leaves, grads), strict=True):
        assert (got == wanted).all()
    layers = _record(lambda p: loss(p, plan), parameters)
    assert len(layers.options) == 2
    (full,) = (o for o in layers.options[0] if o.policy == "full")
    assert full.kept_bytes == B * D * 4
    assert any(o.policy == "names(up)" for o in layers.options[0])


def test_wrap_refuses_what_no_plan_says():
    with pytest.raises(ConfigError, match="no policy for layer 4"):
        remat.wrap(layer_fn, layer=4, plan="0-3:full")
    with pytest.raises(ConfigError, match="unknown policy"):
        remat.wrap(layer_fn, layer=0, plan="ful")
