"""What follows the gradients of a step: mean, norm, update, guard, control word.

World: device, traced. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/train/microbatch.py` before and `jaxft/train/step.py` after this file.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxft.config import TrainConfig
from jaxft.records import Control
from jaxft.types import PyTree, StepOutput, Sums, TrainState


def average(
    grads: PyTree, sums: Sums, *, like: PyTree
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Sums over a batch -> means.

    Args:
        grads: the gradient of the loss sum.
        sums: see `jaxft.types.Sums`.
        like: the parameters or their shapes: the gradients get their dtypes.

    Returns:
        The gradient of the mean loss; the means, with `grad_norm`.
    """
    metrics = {name: total / _safe(weight) for name, (total, weight) in sums.items()}
    weight = _safe(sums["loss"][1])
    grads = jax.tree.map(
        lambda g, p: (g / weight.astype(g.dtype)).astype(p.dtype), grads, like
    )
    metrics["grad_norm"] = optax.tree.norm(grads)
    return grads, metrics


def apply_update(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    *,
    grads: PyTree,
    metrics: dict[str, jax.Array],
    extra: PyTree,
    control: jax.Array,
    config: TrainConfig,
) -> tuple[TrainState, StepOutput]:
    """The state after a step and what it reports.

    Args:
        optimizer: gets the loss as `value`.
        state: before the step.
        grads: of the mean loss.
        metrics: means, with `grad_norm`.
        extra: the model's other collections after the step.
        control: the words of all processes, one a device.
        config: clipping and guard.
    """
    norm = metrics["grad_norm"]
    if config.clip_norm > 0:
        scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, state.params, value=metrics["loss"]
    )
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    finite &= jnp.isfinite(optax.tree.norm(updates))
    new = TrainState(
        step=state.step + 1,
        num_skipped=state.num_skipped,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        rng=state.rng,
        extra=extra,
    )
    if config.guard:
        new = _guard(finite, new=new, old=state)
    metrics = {name: value.astype(jnp.float32) for name, value in metrics.items()}
    return new, StepOutput(metrics, finite, reduce_control(control))


def reduce_control(control: jax.Array) -> jax.Array:
    """Ors the control words of all processes with a max over each bit.

    A max of whole words would lose bits, and not every backend has an or-reduction.
    """
    bits = jnp.arange(len(Control), dtype=jnp.int32)
    each = (control[:, None] >> bits[None, :]) & 1
    return jnp.sum(jnp.max(each, axis=0) << bits, dtype=jnp.int32)


def _guard(finite: jax.Array, *, new: TrainState, old: TrainState) -> TrainState:
    """Applies the update only where it is finite; the attempt counts all the same."""

    def choose(a: Any, b: Any) -> Any:
        return jnp.where(finite, a, b)

    return new.replace(
        num_skipped=old.num_skipped + jnp.where(finite, 0, 1).astype(jnp.int32),
        params=jax.tree.map(choose, new.params, old.params),
        opt_state=jax.tree.map(choose, new.opt_state, old.opt_state),
        extra=jax.tree.map(choose, new.extra, old.extra),
    )


def _safe(weight: jax.Array) -> jax.Array:
    """A batch of nothing but padding has the mean 0, not NaN."""
    return jnp.where(weight > 0, weight, jnp.ones_like(weight))
