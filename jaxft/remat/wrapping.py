"""`remat.wrap`: a plan for the layers of anybody's model.

World: device, traced. Floor: `remat`, above `estimate`. Read
`jaxft/remat/policies.py` before.

Conventions. A layer is a function `(parameters, *activations) -> activations`: with
Linen `lambda variables, x: block.apply(variables, x)`, with NNX
`lambda block, x: block(x)`, otherwise any function. `parameters` is a tree of arrays
or an NNX module. What a plan can name is marked inside the layer with
`jax.ad_checkpoint.checkpoint_name(value, "name")`: mark the results of the matrix
products (they are dear to compute again) and of attention, before they are changed;
the same name may stand at several values, which are then kept together. A name that
is marked nowhere keeps nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxft.remat.estimate import hear_layers
from jaxft.remat.policies import Policy, policy_of
from jaxft.remat.policies import wrap as apply_policy


def wrap(
    layer_fn: Callable[..., Any],
    *,
    layer: int,
    plan: str | Sequence[Policy],
    in_scan: bool = False,
) -> Callable[..., Any]:
    """`layer_fn` under what the plan has for layer number `layer`.

    Args:
        layer_fn: (parameters, *activations) -> activations; it changes no module.
        layer: from 0.
        plan: as `remat.plan` without `auto`, or one policy a layer.
        in_scan: it is called in the body of a `lax.scan`.

    Raises:
        ConfigError: the plan is wrong or has nothing for this layer.
    """
    policy = policy_of(plan, layer) if isinstance(plan, str) else plan[layer]
    inner = apply_policy(layer_fn, policy, in_scan=in_scan)

    # As the layers of a stack are called; like layers are known by what it wraps.
    @functools.wraps(layer_fn)
    def carried(activations: Any, parameters: Any) -> tuple[Any, None]:
        return layer_fn(parameters, *activations), None

    def wrapped(parameters: Any, *activations: Any) -> Any:
        hear_layers(carried, activations, parameters)
        return inner(parameters, *activations)

    return wrapped
