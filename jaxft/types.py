"""The declared types that the device side hands around.

World: device. Floor: above `events`, below everything that computes. Read
`jaxft/train/step.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from flax import struct

PyTree = Any

# One global batch: name -> array [global_batch, ...], sharded over its first dim.
Batch = Mapping[str, jax.Array]

# Metric name -> (sum, weight), both float32 scalars. `loss` must be among them.
# Sums and weights, not means: no bias from padding or from how a batch is split.
Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class Variables(NamedTuple):
    """What a model starts with.

    Attributes:
        params: tree of the arrays that the optimizer updates.
        extra: tree of the other collections (batch statistics); `{}` for none.
    """

    params: PyTree
    extra: PyTree


class LossFn(Protocol):
    """Sums over one batch or microbatch, and the new `extra`."""

    def __call__(
        self,
        params: PyTree,
        extra: PyTree,
        batch: Batch,
        rng: jax.Array,
        *,
        train: bool,
    ) -> tuple[Sums, PyTree]:
        """Computes the sums; `rng` is a typed key, `train` is static."""
        ...


class Model(NamedTuple):
    """A model as the step builder sees it: pure functions over trees.

    Attributes:
        init: typed key -> `Variables`; traceable, so that it can run sharded.
        loss: a `LossFn`.
        axes: logical axis names for `params`: the same tree with a tuple of names
            (or None) a dim at each leaf, a leaf of None for "no names"; None where
            the model is not annotated.
    """

    init: Callable[[jax.Array], Variables]
    loss: LossFn
    axes: PyTree | None = None


class TrainState(struct.PyTreeNode):
    """All that the traced step updates, and all that a checkpoint's state holds.

    Attributes:
        step: int32 scalar, finished step attempts, guarded ones included.
        num_skipped: int32 scalar, how many of them were guarded.
        params: tree of arrays.
        opt_state: the optax state of `params`.
        rng: scalar typed key; it never changes: a step uses `fold_in(rng, step)`.
        extra: the model's other collections.
    """

    step: jax.Array
    num_skipped: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array
    extra: PyTree


class StepOutput(struct.PyTreeNode):
    """What one step reports, still on the device and replicated.

    Attributes:
        metrics: name -> float32 scalar: means over the batch, and `grad_norm`.
        finite: bool scalar: the update was finite (and so was applied).
        control: int32 scalar: the control words of all processes, or-ed.
    """

    metrics: dict[str, jax.Array]
    finite: jax.Array
    control: jax.Array


class TrainStep(Protocol):
    """One training step; donates `state`."""

    def __call__(
        self, state: TrainState, batch: Batch, control: jax.Array
    ) -> tuple[TrainState, StepOutput]:
        """Returns the next state and what to report."""
        ...
