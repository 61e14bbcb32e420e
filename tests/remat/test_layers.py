"""One stack under any plan: same values, same gradients, less kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxft.remat.layers import Segment, apply_layers, plan_segments, scan_layers
from jaxft.remat.policies import Kind, Policy, parse_plan

F, D = Policy(Kind.FULL), Policy(Kind.DOTS)


@pytest.mark.parametrize(
    ("plan", "segments"),
    [
        ([F] * 4, [Segment((F,), 4)]),
        ([F], [Segment((F,), 1)]),
        ([F, D] * 2, [Segment((F, D), 2)]),
        ([F, F, D] * 3, [Segment((F, F, D), 3)]),
        ([F, F, D, D], [Segment((F,), 2), Segment((D,), 2)]),
        ([F, D], [Segment((F,), 1), Segment((D,), 1)]),
        ([F, D, F], [Segment((F,), 1), Segment((D,), 1), Segment((F,), 1)]),
    ],
)
def test_fewest_bodies(plan, segments):
    assert list(plan_segments(plan)) == segments
    assert sum(segment.num_layers for segment in segments) == len(plan)


NUM_LAYERS, WIDTH = 6, 16
PLANS = [
    "none",
    "full",
    "dots",
    "names(hidden)",
    "offload(hidden)",
    "0-2:full,3-5:dots",  # two scans
    "0:full,1:none,2:full,3:none,4:full,5:none",  # one scan over blocks of two
    "0-1:none,2-3:offload(hidden),4-5:full",  # three
]
# Its last layer stands alone, outside any loop: the compiler may fuse it otherwise.
LONE = "0-4:full,5:names(hidden)"


def _layer(x, layer):
    x = x + jnp.tanh(checkpoint_name(x @ layer["w"], "hidden")) * layer["scale"]
    return x, {"power": jnp.mean(x * x)}


def _stack():
    w = np.random.default_rng(0).normal(size=(NUM_LAYERS, WIDTH, WIDTH)) * 0.3
    scale = np.arange(1.0, NUM_LAYERS + 1) / NUM_LAYERS
    return {"w": jnp.asarray(w, jnp.float32), "scale": jnp.asarray(scale, jnp.float32)}


def _loss(w, *, text, scan):
    stack = _stack() | {"w": w}
    plan = parse_plan(text, NUM_LAYERS)
    x = jnp.ones((4, WIDTH))
    if scan:
        x, outputs = scan_layers(_layer, x, stack=stack, plan=plan)
    else:
        layers = [
            dict(zip(stack, row, strict=True))
            for row in zip(*stack.values(), strict=True)
        ]
        x, outputs = apply_layers(_layer, x, layers=layers, plan=plan)
        outputs = jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)
    return jnp.sum(x * x) + outputs["power"] @ jnp.arange(1.0, NUM_LAYERS + 1), outputs


@functools.cache
def _results(text, scan):
    run = jax.jit(
        jax.value_and_grad(_loss, has_aux=True), static_argnames=("text", "scan")
    )
    return run(_stack()["w"], text=text, scan=scan)


@pytest.mark.device
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
@pytest.mark.parametrize("text", PLANS[1:])
def test_no_plan_changes_a_bit(text, scan):
    (_, outputs), _ = _results(text, scan)
    assert outputs["power"].shape == (NUM_LAYERS,)
    jax.tree.map(
        np.testing.assert_array_equal, _results(text, scan), _results("none", scan)
    )


@pytest.mark.device
@pytest.mark.parametrize("text", [*PLANS, LONE])
def test_scan_equals_loop(text):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, _results(text, True), _results(text, False))


@pytest.mark.device
@pytest.mark.parametrize("text", ["full", "0:full,1:none,2:full,3:none"])
def test_every_layer_can_have_a_key_of_its_own(text):
    """Typed keys travel in the stack like any other leaf."""
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda total, key: (total, jax.random.uniform(key))
    _, draws = scan_layers(draw, 0.0, stack=keys, plan=parse_plan(text, 4))
    np.testing.assert_array_equal(draws, jax.vmap(jax.random.uniform)(keys))


@pytest.mark.device
def test_a_layer_alone_is_not_in_a_scan():
    """There a scan of one trip would be unrolled, and its remat merged away."""
    text = str(
        jax.make_jaxpr(jax.grad(lambda w: _loss(w, text=LONE, scan=True)[0]))(
            _stack()["w"]
        )
    )
    assert "prevent_cse=True" in text
    assert "prevent_cse=False" in text


@pytest.mark.device
def test_a_loop_takes_layers_that_differ():
    layers = [jnp.ones((3, 5)), jnp.ones((5, 2))]
    plan = parse_plan("full", 2)
    x, _ = apply_layers(
        lambda x, w: (x @ w, None), jnp.ones((1, 3)), layers=layers, plan=plan
    )
    assert x.shape == (1, 2)


@pytest.mark.device
@pytest.mark.parametrize("text", ["full", "0-1:full,2:dots"])
def test_plan_and_layers_must_match(text):
    plan = parse_plan(text, 3)
    layers = [jnp.ones((2, 2))] * 2
    with pytest.raises(ValueError, match="zip"):
        apply_layers(lambda x, w: (x @ w, None), jnp.ones(2), layers=layers, plan=plan)
    with pytest.raises((ValueError, TypeError)):
        scan_layers(
            lambda x, w: (x @ w, None),
            jnp.ones(2),
            stack=jnp.ones((4, 2, 2)),
            plan=plan,
        )
