"""The training step: (state, batch, control) -> (state, output), traced once.

World: device, traced. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/types.py` before and `jaxft/loop.py`, the host half, after this file.

A step draws its randomness from `fold_in(state.rng, state.step)`, so it is a pure
function of the state and the batch: running it again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.config import PrecisionConfig, TrainConfig
from jaxft.parallel.precision import Precision, make_precision
from jaxft.records import Control
from jaxft.train.microbatch import sum_gradients
from jaxft.types import Batch, LossFn, PyTree, StepOutput, Sums, TrainState


def make_train_step(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    config: TrainConfig | None = None,
    precision: Precision | None = None,
    state_shardings: PyTree | None = None,
) -> jax.stages.Wrapped:
    """Builds the jitted step; it donates the state.

    Args:
        loss: see `jaxft.types.LossFn`; `Model.loss` is one.
        optimizer: an optax transformation of the parameters.
        config: microbatches and the non-finite guard.
        precision: dtypes; float32 throughout when left out.
        state_shardings: a `TrainState` of `NamedSharding`; the new state is placed
            like the old one. Left out, the compiler chooses.

    Returns:
        A jitted `TrainStep`; `.lower(state, batch, control).compile()` works on it.
    """
    config = config or TrainConfig()
    precision = precision or make_precision(PrecisionConfig())
    compute_loss = _in_compute_dtype(loss, precision)

    def train_step(
        state: TrainState, batch: Batch, control: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        grads, sums, extra = sum_gradients(
            compute_loss,
            state.params,
            extra=state.extra,
            batch=batch,
            rng=jax.random.fold_in(state.rng, state.step),
            num_microbatches=config.num_microbatches,
            accum_dtype=precision.accum_dtype,
        )
        weight = _safe(sums["loss"][1])
        grads = jax.tree.map(
            lambda g, p: (g / weight.astype(g.dtype)).astype(p.dtype),
            grads,
            state.params,
        )
        metrics = {name: total / _safe(w) for name, (total, w) in sums.items()}
        metrics["grad_norm"] = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(
            step=state.step + 1,
            num_skipped=state.num_skipped,
            params=params,
            opt_state=opt_state,
            rng=state.rng,
            extra=extra,
        )
        if config.guard:
            new = _guard(finite, new=new, old=state)
        metrics = {name: m.astype(jnp.float32) for name, m in metrics.items()}
        return new, StepOutput(metrics, finite, reduce_control(control))

    if state_shardings is None:
        return jax.jit(train_step, donate_argnums=0)
    replicated = _replicated_like(state_shardings)
    return jax.jit(
        train_step, donate_argnums=0, out_shardings=(state_shardings, replicated)
    )


def make_eval_step(
    loss: LossFn, *, precision: Precision | None = None
) -> Callable[[TrainState, Batch], Sums]:
    """Builds the jitted evaluation step: the sums over one batch, `train=False`."""
    precision = precision or make_precision(PrecisionConfig())
    compute_loss = _in_compute_dtype(loss, precision)

    @jax.jit
    def eval_step(state: TrainState, batch: Batch) -> Sums:
        sums, _ = compute_loss(state.params, state.extra, batch, state.rng, train=False)
        return sums

    return eval_step


def reduce_control(control: jax.Array) -> jax.Array:
    """Ors the control words of all processes with a max over each bit.

    A max of whole words would lose bits, and not every backend has an or-reduction.
    """
    bits = jnp.arange(len(Control), dtype=jnp.int32)
    each = (control[:, None] >> bits[None, :]) & 1
    return jnp.sum(jnp.max(each, axis=0) << bits, dtype=jnp.int32)


def _in_compute_dtype(loss: LossFn, precision: Precision) -> LossFn:
    def compute_loss(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        params = precision.cast_compute(params)
        return loss(params, extra, batch, rng, train=train)

    return compute_loss


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


def _replicated_like(shardings: PyTree) -> NamedSharding:
    mesh = jax.tree.leaves(shardings)[0].mesh
    return NamedSharding(mesh, PartitionSpec())
