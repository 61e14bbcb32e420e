"""The device's side of injected faults: a poisoned loss, a flipped bit, no memory.

World: device. Floor: a peer of `data` and `faults`. Read `jaxft/faults/inject.py`
before this file. Nothing of it is in a run whose plan has no such fault.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxft.patterns import Patterns
from jaxft.types import Batch, LossFn, PyTree, Sums

# More than any device has: the allocator itself refuses it.
_TOO_MANY_BYTES = 2**46


def with_poison(loss: LossFn, *, loss_field: str, gradient_field: str) -> LossFn:
    """A loss whose sum, and whose gradient, are multiplied by fields of the batch.

    Args:
        loss: it never sees the fields; a batch without them is as it was.
        loss_field: float [rows], factors of the value.
        gradient_field: float [rows], factors of the gradient.
    """

    def poisoned(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        plain = dict(batch)
        value, gradient = plain.pop(loss_field, None), plain.pop(gradient_field, None)
        sums, extra = loss(params, extra, plain, rng, train=train)
        if value is None or gradient is None:
            return sums, extra
        total, weight = sums["loss"]
        # All rows of a batch have the same; NaN wins a maximum.
        total = _scale(total, jnp.max(value), jnp.max(gradient))
        return {**sums, "loss": (total, weight)}, extra

    return poisoned


@jax.custom_vjp
def _scale(total: jax.Array, value: jax.Array, gradient: jax.Array) -> jax.Array:
    """`total * value`, with the gradient of `total * gradient`."""
    del gradient
    return total * value.astype(total.dtype)


def _scale_fwd(
    total: jax.Array, value: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _scale(total, value, gradient), gradient


def _scale_bwd(gradient: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    zero = jnp.zeros((), gradient.dtype)
    return cotangent * gradient.astype(cotangent.dtype), zero, zero


_scale.defvjp(_scale_fwd, _scale_bwd)


def flip_bit(state: PyTree, *, leaf: str, seed: str) -> tuple[PyTree, str]:
    """Changes one bit of one leaf, as a faulty device would: silently.

    Args:
        state: any tree of arrays; it is not donated.
        leaf: globs of leaf paths; the first that fits and is a float is changed;
            empty is the first of the parameters.
        seed: chooses element and bit; exponent bits stay, so that all stays finite.

    Returns:
        The new tree, and what was changed.

    Raises:
        ValueError: no such leaf.
    """
    patterns = Patterns(leaf or "params/**")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    values = [value for _, value in leaves]
    for place, (path, value) in enumerate(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        if not (patterns.match(name) and is_float and value.size):
            continue
        rng = random.Random(f"jaxft {seed}")
        index = np.unravel_index(rng.randrange(value.size), value.shape)
        bit = rng.randrange(jnp.finfo(value.dtype).nmant)
        words = np.dtype(f"uint{8 * value.dtype.itemsize}")
        host = np.array(value)
        host.view(words)[index] ^= words.type(1 << bit)
        values[place] = jax.make_array_from_callback(
            value.shape, value.sharding, lambda part, host=host: host[part]
        )
        where = f"bit {bit} of {name}{[int(i) for i in index]}"
        return jax.tree.unflatten(treedef, values), where
    raise ValueError(f"no float leaf is named by {patterns.text!r}")


def exhaust_memory() -> None:
    """Asks the device for more than it has.

    Raises:
        JaxRuntimeError: RESOURCE_EXHAUSTED, from the device's own allocator.
    """
    jnp.zeros(_TOO_MANY_BYTES, jnp.uint8).block_until_ready()
