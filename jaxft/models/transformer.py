"""The shipped language model: a decoder-only transformer in Flax NNX.

World: device. Floor: above `remat`, beside the other capabilities. Read
`jaxft/remat/layers.py` before this file and `jaxft/models/adapters.py`, which
turns the module into pure functions, after it.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP.
It computes in the dtype of the parameters that it is given; norms, rotations,
softmax and logits are float32 whatever that is. Every parameter carries logical axis
names; Flax itself never places anything (`eager_sharding=False`).

Shape letters: B rows, T positions, D width, H query heads, G key and value heads,
K head_dim, F mlp width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxft.config import ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models.losses import softmax_sums
from jaxft.parallel.activations import constrain_rows, gather_features
from jaxft.remat.layers import apply_layers, scan_layers
from jaxft.remat.policies import Policy, parse_plan
from jaxft.types import Batch, Sums

# What a remat plan can name: rotated queries, keys and values; the attention's
# result before its projection; the MLP's two products before they are joined.
CHECKPOINT_NAMES = ("qkv", "attn", "gate", "up")

Rope = tuple[jax.Array, jax.Array]


def make_model(
    config: ModelConfig, remat: RematConfig
) -> Callable[[nnx.Rngs], Transformer]:
    """The default `model.factory`.

    Returns:
        A builder: called with `nnx.Rngs`, it makes the module.

    Raises:
        ConfigError: dimensions that do not fit together, or a wrong remat plan.
    """
    _check(config)
    plan = parse_plan(remat.plan, config.num_layers, names=CHECKPOINT_NAMES)
    return lambda rngs: Transformer(config, plan, rngs=rngs)


def next_token_loss(config: LossConfig) -> Callable[[jax.Array, Batch], Sums]:
    """The default `loss.factory`: mean nats a token; it has no options.

    Returns:
        (logits `[B, T, V]`, batch) -> sums. The batch has `targets`, int32
        `[B, T]`, and may have `weights` `[B, T]`, 0 for padding.

    Raises:
        ConfigError: an option is set.
    """
    if unknown := sorted(config.options):
        raise ConfigError(
            f"loss.options.{unknown[0]}", "next_token_loss has no options"
        )

    def loss(logits: jax.Array, batch: Batch) -> Sums:
        return softmax_sums(logits, batch["targets"], weights=batch.get("weights"))

    return loss


def _check(config: ModelConfig) -> None:
    width, heads = config.width, config.num_heads
    kv_heads = config.num_kv_heads or heads
    if width % heads:
        raise ConfigError(
            "model.num_heads", f"{heads} heads do not divide model.width {width}"
        )
    if heads % kv_heads:
        raise ConfigError(
            "model.num_kv_heads",
            f"{kv_heads} key and value heads do not divide model.num_heads {heads}",
        )
    if (width // heads) % 2:
        raise ConfigError(
            "model.num_heads",
            f"a head of {width // heads} features is odd: rotary positions need pairs",
        )
    if unknown := sorted(config.options):
        raise ConfigError(
            f"model.options.{unknown[0]}", "the transformer has no options"
        )


def _param(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, names: tuple[str, ...], std: float
) -> nnx.Param:
    value = std * jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last dim, in float32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(
            jnp.ones((width,)), out_sharding=("embed",), eager_sharding=False
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * jax.lax.rsqrt(power + 1e-6) * scale[None, None]).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, heads = config.width, config.num_heads
        kv_heads = config.num_kv_heads or heads
        head_dim = width // heads
        std = width**-0.5
        kv_shape = (width, kv_heads, head_dim)
        kv_names = ("embed", "kv_heads", "head_dim")
        self.query = _param(
            rngs,
            (width, heads, head_dim),
            names=("embed", "heads", "head_dim"),
            std=std,
        )
        self.key = _param(rngs, kv_shape, names=kv_names, std=std)
        self.value = _param(rngs, kv_shape, names=kv_names, std=std)
        self.out = _param(
            rngs,
            (heads, head_dim, width),
            names=("heads", "head_dim", "embed"),
            std=std * _residual_scale(config),
        )

    def __call__(self, x: jax.Array, rope: Rope) -> jax.Array:
        """`[B, T, D]` -> `[B, T, D]`."""
        query = _rotate(jnp.einsum("btd,dhk->bthk", x, self.query[...]), rope)
        key = _rotate(jnp.einsum("btd,dgk->btgk", x, self.key[...]), rope)
        value = jnp.einsum("btd,dgk->btgk", x, self.value[...])
        query, key, value = (checkpoint_name(a, "qkv") for a in (query, key, value))
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="xla"
        )
        mixed = checkpoint_name(mixed, "attn")
        return jnp.einsum("bthk,hkd->btd", mixed, self.out[...])


class SwiGLU(nnx.Module):
    """The gated MLP."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.width
        hidden = config.mlp_width or -(-width * 8 // 3 // 8) * 8
        into = {"names": ("embed", "mlp"), "std": width**-0.5}
        self.gate = _param(rngs, (width, hidden), **into)
        self.up = _param(rngs, (width, hidden), **into)
        self.down = _param(
            rngs,
            (hidden, width),
            names=("mlp", "embed"),
            std=hidden**-0.5 * _residual_scale(config),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` -> `[B, T, D]`."""
        gate = checkpoint_name(x @ self.gate[...], "gate")
        up = checkpoint_name(x @ self.up[...], "up")
        return (jax.nn.silu(gate) * up) @ self.down[...]


class Block(nnx.Module):
    """One layer: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array, rope: Rope) -> jax.Array:
        """`[B, T, D]` -> `[B, T, D]`."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Token ids `[B, T]` -> float32 logits `[B, T, V]`.

    `layers` is one `Block` whose parameters are stacks `[L, ...]`, or a list of
    blocks, as `config.scan_layers` says; the values at the start are the same.
    """

    def __init__(
        self, config: ModelConfig, plan: tuple[Policy, ...], *, rngs: nnx.Rngs
    ):
        self.plan = plan
        self.rope_theta = config.rope_theta
        self.head_dim = config.width // config.num_heads
        shape, std = (config.vocab_size, config.width), config.width**-0.5
        self.embedding = _param(rngs, shape, names=("vocab", "embed"), std=std)
        make_block = lambda key: Block(config, rngs=nnx.Rngs(key))
        keys = jax.random.split(rngs.params(), config.num_layers)
        if config.scan_layers:
            stacked = nnx.vmap(
                make_block, transform_metadata={nnx.PARTITION_NAME: "layers"}
            )
            self.layers = stacked(keys)
        else:
            self.layers = nnx.List([make_block(key) for key in keys])
        self.final_norm = RMSNorm(config.width)
        self.head = nnx.data(None)
        if not config.tied_head:
            self.head = _param(rngs, shape[::-1], names=("embed", "vocab"), std=std)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` -> `[B, T, V]`."""
        embedding = self.embedding[...]
        x = constrain_rows(gather_features(embedding)[tokens])
        rope = make_rope(tokens.shape[1], self.head_dim, theta=self.rope_theta)
        x = self._apply_blocks(x, rope)
        x = self.final_norm(x)
        head = embedding.T if self.head is None else self.head[...]
        return jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)

    def _apply_blocks(self, x: jax.Array, rope: Rope) -> jax.Array:
        def apply_block(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return constrain_rows(block(x, rope)), None

        # A module is a tree of arrays: a stacked block scans like any other.
        if isinstance(self.layers, nnx.List):
            blocks = list(self.layers)
            return apply_layers(apply_block, x, layers=blocks, plan=self.plan)[0]
        return scan_layers(apply_block, x, stack=self.layers, plan=self.plan)[0]


def _residual_scale(config: ModelConfig) -> float:
    """Keeps the residual stream's variance at the start independent of the depth."""
    return 1.0 / math.sqrt(2 * config.num_layers)


def make_rope(num_positions: int, head_dim: int, *, theta: float) -> Rope:
    """Cosines and sines of the rotary angles, float32 `[1, T, 1, K/2]` each."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequency[None]
    angle = angle[None, :, None]
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Turns each pair (feature i, feature i + K/2) of `[B, T, H, K]` by its angle."""
    cos, sin = rope
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (left * cos - right * sin, right * cos + left * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
