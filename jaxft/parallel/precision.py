"""Dtypes of stored parameters, of computation and of gradient sums.

World: device. Floor: `parallel`, above `types`. Read `jaxft/config.py`
(`PrecisionConfig`) before this file and `jaxft/train/step.py` after it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.config import ConfigError, PrecisionConfig
from jaxft.types import PyTree

_DTYPES: dict[str, Any] = {
    "float64": jnp.float64,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
}
_WIDE = frozenset(np.dtype(known) for known in (*_DTYPES.values(), jnp.float16))


@dataclasses.dataclass(frozen=True)
class Precision:
    """The three dtypes.

    Only leaves of one of the four wide floating dtypes are cast. Integers, bools,
    typed keys and complex numbers are no subject of precision, and float8 leaves
    are quantised values whose scales live elsewhere: all these stay as they are, as
    do leaves without a dtype.

    Attributes:
        param_dtype: stored parameters.
        compute_dtype: forward and backward pass.
        accum_dtype: sums of gradients over microbatches.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    accum_dtype: np.dtype

    def cast_params(self, tree: PyTree) -> PyTree:
        """The tree with its floating leaves in `param_dtype`."""
        return _cast(tree, self.param_dtype)

    def cast_compute(self, tree: PyTree) -> PyTree:
        """The tree with its floating leaves in `compute_dtype`."""
        return _cast(tree, self.compute_dtype)


def make_precision(config: PrecisionConfig | None = None) -> Precision:
    """Resolves the dtype names.

    Raises:
        ConfigError: a name is not one of float64, float32 and bfloat16, or it is
            float64 and JAX's 64-bit mode is off.
    """
    config = PrecisionConfig() if config is None else config
    return Precision(
        **{
            field.name: _resolve(field.name, getattr(config, field.name))
            for field in dataclasses.fields(Precision)
        }
    )


def _resolve(field: str, name: str) -> np.dtype:
    if name == "float16":
        raise ConfigError(
            f"precision.{field}",
            "float16 ends at 65504 and a loss is summed without a scale: gradients "
            "overflow; use bfloat16",
        )
    if name not in _DTYPES:
        raise ConfigError(
            f"precision.{field}", f"{name!r} is not one of {', '.join(_DTYPES)}"
        )
    if jax.dtypes.canonicalize_dtype(_DTYPES[name]) != _DTYPES[name]:
        # JAX would make it float32 without a word.
        raise ConfigError(
            f"precision.{field}",
            "float64 needs JAX's 64-bit mode: set JAX_ENABLE_X64=1",
        )
    return np.dtype(_DTYPES[name])


def _cast(tree: PyTree, dtype: np.dtype) -> PyTree:
    def cast(leaf: Any) -> Any:
        if getattr(leaf, "dtype", None) not in _WIDE:
            return leaf
        return leaf.astype(dtype)

    return jax.tree.map(cast, tree)
