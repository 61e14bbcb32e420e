"""Layers of anybody's model under a plan: the same bits, less kept, each policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

from jaxft import remat
from jaxft.config import ConfigError
from jaxft.remat.policies import parse_plan

NUM_LAYERS, WIDTH = 4, 16
PLANS = [
    "none",
    "dots",
    "dots_no_batch",
    "names(wide)",
    "offload(wide)",
    "full",
    "0-1:full,2:names(wide),3:dots",
]
KINDS = ["plain", "linen", "nnx"]


def layer(params, x):
    up, down = params
    wide = checkpoint_name(jnp.sin(x @ up), "wide")
    return x + jnp.cos(wide) @ down


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x):
        wide = linen.Dense(4 * WIDTH, use_bias=False)(x)
        return x + linen.Dense(WIDTH, use_bias=False)(
            jnp.cos(checkpoint_name(jnp.sin(wide), "wide"))
        )


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.down(jnp.cos(checkpoint_name(jnp.sin(self.up(x)), "wide")))


def rows():
    return jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)), jnp.float32)


def plain_case(plan):
    draw = np.random.default_rng(1).normal
    params = [
        tuple(
            jnp.asarray(draw(size=shape, scale=0.2), jnp.float32)
            for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )
        for _ in range(NUM_LAYERS)
    ]

    def loss(params):
        x = rows()
        for i, one in enumerate(params):
            x = remat.wrap(layer, layer=i, plan=plan)(one, x)
        return jnp.sum(x * x)

    return loss, params


def linen_case(plan):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(NUM_LAYERS):
                x = remat.wrap(LinenLayer, layer=i, plan=plan)(name=f"layer_{i}")(x)
            return x

    params = Net().init(jax.random.key(0), rows())
    return lambda params: jnp.sum(Net().apply(params, rows()) ** 2), params


def nnx_case(plan):
    rngs = nnx.Rngs(0)
    graph, params, stats = nnx.split(
        nnx.List([NnxLayer(rngs) for _ in range(NUM_LAYERS)]), nnx.Param, ...
    )

    def loss(params):
        layers, x = nnx.merge(graph, params, stats, copy=True), rows()
        for i, one in enumerate(layers):
            run = remat.wrap(lambda one, x: one(x), layer=i, plan=plan)
            x = run(one, x)
        # What a layer changes of itself comes out of it.
        calls = jnp.stack([one.calls[...] for one in layers])
        return jnp.sum(x * x) * jnp.mean(calls)

    return loss, params


CASES = {"plain": plain_case, "linen": linen_case, "nnx": nnx_case}


def gradients(kind, plan):
    loss, params = CASES[kind](plan)
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return jax.tree.leaves((value, grads))


def kept_bytes(kind, plan):
    loss, params = CASES[kind](plan)
    shapes = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS[1:])
def test_no_plan_changes_a_bit(kind, plan):
    ours, theirs = gradients(kind, plan), gradients(kind, "none")
    assert len(ours) > NUM_LAYERS
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_policies_keep_less_and_less(kind):
    found = [kept_bytes(kind, plan) for plan in ("none", "dots", "full")]
    assert found == sorted(set(found), reverse=True)
    named, full = kept_bytes(kind, "names(wide)"), kept_bytes(kind, "full")
    assert named == full + NUM_LAYERS * 8 * 4 * WIDTH * 4
    mixed = kept_bytes(kind, PLANS[-1])
    assert full < mixed < kept_bytes(kind, "none")


def test_a_class_under_none_is_the_class_itself():
    assert remat.wrap(LinenLayer, layer=0, plan="none") is LinenLayer


def test_a_plan_may_be_one_policy_a_layer():
    plan = parse_plan("0:full,1:dots", 2)
    run = remat.wrap(layer, layer=1, plan=plan)
    _, params = plain_case("none")
    np.testing.assert_array_equal(run(params[0], rows()), layer(params[0], rows()))


def test_keywords_reach_the_layer():
    scaled = lambda x, *, by: jnp.sin(x * by)
    run = remat.wrap(scaled, layer=2, plan="full")
    np.testing.assert_array_equal(run(rows(), by=2.0), scaled(rows(), by=2.0))


@pytest.mark.parametrize(
    ("plan", "number", "problem"),
    [
        ("0-1:full", 2, "no policy for layer 2 in '0-1:full'"),
        ("0:full,2:dots", 0, "no policy for layer 1 of 0-2"),
        ("everything", 0, "unknown policy 'everything'"),
        ("full", -1, "no policy for layer -1"),
    ],
)
def test_a_plan_that_says_nothing_of_it_is_refused(plan, number, problem):
    with pytest.raises(ConfigError, match=problem):
        remat.wrap(layer, layer=number, plan=plan)


def test_other_names_are_none_of_it():
    with pytest.raises(AttributeError, match="has no attribute 'unwrap'"):
        remat.unwrap  # noqa: B018
