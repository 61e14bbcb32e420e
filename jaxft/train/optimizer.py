"""The shipped optimizer: AdamW with warm-up and cosine decay.

World: device. Floor: a peer of `data` and `checkpoint`. Read `jaxft/train/state.py`
next. One's own optimizer enters as `optimizer.factory`, any function from an
`OptimizerConfig` to an `optax.GradientTransformation`.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxft.config import ConfigError, OptimizerConfig, Schedule
from jaxft.patterns import Patterns


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Update count -> learning rate.

    The count is optax's own and lives in the state: guarded steps do not advance
    it, and a resume goes on where the saved run was.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    peak = config.learning_rate
    if config.schedule is Schedule.CONSTANT:
        after: optax.Schedule = optax.constant_schedule(peak)
    else:
        decay_steps = config.decay_steps - config.warmup_steps
        if decay_steps <= 0:
            raise ConfigError(
                "optimizer.warmup_steps",
                f"{config.warmup_steps} leaves no update of optimizer.decay_steps "
                f"{config.decay_steps} for the decay: lower it, or train longer "
                "(decay_steps follows train.num_steps)",
            )
        after = optax.cosine_decay_schedule(peak, decay_steps, config.end_fraction)
    if config.warmup_steps == 0:
        return after
    # From the first update on the rate is positive: step 0 also learns.
    warmup = optax.linear_schedule(
        peak / (config.warmup_steps + 1), peak, config.warmup_steps
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); the step clips."""
    return optax.adamw(
        make_schedule(config),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def train_only(
    optimizer: optax.GradientTransformation, trainable: Patterns
) -> optax.GradientTransformation:
    """`optimizer` for some parameters; the others stay, and have no state.

    Args:
        optimizer: updates those whose path in the parameters `trainable` names.
        trainable: globs; what names everything leaves `optimizer` as it is.

    Raises:
        ConfigError: at `init`, when no parameter is named.
    """
    if trainable.text.strip() == "**":
        return optimizer

    def labels(params: Any) -> Any:
        def label(keys: Any, _: Any) -> str:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            return "trained" if trainable.match(path) else "frozen"

        tree = jax.tree_util.tree_map_with_path(label, params)
        if "trained" not in jax.tree.leaves(tree):
            raise ConfigError(
                "optimizer.trainable", f"{trainable.text!r} names no parameter"
            )
        return tree

    parts: Any = {"trained": optimizer, "frozen": optax.set_to_zero()}
    return optax.partition(parts, labels)


def decay_mask(params: Any) -> Any:
    """True for the leaves that weight decay acts on: matrices, by rank and name.

    Rank alone does not tell: the norm scales of stacked layers are matrices too.
    """

    def is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        return leaf.ndim >= 2 and name not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(is_decayed, params)
