"""A training step, and an evaluation, whose numbers no device count can change.

World: device. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/train/virtual_shards.py` before and `jaxft/train/step.py`, which chooses
between this and the plain step, after this file.

A step is a few programs instead of one: the sums over the virtual shards; on each
device alone the means and the norm, of whole gradients; and the update, each device
its part, in which no element needs another one. Nothing is fused across them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.config import ConfigError, TrainConfig
from jaxft.train.each_device import EachDevice, by_device
from jaxft.train.elementwise import find_sums
from jaxft.train.microbatch import sum_gradients
from jaxft.train.update import apply_update, average
from jaxft.train.virtual_shards import CompiledSums, ShardSums
from jaxft.types import Batch, LossFn, PyTree, StepOutput, Sums, TrainState

# The compiler of jax 0.12 computes an element of a small part of an array with other
# bits than the same element of the whole; that of 0.10 does not.
SPLIT_IS_EXACT = jax.__version_info__ < (0, 11)


class ShardStep:
    """The step in the fixed order; it has the methods of a jitted function.

    Args:
        loss: in its compute dtype.
        optimizer: of all parameters.
        config: of the step; `virtual_shards` is positive.
        accum_dtype: of the sums of gradients.
        state: shapes with shardings.
        rows: the sharding of a batch.

    Raises:
        ConfigError: the numbers would depend on the mesh all the same.
    """

    def __init__(
        self,
        loss: LossFn,
        optimizer: optax.GradientTransformation,
        *,
        config: TrainConfig,
        accum_dtype: Any,
        state: TrainState,
        rows: NamedSharding,
    ):
        # Some look at the loss, e.g. optax.contrib.reduce_on_plateau.
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._config = config
        self._accum_dtype = accum_dtype
        self._state = state
        _check(self._optimizer, config=config, state=state)

        def gradients(operands: PyTree, batch: Batch, key: jax.Array) -> PyTree:
            params, extra = operands
            grads, sums, _ = sum_gradients(
                loss,
                params,
                extra=extra,
                batch=batch,
                rng=key,
                num_microbatches=1,
                accum_dtype=accum_dtype,
            )
            return jax.tree.map(lambda g: g.astype(accum_dtype), grads), sums

        self._sums = ShardSums(
            gradients,
            num_shards=config.virtual_shards,
            rows=rows,
            operands=lambda state: (state.params, state.extra),
            key=jax.random.fold_in,
        )
        _check_split(state)
        mesh = rows.mesh
        self._whole = whole = NamedSharding(mesh, PartitionSpec())
        self._fits_in_place = all(
            x.dtype == accum_dtype for x in jax.tree.leaves(state.params)
        )
        words = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        shardings = jax.tree.map(lambda x: x.sharding, state)
        self._apply = jax.jit(
            self._trace_update,
            donate_argnums=0,
            in_shardings=(shardings, whole, whole, words),
            out_shardings=(shardings, whole),
        )
        self._compiled: dict[Any, CompiledStep] = {}

    def __call__(
        self, state: TrainState, batch: Batch, control: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        """One step; compiles at the first batch of these shapes."""
        shapes = tuple(
            (name, x.shape, str(x.dtype)) for name, x in sorted(batch.items())
        )
        if shapes not in self._compiled:
            self._compiled[shapes] = self.lower(state, batch, control).compile()
        return self._compiled[shapes](state, batch, control)

    def lower(self, state: TrainState, batch: Any, control: Any) -> Any:
        """What `compile()` makes a `CompiledStep` of."""
        return Lowered(lambda: self._compile(state, batch, control))

    def needed_bytes(self) -> int:
        """About what a step takes on one device, the state included."""
        here = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(self._state)
        )
        grads = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self._accum_dtype),
            self._state.params,
        )
        return here + self._sums.peak_bytes(self._state, grads)

    def _compile(self, state: TrainState, batch: Batch, control: Any) -> CompiledStep:
        sums = self._sums.compile(state, batch)
        means = EachDevice(
            lambda grads, sums: average(grads, sums, like=self._state.params),
            sums.out_info,
            out=self._whole,
            donate_argnums=(0,) if self._fits_in_place else (),
        )
        apply = self._apply.lower(state, *means.out_info, control)
        return CompiledStep(sums, means, apply.compile())

    def _trace_update(
        self,
        state: TrainState,
        grads: PyTree,
        metrics: dict[str, jax.Array],
        control: jax.Array,
    ) -> tuple[TrainState, StepOutput]:
        return apply_update(
            self._optimizer,
            state,
            grads=grads,
            metrics=metrics,
            extra=state.extra,
            control=control,
            config=self._config,
        )


class ShardEval:
    """The evaluation in the fixed order: (state, batch) -> sums.

    Args:
        loss: in its compute dtype.
        averaged: a state -> the parameters to evaluate.
        num_shards: as in `ShardSums`.
        rows: the sharding of a batch.
    """

    def __init__(
        self,
        loss: LossFn,
        *,
        averaged: Callable[[TrainState], PyTree],
        num_shards: int,
        rows: NamedSharding,
    ):
        def compute(operands: PyTree, batch: Batch, key: jax.Array) -> Sums:
            params, extra = operands
            return loss(params, extra, batch, key, train=False)[0]

        self._sums = ShardSums(
            compute,
            num_shards=num_shards,
            rows=rows,
            operands=lambda state: (averaged(state), state.extra),
            key=lambda rng, _: rng,
        )

    def __call__(self, state: TrainState, batch: Batch) -> Sums:
        """Compiles and runs; whoever has many batches keeps what `lower` gives."""
        return self._sums.compile(state, batch)(state, batch)

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """What `compile()` makes a `CompiledSums` of."""
        return Lowered(lambda: self._sums.compile(state, batch))


class Lowered:
    """Stands where a jitted function has a `jax.stages.Lowered`."""

    def __init__(self, compile_all: Callable[[], Any]):
        self._compile_all = compile_all

    def compile(self) -> Any:
        """Compiles all the programs."""
        return self._compile_all()


class CompiledStep:
    """(state, batch, control) -> (state, output); donates the old state.

    Attributes:
        programs: what it runs, by name.
    """

    def __init__(
        self,
        sums: CompiledSums,
        means: EachDevice,
        apply: jax.stages.Compiled,
    ):
        self._sums = sums
        self._average = means
        self._apply = apply
        self.programs: Mapping[str, jax.stages.Compiled] = {
            **sums.programs,
            "average": means.program,
            "apply": apply,
        }

    def __call__(
        self, state: TrainState, batch: Batch, control: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        """One step."""
        grads, metrics = self._average(by_device(self._sums(state, batch)))
        return self._apply(state, grads, metrics, control)


def _is_split(state: TrainState) -> bool:
    updated = jax.tree.leaves((state.params, state.opt_state))
    return not all(x.sharding.is_fully_replicated for x in updated)


def _check_split(state: TrainState) -> None:
    if _is_split(state) and not SPLIT_IS_EXACT:
        raise ConfigError(
            "train.virtual_shards",
            f"needs whole parameters with jax {jax.__version__}, which updates a part "
            "of one with other bits than the whole: use mesh.fsdp=1, or jax 0.10",
        )


def _check(
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    config: TrainConfig,
    state: TrainState,
) -> None:
    if config.num_microbatches > 1:
        raise ConfigError(
            "train.num_microbatches",
            f"is {config.num_microbatches}, but train.virtual_shards says in how many "
            "parts a batch is computed: set it to 1",
        )
    if jax.tree.leaves(state.extra):
        raise ConfigError(
            "train.virtual_shards",
            "the model has collections beside its parameters (batch statistics), "
            "which depend on how a batch is split: set it to 0",
        )
    if not _is_split(state):
        return
    loss = jax.ShapeDtypeStruct((), "float32")
    found = find_sums(
        lambda grads, opt_state, params, loss: optimizer.update(
            grads, opt_state, params, value=loss
        ),
        state.params,
        state.opt_state,
        state.params,
        loss,
    )
    if found:
        raise ConfigError(
            "train.virtual_shards",
            f"the optimizer adds up over parameters ({', '.join(sorted(found))}), in "
            "an order that depends on how they are split: use mesh.fsdp=1",
        )
