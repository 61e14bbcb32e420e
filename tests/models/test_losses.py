"""Sums are right, padding weighs nothing, splits do not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.models.losses import softmax_sums, squared_sums

pytestmark = pytest.mark.device


def _tokens(rows=8, positions=5, classes=11):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(rows, positions, classes)).astype(np.float32) * 3
    targets = rng.integers(0, classes, (rows, positions)).astype(np.int32)
    weights = (rng.random((rows, positions)) < 0.6).astype(np.float32)
    return logits, targets, weights


def test_against_optax():
    logits, targets, weights = _tokens()
    sums = softmax_sums(jnp.asarray(logits), targets, weights=weights)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(sums["loss"][0], (nats * weights).sum(), rtol=1e-6)
    right = (logits.argmax(-1) == targets) * weights
    assert float(sums["accuracy"][0]) == right.sum()
    bits = float(sums["bits_per_token"][0])
    np.testing.assert_allclose(bits, float(sums["loss"][0]) / np.log(2), rtol=1e-6)
    assert {float(weight) for _, weight in sums.values()} == {weights.sum()}
    assert {x.dtype for pair in sums.values() for x in pair} == {jnp.dtype("float32")}


def test_huge_scores_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    sums = softmax_sums(logits, jnp.array([1]))
    assert float(sums["loss"][0]) == 2e4
    grads = jax.grad(lambda x: softmax_sums(x, jnp.array([1]))["loss"][0])(logits)
    np.testing.assert_array_equal(grads, [[1, -1, 0]])


@pytest.mark.parametrize("kind", ["softmax", "squared"])
@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_sums_do_not_depend_on_the_split(kind, num_parts):
    """Parts hold different numbers of weighted tokens; means of means would differ."""
    logits, targets, weights = _tokens()
    compute = softmax_sums
    if kind == "squared":
        targets, compute = np.sin(logits), squared_sums
    whole = compute(jnp.asarray(logits), targets, weights=weights)["loss"]
    parts = [
        compute(jnp.asarray(a), b, weights=c)["loss"]
        for a, b, c in zip(
            *(np.split(x, num_parts) for x in (logits, targets, weights)), strict=True
        )
    ]
    assert len({float(weight) for _, weight in parts}) > 1
    total, weight = (
        sum(float(x) for x in column) for column in zip(*parts, strict=True)
    )
    assert weight == float(whole[1])
    np.testing.assert_allclose(total, float(whole[0]), rtol=1e-6)


@pytest.mark.parametrize("compute", [softmax_sums, squared_sums])
def test_padding_weighs_nothing(compute):
    logits, targets, weights = _tokens()
    if compute is squared_sums:
        targets = np.sin(logits)
    other = targets.copy()
    other[weights == 0] = 0

    def loss(logits, targets):
        return compute(logits, targets, weights=weights)["loss"][0]

    assert loss(logits, targets) == loss(logits, other)
    grads = np.asarray(jax.grad(loss)(jnp.asarray(logits), targets))
    assert not grads[weights == 0].any()
    assert grads[weights == 1].any()


def test_bfloat16_scores_are_summed_in_float32():
    logits, targets, _ = _tokens()
    low = jnp.asarray(logits, jnp.bfloat16)
    sums = softmax_sums(low, targets)
    exact = softmax_sums(low.astype(jnp.float32), targets)
    assert sums["loss"] == exact["loss"]


def test_no_copy_of_the_scores_is_kept_beside_one():
    """From forward to backward pass: one array of the scores' size."""
    logits = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    targets = jax.ShapeDtypeStruct((64,), jnp.int32)

    def backward(logits, targets):
        return jax.vjp(lambda x: softmax_sums(x, targets)["loss"][0], logits)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, logits, targets))
    floats = [leaf for leaf in kept if leaf.dtype == jnp.float32]
    assert sum(leaf.size for leaf in floats) < 1.1 * logits.size


def test_squared_error():
    outputs, targets = jnp.ones((2, 3)), jnp.zeros((2, 3))
    assert [float(x) for x in squared_sums(outputs, targets)["loss"]] == [6, 2]
    weighted = squared_sums(outputs, targets, weights=jnp.array([1.0, 0.0]))
    assert [float(x) for x in weighted["loss"]] == [3, 1]
