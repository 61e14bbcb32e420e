"""Low-rank adapters over a frozen model: fine-tuning that changes few bytes.

World: device. Floor: above `transformer`. Read `jaxft/models/adapters.py` before this
file and `configs/tiny_lora.py`, which trains it, after it.

Each adapted matrix W is used as W + (alpha / rank) A B (Hu et al., arXiv:2106.09685).
The parameters are `{"base": ..., "lora": ...}`; no gradient reaches `base`, and with
`optimizer.trainable = "lora/**"` it has no optimizer state either, so that nearly all
bytes of a checkpoint are those of the one before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxft.config import ConfigError, LossConfig, ModelConfig, RematConfig
from jaxft.models import transformer
from jaxft.models.adapters import from_nnx
from jaxft.patterns import Patterns
from jaxft.types import Batch, Model, PyTree, Sums, Variables

_OPTIONS = {"rank": 8, "alpha": 16.0, "adapted": "layers/mlp/**"}


def make_model(config: ModelConfig, remat: RematConfig) -> Model:
    """A `model.factory`: the transformer and its loss, adapted; no `loss.factory`.

    Options: `rank` and `alpha` of the adapters, and `adapted`, the globs of the
    matrices that get one.

    Raises:
        ConfigError: an unknown option, or `adapted` names no matrix.
    """
    options = dict(config.options)
    if unknown := sorted(options.keys() - _OPTIONS):
        raise ConfigError(f"model.options.{unknown[0]}", f"there are {list(_OPTIONS)}")
    chosen: dict[str, Any] = {**_OPTIONS, **options}
    if not (isinstance(chosen["rank"], int) and chosen["rank"] > 0):
        raise ConfigError("model.options.rank", "must be a positive integer")
    plain = ModelConfig(
        **{
            name: getattr(config, name)
            for name in ModelConfig.__slots__
            if name != "options"
        }
    )
    base = from_nnx(
        transformer.make_model(plain, remat),
        transformer.next_token_loss(LossConfig()),
    )
    return with_lora(
        base,
        rank=chosen["rank"],
        alpha=float(chosen["alpha"]),
        adapted=Patterns(chosen["adapted"]),
    )


def with_lora(model: Model, *, rank: int, alpha: float, adapted: Patterns) -> Model:
    """`model` with adapters beside frozen parameters.

    Args:
        model: what to adapt.
        rank: inner dim of the adapters.
        alpha: the product is scaled by alpha / rank.
        adapted: leaves to adapt; the last two dims are the matrix, those before it
            a stack of matrices.

    Returns:
        A model with parameters `{"base": tree, "lora": {path: {"a", "b"}}}`; `b`
        starts as zeros, so that it starts as `model` itself.
    """

    def init(key: jax.Array) -> Variables:
        base_key, key = jax.random.split(key)
        variables = model.init(base_key)
        lora = {}
        for path, leaf in _adapted(variables.params, adapted).items():
            *stack, width, out = leaf.shape
            key, own = jax.random.split(key)
            a = jax.random.normal(own, (*stack, width, rank), leaf.dtype)
            lora[path] = {
                "a": a * width**-0.5,
                "b": jnp.zeros((*stack, rank, out), leaf.dtype),
            }
        return Variables({"base": variables.params, "lora": lora}, variables.extra)

    def loss(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        merged = merge_lora(params, scale=alpha / rank)
        return model.loss(merged, extra, batch, rng, train=train)

    return Model(init, loss, _axes(model, adapted))


def merge_lora(params: PyTree, *, scale: float) -> PyTree:
    """The adapted parameters as one tree like `params["base"]`."""

    def leaf(keys: Any, w: jax.Array) -> jax.Array:
        w = jax.lax.stop_gradient(w)
        pair = params["lora"].get(_path(keys))
        if pair is None:
            return w
        return w + (scale * (pair["a"] @ pair["b"])).astype(w.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params["base"])


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _adapted(params: PyTree, adapted: Patterns) -> dict[str, jax.Array]:
    """Path -> the matrices that get an adapter.

    Raises:
        ConfigError: there is none, or it is no matrix.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    chosen = {
        path: leaf
        for keys, leaf in leaves
        if adapted.match(path := _path(keys)) and leaf.ndim >= 2
    }
    if not chosen:
        raise ConfigError(
            "model.options.adapted", f"{adapted.text!r} names no matrix of the model"
        )
    return chosen


def _axes(model: Model, adapted: Patterns) -> PyTree | None:
    """Logical names: an adapter is split as its matrix is, but for the rank."""
    if model.axes is None:
        return None
    shapes = jax.eval_shape(model.init, jax.random.key(0)).params
    treedef = jax.tree.structure(shapes)
    names = dict(
        zip(
            (_path(k) for k, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]),
            treedef.flatten_up_to(model.axes),
            strict=True,
        )
    )
    lora = {
        path: {"a": (*of[:-1], None), "b": (*of[:-2], None, of[-1])} if of else None
        for path, of in ((path, names[path]) for path in _adapted(shapes, adapted))
    }
    return {"base": model.axes, "lora": lora}
