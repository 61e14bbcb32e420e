"""Whether a function computes each element by itself, whatever the array is split by.

World: device, traced. Floor: a peer of `data` and `checkpoint`; used by
`jaxft/train/shard_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# Each element of the result from the same element of the operands, or moved, or
# chosen: exact in every order. What is not here counts as a sum.
_EXACT = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "bitcast_convert_type",
        "broadcast_in_dim",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "dynamic_slice",
        "dynamic_update_slice",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expand_dims",
        "expm1",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "optimization_barrier",
        "or",
        "pad",
        "polygamma",
        "population_count",
        "pow",
        "random_bits",
        "random_fold_in",
        "random_seed",
        "random_split",
        "random_unwrap",
        "random_wrap",
        "real",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_precision",
        "rem",
        "reshape",
        "rev",
        "round",
        "rsqrt",
        "select_n",
        "sharding_constraint",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "threefry2x32",
        "transpose",
        "xor",
    ]
)


def find_sums(function: Callable[..., Any], *args: Any) -> set[str]:
    """Names of the operations of `function` that may add up elements of an array.

    Args:
        function: traceable; it is traced, not run.
        args: arrays or shapes.

    Returns:
        The names; empty when the function is exact in every order.
    """
    return set(_search(jax.make_jaxpr(function)(*args).jaxpr))


def _search(jaxpr: core.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = list(_inner(equation.params))
        if inner:
            for part in inner:
                yield from _search(part)
            continue
        variables = (*equation.invars, *equation.outvars)
        shapes = [getattr(v.aval, "shape", ()) for v in variables]
        if equation.primitive.name in _EXACT or not any(shapes):
            continue
        yield equation.primitive.name


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """What a call, a branch or a loop contains."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
