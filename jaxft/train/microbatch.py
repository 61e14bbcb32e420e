"""Gradients of a batch in parts: sums over microbatches, divided once at the end.

World: device, traced. Floor: a peer of `data` and `checkpoint`; used by
`jaxft/train/step.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxft.parallel.activations import constrain_rows
from jaxft.types import Batch, LossFn, PyTree, Sums


def sum_gradients(
    loss: LossFn,
    params: PyTree,
    *,
    extra: PyTree,
    batch: Batch,
    rng: jax.Array,
    num_microbatches: int,
    accum_dtype: Any,
) -> tuple[PyTree, Sums, PyTree]:
    """Gradient of the loss *sum* over the whole batch.

    Args:
        loss: see `jaxft.types.LossFn`.
        params: what to differentiate with respect to.
        extra: the model's other collections; microbatches update them in turn.
        batch: name -> [global_batch, ...].
        rng: typed key of this step; microbatch `i` uses `fold_in(rng, i)`.
        num_microbatches: divides the global batch.
        accum_dtype: dtype of the gradient sum when there is more than one.

    Returns:
        The gradients like `params`, the sums over the batch, the new `extra`.
    """

    def one(extra: PyTree, batch: Batch, index: Any) -> tuple[PyTree, Sums, PyTree]:
        batch = jax.tree.map(constrain_rows, batch)

        def loss_sum(params: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
            key = jax.random.fold_in(rng, index)
            sums, new_extra = loss(params, extra, batch, key, train=True)
            return sums["loss"][0], (sums, new_extra)

        grads, (sums, new_extra) = jax.grad(loss_sum, has_aux=True)(params)
        return grads, sums, new_extra

    if num_microbatches == 1:
        return one(extra, batch, 0)
    parts = jax.tree.map(lambda x: _split(x, num_microbatches), batch)
    first = jax.tree.map(lambda x: x[0], parts)
    _, sum_shapes, _ = jax.eval_shape(one, extra, first, 0)
    zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, accum_dtype), params)
    zero_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes)

    def body(carry: Any, xs: Any) -> tuple[Any, None]:
        grad_sum, sums, extra = carry
        index, part = xs
        grads, more, extra = one(extra, part, index)
        grad_sum = jax.tree.map(lambda a, g: a + g.astype(a.dtype), grad_sum, grads)
        return (grad_sum, jax.tree.map(jnp.add, sums, more), extra), None

    carry = (zero_grads, zero_sums, extra)
    xs = (jnp.arange(num_microbatches), parts)
    (grad_sum, sums, extra), _ = jax.lax.scan(body, carry, xs)
    return grad_sum, sums, extra


def _split(x: jax.Array, num_microbatches: int) -> jax.Array:
    """[B, ...] -> [K, B / K, ...] without moving a row to another device.

    Devices hold contiguous rows; taking every K-th row into a microbatch leaves
    each device with its equal share of every one of them.
    """
    rows = x.shape[0] // num_microbatches
    return x.reshape(rows, num_microbatches, *x.shape[1:]).swapaxes(0, 1)
