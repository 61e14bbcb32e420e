"""Sums that losses report: cross-entropy and squared error, in float32.

World: device. Floor: beside its users `transformer` and `mlp`. Read `jaxft/types.py`
(`Sums`) before this file and `jaxft/models/transformer.py` after it.

A loss returns sums and weights, never means: the step divides once, over the whole
global batch, so that padding and microbatches cannot bias it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxft.types import Sums


def softmax_sums(
    logits: jax.Array, targets: jax.Array, *, weights: jax.Array | None = None
) -> Sums:
    """Cross-entropy and accuracy of class scores.

    Args:
        logits: `[..., num_classes]`, any float dtype.
        targets: integer class ids `[...]`.
        weights: how much each target counts, `[...]`; 0 is padding. None: 1 each.

    Returns:
        `loss` in nats, `bits_per_token` and `accuracy`; ties for the best score
        count as right.
    """
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # Nothing of the logits' size is needed but their exponentials; the best score
    # comes with `logsumexp`, so that accuracy costs no pass of its own (an argmax
    # does).
    nats = jax.nn.logsumexp(logits, axis=-1) - picked
    best = jax.lax.stop_gradient(logits.max(axis=-1))
    hits = (picked >= best).astype(jnp.float32)
    weight = jnp.float32(nats.size)
    if weights is not None:
        weights = weights.astype(jnp.float32)
        nats, hits, weight = nats * weights, hits * weights, weights.sum()
    loss = nats.sum()
    return {
        "loss": (loss, weight),
        "bits_per_token": (loss / math.log(2), weight),
        "accuracy": (hits.sum(), weight),
    }


def squared_sums(
    outputs: jax.Array, targets: jax.Array, *, weights: jax.Array | None = None
) -> Sums:
    """Squared error, summed over the last dim.

    Args:
        outputs: `[..., num_outputs]`.
        targets: the same shape.
        weights: how much each row counts, `[...]`; 0 is padding. None: 1 each.

    Returns:
        `loss`.
    """
    error = outputs.astype(jnp.float32) - targets.astype(jnp.float32)
    rows = jnp.square(error).sum(axis=-1)
    if weights is None:
        return {"loss": (rows.sum(), jnp.float32(rows.size))}
    weights = weights.astype(jnp.float32)
    return {"loss": ((rows * weights).sum(), weights.sum())}
