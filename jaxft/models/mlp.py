"""A small multilayer perceptron: of windows of tokens, or of plain features.

World: device. Floor: beside `transformer`, above `remat`. Read
`jaxft/models/adapters.py` before this file and `configs/tiny_mlp.py`, which trains
it, after it.

Fed with token ids it predicts each next token from the last few ones, so that the
built-in corpora serve it too; with `model.options.num_features` it maps rows of
numbers to `model.options.num_outputs` numbers: classes or a regression.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxft.config import ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models.losses import softmax_sums, squared_sums
from jaxft.parallel.activations import constrain_rows, gather_features
from jaxft.remat.layers import apply_layers
from jaxft.remat.policies import Policy, parse_plan
from jaxft.types import Batch, Sums

# What a remat plan can name: the product of each hidden layer.
CHECKPOINT_NAMES = ("hidden",)


def make_model(
    config: ModelConfig, remat: RematConfig
) -> Callable[[nnx.Rngs], nnx.Module]:
    """A `model.factory`: `num_layers` hidden layers of `width` features.

    Options: `window`, tokens that a prediction reads (default 8); or `num_features`
    and `num_outputs` (default `vocab_size`), for inputs that are no tokens.

    Returns:
        A builder: called with `nnx.Rngs`, it makes a `TokenMLP`, or an `MLP` if
        `num_features` is set.

    Raises:
        ConfigError: an unknown or impossible option, or a wrong remat plan.
    """
    options = config.options
    accepted = ("num_features", "num_outputs", "window")
    _refuse_unknown(options, path="model.options", accepted=accepted)
    for name in options:
        if not (isinstance(options[name], int) and options[name] > 0):
            raise ConfigError(
                f"model.options.{name}",
                f"must be a positive integer, is {options[name]!r}",
            )
    plan = parse_plan(remat.plan, config.num_layers, names=CHECKPOINT_NAMES)
    chosen = {"num_outputs": config.vocab_size, "window": 8, **options.to_dict()}
    num_outputs, window = chosen["num_outputs"], chosen["window"]
    if "num_features" not in chosen:
        return lambda rngs: TokenMLP(config, plan, window=window, rngs=rngs)
    return lambda rngs: MLP(
        chosen["num_features"],
        config.width,
        num_outputs=num_outputs,
        plan=plan,
        rngs=rngs,
    )


def softmax_loss(config: LossConfig) -> Callable[[jax.Array, Batch], Sums]:
    """A `loss.factory`: cross-entropy of `targets`, integer class ids.

    `weights`, if the batch has them, count 0 for padding. It has no options.
    """
    _refuse_unknown(config.options, path="loss.options", accepted=())

    def loss(logits: jax.Array, batch: Batch) -> Sums:
        return softmax_sums(logits, batch["targets"], weights=batch.get("weights"))

    return loss


def squared_error(config: LossConfig) -> Callable[[jax.Array, Batch], Sums]:
    """A `loss.factory`: squared error of `targets`, the shape of the outputs.

    `weights`, if the batch has them, count 0 for padding. It has no options.
    """
    _refuse_unknown(config.options, path="loss.options", accepted=())

    def loss(outputs: jax.Array, batch: Batch) -> Sums:
        return squared_sums(outputs, batch["targets"], weights=batch.get("weights"))

    return loss


def _refuse_unknown(
    options: ml_collections.ConfigDict, *, path: str, accepted: Collection[str]
) -> None:
    if unknown := sorted(set(options) - set(accepted)):
        offer = ", ".join(accepted) or "none"
        raise ConfigError(f"{path}.{unknown[0]}", f"does not exist; options: {offer}")


class MLP(nnx.Module):
    """Features `[..., num_features]` -> outputs `[..., num_outputs]`."""

    def __init__(
        self,
        num_features: int,
        width: int,
        *,
        num_outputs: int,
        plan: tuple[Policy, ...],
        rngs: nnx.Rngs,
    ):
        self.plan = plan
        widths = [num_features] + [width] * len(plan)
        self.hidden = nnx.List(
            [
                _linear(wide, width, names=("embed", "mlp"), rngs=rngs)
                for wide in widths[:-1]
            ]
        )
        self.out = _linear(width, num_outputs, names=("embed", "vocab"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., num_features]` -> `[..., num_outputs]`."""

        def apply_layer(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            x = jax.nn.gelu(checkpoint_name(layer(x), "hidden"))
            return constrain_rows(x), None

        x, _ = apply_layers(apply_layer, x, layers=list(self.hidden), plan=self.plan)
        return self.out(x)


class TokenMLP(nnx.Module):
    """Token ids `[B, T]` -> logits `[B, T, V]`, from the last `window` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        plan: tuple[Policy, ...],
        *,
        window: int,
        rngs: nnx.Rngs,
    ):
        self.window = window
        shape = (config.vocab_size, config.width)
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), shape) * config.width**-0.5,
            out_sharding=("vocab", "embed"),
            eager_sharding=False,
        )
        self.mlp = MLP(
            window * config.width,
            config.width,
            num_outputs=config.vocab_size,
            plan=plan,
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` -> `[B, T, V]`."""
        num_positions = tokens.shape[1]
        x = constrain_rows(gather_features(self.embedding[...])[tokens])
        padded = jnp.pad(x, ((0, 0), (self.window - 1, 0), (0, 0)))
        views = [padded[:, i : i + num_positions] for i in range(self.window)]
        return self.mlp(jnp.concatenate(views, axis=-1))


def _linear(
    num_features: int, num_outputs: int, *, names: tuple[str, str], rngs: nnx.Rngs
) -> nnx.Linear:
    metadata = {"eager_sharding": False}
    return nnx.Linear(
        num_features,
        num_outputs,
        rngs=rngs,
        kernel_metadata={"out_sharding": names, **metadata},
        bias_metadata={"out_sharding": names[1:], **metadata},
    )
