"""A layer of anybody's model under a remat plan: plain functions, Linen, NNX.

World: device, traced. Floor: `remat`, above `estimate`. Read
`jaxft/remat/policies.py` before this file.

What a plan can name is marked inside the layer with
`jax.ad_checkpoint.checkpoint_name(value, "name")`: mark the results of the matrix
products (they are dear to compute again) and of attention, before they are changed.
The same name may stand at several values, which are then kept together. A name that is
marked nowhere keeps nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen, nnx

from jaxft.remat import policies
from jaxft.remat.estimate import hear_layers
from jaxft.remat.policies import Kind, Policy


def wrap(
    layer_fn: Callable[..., Any],
    *,
    layer: int,
    plan: str | Sequence[Policy],
    in_scan: bool = False,
) -> Callable[..., Any]:
    """A layer whose backward pass keeps what the plan says of it.

    Args:
        layer_fn: `(parameters, *activations) -> activations`, where `parameters` is a
            tree of arrays, or an NNX module, whose state it may change; or a Linen
            module class. `remat.plan=auto` hears of functions, not of classes.
        layer: its number, from 0.
        plan: as the setting `remat.plan` without `auto`, or one policy a layer.
        in_scan: it is the body of a `lax.scan` (or `nn.scan`, `nnx.scan`). Elsewhere
            the compiler is kept from merging the second computation with the first
            (`prevent_cse`), which in a loop would only cost fusions.

    Returns:
        What is called as `layer_fn` is; of a class, the wrapped class.

    Raises:
        ConfigError: the plan is none, or says nothing of this layer.
    """
    is_text = isinstance(plan, str)
    policy = policies.policy_of(plan, layer) if is_text else plan[layer]
    options = policies.checkpoint_options(policy, in_scan=in_scan)
    if isinstance(layer_fn, type):
        return (
            layer_fn if policy.kind is Kind.NONE else linen.remat(layer_fn, **options)
        )

    @functools.wraps(layer_fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = functools.partial(layer_fn, **kwargs) if kwargs else layer_fn
        _tell_of(given, *args)
        if policy.kind is Kind.NONE:
            return given(*args)
        transform = nnx.remat if _has_module(args) else jax.checkpoint
        return transform(given, **options)(*args)

    return run


def _tell_of(layer_fn: Callable[..., Any], parameters: Any, *activations: Any) -> None:
    # As the layers of a stack are called; like layers are known by what it wraps.
    @functools.wraps(layer_fn)
    def carried(activations: Any, parameters: Any) -> tuple[Any, None]:
        return layer_fn(parameters, *activations), None

    hear_layers(carried, activations, parameters)


def _has_module(tree: Any) -> bool:
    is_module = lambda x: isinstance(x, nnx.Module)
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))
