"""The language model: shapes, causality, dtypes, and remat that changes no bit."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxft.config import ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models.adapters import to_model
from jaxft.models.transformer import (
    _rotate,
    make_model,
    make_rope,
    next_token_loss,
)

pytestmark = pytest.mark.device

VOCAB = 32
POLICIES = ["none", "dots", "names(attn,up)", "full"]  # from most kept to least


def _model(plan="none", **fields):
    config = ModelConfig(vocab_size=VOCAB, width=16, num_layers=4, num_heads=4)
    for name, value in fields.items():
        setattr(config, name, value)
    made = make_model(config, RematConfig(plan=plan))
    return to_model(made, next_token_loss(LossConfig()), example={})


def _batch(rows=2, positions=8):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, positions + 1))
    tokens = tokens.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _mean_loss(model, batch):
    def loss(params):
        sums, _ = model.loss(params, {}, batch, jax.random.key(0), train=True)
        return sums["loss"][0] / sums["loss"][1]

    return loss


@functools.cache
def _stack_params():
    return jax.jit(_model().init)(jax.random.key(0)).params


def _params(scan):
    """Of the default model, as a stack or as the same values in a list."""
    params = _stack_params()
    if scan:
        return params
    pick = lambda i: jax.tree.map(lambda leaf: leaf[i], params["layers"])
    return params | {"layers": {i: pick(i) for i in range(4)}}


def _as_stack(params):
    layers = params["layers"]
    blocks = [layers[i] for i in range(len(layers))]
    return params | {"layers": jax.tree.map(lambda *rows: np.stack(rows), *blocks)}


@functools.cache
def _loss_and_grads(plan, scan):
    loss = _mean_loss(_model(plan, scan_layers=scan), _batch())
    return jax.jit(jax.value_and_grad(loss))(_params(scan))


def _assert_equal(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.slow
def test_a_stack_and_a_list_start_with_the_same_values():
    listed = jax.jit(_model(scan_layers=False).init)(jax.random.key(0)).params
    _assert_equal(_stack_params(), _as_stack(listed))


@pytest.mark.slow
def test_a_stack_and_a_list_compute_the_same():
    loss, grads = _loss_and_grads("none", True)
    loss_list, grads_list = _loss_and_grads("none", False)
    np.testing.assert_allclose(loss, loss_list, rtol=1e-6)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(compare, grads, _as_stack(grads_list))


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("dots", marks=pytest.mark.slow),
        pytest.param("dots_no_batch", marks=pytest.mark.slow),
        pytest.param("names(attn,up)", marks=pytest.mark.slow),
        "offload(attn,up)",
        pytest.param("0:full,1:dots,2:full,3:dots", marks=pytest.mark.slow),
        "0-1:names(qkv,gate),2-3:none",
    ],
)
def test_no_plan_changes_a_bit(plan, scan):
    loss, grads = _loss_and_grads(plan, scan)
    loss_none, grads_none = _loss_and_grads("none", scan)
    assert loss == loss_none
    _assert_equal(grads, grads_none)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "loop"])
def test_the_state_tree_is_the_same_under_every_plan(scan):
    key = jax.eval_shape(lambda: jax.random.key(0))
    plans = ["none", "full", "0:full,1:dots,2:full,3:dots", "0-2:full,3:none"]
    shapes = [jax.eval_shape(_model(p, scan_layers=scan).init, key) for p in plans]
    assert all(shape == shapes[0] for shape in shapes)


def _kept_bytes(plan, *, scan):
    """Bytes that live from the forward to the backward pass."""
    model = _model(plan, scan_layers=scan, width=32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(model.init, key).params
    loss = _mean_loss(model, _batch(4, 32))
    kept = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def test_less_is_kept_in_a_loop_and_as_much_as_in_a_scan():
    loop = [_kept_bytes(plan, scan=False) for plan in POLICIES]
    scan = [_kept_bytes(plan, scan=True) for plan in POLICIES]
    assert loop == sorted(set(loop), reverse=True)
    assert scan == sorted(set(scan), reverse=True)
    # Without a policy JAX prunes a loop's residuals a little better than a scan's.
    np.testing.assert_allclose(scan[1:], loop[1:], rtol=0.05)


@pytest.mark.slow
def test_scan_memory_is_ordered():
    def temp_bytes(plan):
        model = _model(plan, width=128, num_layers=8)
        params = jax.eval_shape(model.init, jax.random.key(0)).params
        grads = jax.grad(_mean_loss(model, _batch(4, 64)))
        return jax.jit(grads).lower(params).compile().memory_analysis()

    temps = [temp_bytes(plan).temp_size_in_bytes for plan in POLICIES]
    assert temps == sorted(set(temps), reverse=True), temps


def test_no_prediction_sees_its_future():
    fields = {"num_layers": 2, "num_kv_heads": 2, "vocab_size": VOCAB, "width": 16}
    config = ModelConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    net = jax.jit(make_model(config, RematConfig()))(nnx.Rngs(0))
    tokens = _batch(1)["inputs"]
    changed = tokens.copy()
    changed[0, 5] = (tokens[0, 5] + 1) % VOCAB
    moved = np.any(np.asarray(net(tokens) != net(changed)), axis=-1)[0]
    assert moved.tolist() == [position >= 5 for position in range(8)]


def test_rotations_keep_only_distances():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=8), jnp.float32) for _ in range(2))
    spread = lambda x: jnp.broadcast_to(x, (1, 10, 1, 8))
    rope = make_rope(10, 8, theta=100.0)
    turned = [np.asarray(_rotate(spread(x), rope))[0, :, 0] for x in (query, key)]
    scores = turned[0] @ turned[1].T
    np.testing.assert_allclose(scores[0, 0], query @ key, rtol=1e-5)
    for distance in range(-9, 10):
        row = np.diagonal(scores, distance)
        np.testing.assert_allclose(row, row[0], rtol=1e-4, atol=1e-5)


def test_names_and_shapes():
    model = _model(num_kv_heads=2, tied_head=False)
    params = jax.eval_shape(model.init, jax.random.key(0)).params
    names = model.axes["layers"]["attention"]
    assert names["key"] == ("layers", "embed", "kv_heads", "head_dim")
    assert names["out"] == ("layers", "heads", "head_dim", "embed")
    assert model.axes["layers"]["mlp"]["gate"] == ("layers", "embed", "mlp")
    assert model.axes["head"] == ("embed", "vocab")
    assert params["layers"]["attention"]["query"].shape == (4, 16, 4, 4)
    assert params["layers"]["attention"]["key"].shape == (4, 16, 2, 4)
    assert params["layers"]["mlp"]["gate"].shape == (4, 16, 48)
    is_names = lambda leaf: isinstance(leaf, tuple)
    ranks = jax.tree.map(len, model.axes, is_leaf=is_names)
    assert ranks == jax.tree.map(lambda leaf: len(leaf.shape), params)
    assert "head" not in _model().axes


@pytest.mark.parametrize("plan", ["none", "full"])
def test_computes_in_the_dtype_of_its_parameters(plan):
    model = _model(plan)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _params(True))
    loss, grads = jax.jit(jax.value_and_grad(_mean_loss(model, _batch())))(low)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(loss, _loss_and_grads("none", True)[0], rtol=0.02)
    jaxpr = str(jax.make_jaxpr(_mean_loss(model, _batch()))(low))
    for line in jaxpr.splitlines():
        if " exp " in line or "rsqrt" in line or " log " in line:
            assert "bf16" not in line, line


def test_starts_near_ignorance_and_learns():
    params = _params(True)
    loss = _mean_loss(_model(), _batch(4, 16))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = optimizer.init(params), []
    for _ in range(30):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    assert abs(losses[0] - np.log(VOCAB)) < 0.8
    assert losses[-1] < 0.5


@pytest.mark.parametrize(
    ("fields", "path", "says"),
    [
        ({"num_heads": 3}, "model.num_heads", "3 heads do not divide model.width 16"),
        ({"num_kv_heads": 3}, "model.num_kv_heads", "do not divide model.num_heads 4"),
        ({"num_heads": 16}, "model.num_heads", "rotary positions need pairs"),
        ({"plan": "names(atn)"}, "remat.plan", "the model marks: attn, gate, qkv, up"),
        ({"plan": "0-7:full"}, "remat.plan", "no layer 7: layers are 0-3"),
    ],
)
def test_refuses_what_cannot_work(fields, path, says):
    with pytest.raises(ConfigError) as caught:
        _model(**fields)
    assert caught.value.path == path
    assert says in caught.value.problem


def test_options_are_refused():
    config = ModelConfig()
    config.options.depth = 3
    with pytest.raises(ConfigError, match=r"model\.options\.depth"):
        make_model(config, RematConfig())
    loss = LossConfig()
    loss.options.smoothing = 0.1
    with pytest.raises(ConfigError, match=r"loss\.options\.smoothing"):
        next_token_loss(loss)


@pytest.mark.slow
def test_learns_text_fast():
    """The demo's model on this library's own source, bytes: under 3.2 bits each."""
    root = pathlib.Path(optax.__file__).parent
    text = b"\n".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    corpus = np.frombuffer(text, np.uint8)
    model = _model(
        "names(attn,up)", vocab_size=256, width=128, num_layers=2, num_heads=4
    )
    params = model.init(jax.random.key(0)).params
    optimizer = optax.adamw(3e-3, b2=0.95, weight_decay=0.1)

    @jax.jit
    def step(params, opt_state, rows):
        batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
        value, grads = jax.value_and_grad(_mean_loss(model, batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    rng, opt_state = np.random.default_rng(0), optimizer.init(params)
    losses = []
    for _ in range(300):
        starts = rng.integers(0, len(corpus) - 129, 16)
        rows = np.stack([corpus[start : start + 129] for start in starts])
        params, opt_state, value = step(params, opt_state, rows.astype(np.int32))
        losses.append(float(value) / np.log(2))
    assert 7.5 < losses[0] < 9
    assert np.mean(losses[-20:]) < 3.2
