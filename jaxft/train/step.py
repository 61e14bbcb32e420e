"""The training step: (state, batch, control) -> (state, output), traced once.

World: device, traced. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/types.py` before and `jaxft/loop.py`, the host half, after this file.

    step = make_train_step(model, optimizer, mesh=mesh)
    state = step.init()
    for rows in batches:
        state, output = step(state, rows)

A step draws its randomness from `fold_in(state.rng, state.step)`, so it is a pure
function of the state and the batch: running it again gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.config import ConfigError, PrecisionConfig, ShardingConfig, TrainConfig
from jaxft.parallel import sharding as placing
from jaxft.parallel.activations import rows_on
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.precision import Precision, make_precision
from jaxft.train.ema import averaged_params, with_ema
from jaxft.train.microbatch import sum_gradients
from jaxft.train.shard_step import ShardEval, ShardStep
from jaxft.train.state import StateFactory, abstract_state, make_key
from jaxft.train.update import apply_update, average
from jaxft.types import Batch, LossFn, Model, PyTree, StepOutput, Sums, TrainState


class TrainStep:
    """A jitted step with all that is needed to use it; see `make_train_step`.

    Calling it gives the next state and a `StepOutput`, and donates the old state.

    Attributes:
        mesh: where it runs.
        abstract_state: a `TrainState` of `jax.ShapeDtypeStruct` with shardings: what
            to restore into.
        state_shardings: a `TrainState` of `NamedSharding`.
        placements: the same with the reason for each; see `explain`.
        batch_sharding: of every array of a batch.
    """

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        *,
        mesh: jax.sharding.Mesh,
        config: TrainConfig,
        precision: Precision,
        sharding: ShardingConfig,
    ):
        if config.ema_decay > 0:
            optimizer = with_ema(optimizer, config.ema_decay)
        self._factory = StateFactory(model, optimizer, precision=precision)
        self._key = make_key(config)
        shapes = self._factory.plan_shapes(self._key)
        self.mesh = mesh
        self.placements = placing.plan_state_placements(
            shapes, mesh=mesh, config=sharding, axes=model.axes
        )
        self.state_shardings = jax.tree.map(lambda p: p.sharding, self.placements)
        fetch = self._offload(config) if config.offload_opt_state else None
        self.abstract_state = abstract_state(shapes, shardings=self.state_shardings)
        self.batch_sharding = placing.batch_sharding(mesh, config=sharding)
        loss = _in_compute_dtype(model.loss, precision)
        self._is_fixed = config.virtual_shards > 0
        if self._is_fixed:
            self._jitted = ShardStep(
                loss,
                optimizer,
                config=config,
                accum_dtype=precision.accum_dtype,
                state=self.abstract_state,
                rows=self.batch_sharding,
            )
            return
        self._jitted = jax.jit(
            _trace(
                loss,
                optimizer,
                config=config,
                accum_dtype=precision.accum_dtype,
                rows=self.batch_sharding,
                fetch=fetch,
            ),
            donate_argnums=0,
            in_shardings=(
                self.state_shardings,
                self.batch_sharding,
                NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
            ),
            out_shardings=(
                self.state_shardings,
                NamedSharding(mesh, PartitionSpec()),
            ),
        )

    def _offload(self, config: TrainConfig) -> Callable[[PyTree], PyTree]:
        """Puts the arrays of the optimizer's state in host memory.

        Returns:
            What brings them to the devices, traced.
        """
        if config.virtual_shards:
            raise ConfigError(
                "train.offload_opt_state", "does not go with train.virtual_shards"
            )
        on_device = self.state_shardings.opt_state
        on_host = jax.tree.map(
            # Scalars (counts) stay: they are read at once.
            lambda placed, x: (
                placed.with_memory_kind("pinned_host") if x.ndim else placed
            ),
            on_device,
            self._factory.plan_shapes(self._key).opt_state,
        )
        self.state_shardings = self.state_shardings.replace(opt_state=on_host)
        return lambda opt_state: jax.device_put(opt_state, on_device)

    def init(
        self, key: jax.Array | None = None, *, params: PyTree | None = None
    ) -> TrainState:
        """The state at step 0, born sharded; `key` is the config's when left out.

        Args:
            key: of the run.
            params: parameters to begin with, placed like the state's; None for fresh
                ones. All else is made anew from them.
        """
        key = self._key if key is None else key
        if params is None and self._is_fixed:
            shardings = self.state_shardings.params
            params = self._factory.init_params(key, shardings=shardings)
        return self._factory.init_state(
            key, shardings=self.state_shardings, params=params
        )

    def place(
        self, rows: Mapping[str, np.ndarray], control: int = 0
    ) -> tuple[Batch, jax.Array]:
        """Host rows and a control word onto the devices, in one transfer."""
        return placing.put_batch(rows, sharding=self.batch_sharding, control=control)

    def __call__(
        self, state: TrainState, batch: Batch, control: jax.Array | None = None
    ) -> tuple[TrainState, StepOutput]:
        """One step; host arrays are placed on the way."""
        return self._jitted(state, batch, self._word(control))

    def lower(
        self,
        state: TrainState | None = None,
        batch: Batch | None = None,
        control: jax.Array | None = None,
    ) -> Any:
        """A `jax.stages.Lowered`, or what stands for it with virtual shards.

        Lowers for these arguments; left out, the state is `abstract_state`.
        """
        state = self.abstract_state if state is None else state
        return self._jitted.lower(state, batch, self._word(control))

    def explain(self) -> str:
        """A table of every leaf: shape, spec, bytes per device, why."""
        return placing.explain(self.abstract_state, self.placements)

    def check_memory(self, available_bytes: int | None) -> None:
        """Refuses virtual shards that do not fit a device; other steps may try.

        Args:
            available_bytes: what one device has for a run; None where that is not
                known.

        Raises:
            ConfigError: state, whole parameters and gradients need more.
        """
        if not isinstance(self._jitted, ShardStep) or available_bytes is None:
            return
        needed = self._jitted.needed_bytes()
        if needed > available_bytes:
            raise ConfigError(
                "train.virtual_shards",
                f"needs about {needed / 2**20:.0f} MiB a device for state, whole "
                "parameters and gradients, activations not counted; there are "
                f"{available_bytes / 2**20:.0f} MiB: set it to 0",
            )

    def _word(self, control: jax.Array | None) -> Any:
        if control is not None:
            return control
        return np.zeros(self.mesh.devices.size, np.int32)


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    mesh: jax.sharding.Mesh | None = None,
    config: TrainConfig | None = None,
    precision: PrecisionConfig | None = None,
    sharding: ShardingConfig | None = None,
) -> TrainStep:
    """Builds the step of a model; it allocates nothing.

    Args:
        model: from `jaxft.from_functions`, `from_linen`, `from_nnx`, or by hand.
        optimizer: any optax transformation of the parameters.
        mesh: where it runs; all devices, data parallel, when left out.
        config: microbatches, clipping, average, guard, seed.
        precision: dtypes; float32 throughout when left out.
        sharding: which dim of which leaf lies on which mesh axis.

    Raises:
        ConfigError: a setting cannot work with this model or mesh.
    """
    return TrainStep(
        model,
        optimizer,
        mesh=make_mesh() if mesh is None else mesh,
        config=config or TrainConfig(),
        precision=make_precision(precision or PrecisionConfig()),
        sharding=sharding or ShardingConfig(),
    )


def make_eval_step(
    loss: LossFn,
    *,
    precision: PrecisionConfig | None = None,
    batch_sharding: NamedSharding | None = None,
    virtual_shards: int = 0,
) -> Any:
    """Builds the jitted evaluation: (state, batch) -> sums, with `train=False`.

    It takes the averaged parameters where the state has them.

    Args:
        loss: of the model.
        precision: dtypes; float32 throughout when left out.
        batch_sharding: of a batch.
        virtual_shards: as in the training step; they need `batch_sharding`.

    Returns:
        Something to call, or to `lower` and compile first.
    """
    precise = make_precision(precision or PrecisionConfig())
    compute_loss = _in_compute_dtype(loss, precise)
    if virtual_shards:
        if batch_sharding is None:
            raise ValueError("virtual shards need the sharding of a batch")
        return ShardEval(
            compute_loss,
            averaged=averaged_params,
            num_shards=virtual_shards,
            rows=batch_sharding,
        )

    def eval_step(state: TrainState, batch: Batch) -> Sums:
        with rows_on(batch_sharding):
            params = averaged_params(state)
            sums, _ = compute_loss(params, state.extra, batch, state.rng, train=False)
        return sums

    return jax.jit(eval_step)


def _trace(
    loss: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    config: TrainConfig,
    accum_dtype: Any,
    rows: NamedSharding,
    fetch: Callable[[PyTree], PyTree] | None = None,
) -> Callable[..., tuple[TrainState, StepOutput]]:
    """The step as a plain function of arrays."""
    # Some look at the loss, e.g. optax.contrib.reduce_on_plateau.
    optimizer = optax.with_extra_args_support(optimizer)
    gradients = functools.partial(
        sum_gradients,
        loss,
        num_microbatches=config.num_microbatches,
        accum_dtype=accum_dtype,
    )

    def train_step(
        state: TrainState, batch: Batch, control: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        with rows_on(rows):
            grads, sums, extra = gradients(
                state.params,
                extra=state.extra,
                batch=batch,
                rng=jax.random.fold_in(state.rng, state.step),
            )
        grads, metrics = average(grads, sums, like=state.params)
        if fetch is not None:
            state = state.replace(opt_state=fetch(state.opt_state))
        return apply_update(
            optimizer,
            state,
            grads=grads,
            metrics=metrics,
            extra=extra,
            control=control,
            config=config,
        )

    return train_step


def _in_compute_dtype(loss: LossFn, precision: Precision) -> LossFn:
    def compute_loss(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        params = precision.cast_compute(params)
        return loss(params, extra, batch, rng, train=train)

    return compute_loss
