"""Shapes, then shardings, then arrays: a state is born where it will live.

World: device. Floor: a peer of `data` and `checkpoint`. Read `jaxft/types.py` before
and `jaxft/train/step.py` after this file.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxft.config import ConfigError, TrainConfig
from jaxft.parallel.precision import Precision
from jaxft.types import Model, PyTree, TrainState

# `fold_in(rng, step)` is a step's randomness; no step has this number.
_INIT_FOLD = 2**32 - 1


def make_key(config: TrainConfig) -> jax.Array:
    """The run's typed key.

    Raises:
        ConfigError: the implementation is unknown.
    """
    try:
        return jax.random.key(config.seed, impl=config.rng_impl)
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("train.rng_impl", f"{config.rng_impl}: {reason}") from error


class StateFactory:
    """Makes the first state of a run, or only its shapes.

    Args:
        model: what to train.
        optimizer: an optax transformation.
        precision: casts the parameters to the stored dtype.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        *,
        precision: Precision,
    ):
        self._model = model
        self._optimizer = optimizer
        self._precision = precision

    def make_state(self, key: jax.Array, params: PyTree | None = None) -> TrainState:
        """The state at step 0 as a traceable function of the run's key.

        Args:
            key: the run's.
            params: parameters to begin with; None for fresh ones.
        """
        variables = self._model.init(jax.random.fold_in(key, _INIT_FOLD))
        params = variables.params if params is None else params
        params = _strong(self._precision.cast_params(params))
        return TrainState(
            step=jnp.int32(0),
            num_skipped=jnp.int32(0),
            params=params,
            opt_state=_strong(self._optimizer.init(params)),
            rng=key,
            extra=_strong(variables.extra),
        )

    def plan_shapes(self, key: jax.Array) -> TrainState:
        """The state with `jax.ShapeDtypeStruct` leaves; allocates nothing."""
        return jax.eval_shape(self.make_state, key)

    def init_state(
        self, key: jax.Array, *, shardings: PyTree, params: PyTree | None = None
    ) -> TrainState:
        """The state at step 0, each device computing only its own shards."""
        return jax.jit(self.make_state, out_shardings=shardings)(key, params)

    def init_params(self, key: jax.Array, *, shardings: PyTree) -> PyTree:
        """Fresh parameters with the same bits on every mesh, then placed.

        A program for several devices rounds differently from one for one: here each
        process computes all of them on one device.
        """

        def make(key: jax.Array) -> PyTree:
            variables = self._model.init(jax.random.fold_in(key, _INIT_FOLD))
            return _strong(self._precision.cast_params(variables.params))

        def place(leaf: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
            host = np.asarray(leaf)
            return jax.make_array_from_callback(
                host.shape, sharding, lambda index: host[index]
            )

        device = jax.tree.leaves(shardings)[0].mesh.local_devices[0]
        data = jax.device_put(np.asarray(jax.random.key_data(key)), device)
        impl = jax.random.key_impl(key)
        params = jax.jit(lambda data: make(jax.random.wrap_key_data(data, impl=impl)))
        return jax.tree.map(place, params(data), shardings)


def abstract_state(shapes: TrainState, *, shardings: PyTree) -> TrainState:
    """`shapes` with their shardings: the target of a restore, the avals of a step."""

    def leaf(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, shapes, shardings)


def _strong(tree: PyTree) -> PyTree:
    """Strips weak types: a state restored from disk has none."""

    def leaf(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(leaf, tree)
