"""A layer of anybody's model under a remat plan: plain functions, Linen, NNX.

World: device. Floor: beside `layers`, above `policies`. Read
`jaxft/remat/policies.py` before this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx

from jaxft.remat import policies


def wrap(
    layer_fn: Callable[..., Any], *, layer: int, plan: str, in_scan: bool = False
) -> Callable[..., Any]:
    """A layer whose backward pass keeps what the plan says of it.

    The values that a plan can name (`names(attn,up)`, `offload(attn)`) are those that
    the layer marks with `jax.ad_checkpoint.checkpoint_name(x, "attn")`: mark what is
    dear to compute and small to keep, the result of a product rather than what is
    computed from it, once, under the same name in each layer.

    Args:
        layer_fn: a function of arrays, and of NNX modules (whose state it may change);
            or a Linen module class, of which the wrapped class is returned.
        layer: its number, from 0.
        plan: one policy, or `layers:policy` entries; as the setting `remat.plan`.
        in_scan: it is the body of a `lax.scan` (or `nn.scan`, `nnx.scan`). Elsewhere
            the compiler is kept from merging the second computation with the first
            (`prevent_cse`), which in a loop would only cost fusions.

    Returns:
        What is called as `layer_fn` is; `layer_fn` itself under `none`.

    Raises:
        ConfigError: the plan is none, or says nothing of this layer.
    """
    policy = policies.policy_of(plan, layer)
    if policy.kind is policies.Kind.NONE:
        return layer_fn
    options = policies.checkpoint_options(policy, in_scan=in_scan)
    if isinstance(layer_fn, type):
        return linen.remat(layer_fn, **options)

    @functools.wraps(layer_fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        transform = nnx.remat if _has_module((args, kwargs)) else jax.checkpoint
        given = functools.partial(layer_fn, **kwargs) if kwargs else layer_fn
        return transform(given, **options)(*args)

    return run


def _has_module(tree: Any) -> bool:
    is_module = lambda x: isinstance(x, nnx.Module)
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))
