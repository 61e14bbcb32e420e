"""An average of the parameters over the updates, for evaluation.

World: device, traced. Floor: a peer of `data` and `checkpoint`; used by
`jaxft/train/step.py`. The average is a part of the optimizer's state: it is placed
like the parameters, guarded and saved with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxft.types import PyTree, TrainState


class EmaState(NamedTuple):
    """State of an optimizer under `with_ema`.

    Attributes:
        inner: the optimizer's own state.
        average: tree like the parameters.
    """

    inner: optax.OptState
    average: PyTree


def with_ema(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformation:
    """`optimizer` that also keeps `average = decay * average + (1 - decay) * params`.

    The average starts as the parameters.
    """

    def init(params: PyTree) -> EmaState:
        return EmaState(optimizer.init(params), jax.tree.map(jnp.copy, params))

    inner_optimizer = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, EmaState]:
        assert params is not None
        updates, inner = inner_optimizer.update(
            updates, state.inner, params, **extra_args
        )
        new = optax.apply_updates(params, updates)

        def mix(old: jax.Array, x: jax.Array) -> jax.Array:
            return (decay * old + (1.0 - decay) * x).astype(old.dtype)

        return updates, EmaState(inner, jax.tree.map(mix, state.average, new))

    return optax.GradientTransformationExtraArgs(init, update)


def averaged_params(state: TrainState) -> PyTree:
    """The average where there is one, else the parameters themselves."""
    if isinstance(state.opt_state, EmaState):
        return state.opt_state.average
    return state.params
