"""What a device computes for a fingerprint: sums over its own part of an array.

World: device, traced. Floor: `parallel`. Read `jaxft/fingerprints.py`, which defines
the words and lanes, before this file and `jaxft/parallel/fingerprint.py` after it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import fingerprints

NUM_SUMS = 3  # low lane, high lane, non-finite elements

_NUM_WORDS = 1 << 32


def has_wide_index(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether the index of a word of such an array may have more than 32 bits."""
    num_words = max(1, fingerprints.num_bits(dtype) // 32)
    return math.prod(shape) * num_words > _NUM_WORDS


def _index_dtype(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jnp.uint64 if has_wide_index(shape, dtype) else jnp.uint32


def block_sums(
    parts: jax.Array, *, base: Any, shape: tuple[int, ...], num_elements: int
) -> jax.Array:
    """`partial_sums` in a loop over blocks of at most so many elements; traced."""
    size = math.prod(parts.shape[1:])
    if size <= num_elements or max(parts.shape) >= 1 << 31:  # no index of a block
        return partial_sums(parts, base=base, shape=shape)
    axis = next(axis for axis in range(1, parts.ndim) if parts.shape[axis] > 1)
    num_rows = parts.shape[axis]
    most = max(1, num_elements * num_rows // size)
    # With rows left over, the program would have two bodies.
    even = (rows for rows in range(most, most // 2, -1) if num_rows % rows == 0)
    rows = next(even, most)
    stride = math.prod(shape[axis:])
    index_dtype = _index_dtype(shape, parts.dtype)
    base = jnp.asarray(base, index_dtype)

    def sums(first: Any, rows: int) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(parts, first, rows, axis)
        start = jnp.asarray(first, index_dtype) * _scalar(stride, index_dtype)
        return block_sums(
            block, base=base + start, shape=shape, num_elements=num_elements
        )

    total = jax.lax.fori_loop(
        jnp.int32(0),
        jnp.int32(num_rows // rows),
        lambda number, total: total + sums(number * rows, rows),
        jnp.zeros((parts.shape[0], NUM_SUMS), jnp.uint32),
    )
    if left := num_rows % rows:
        total += sums(np.int32(num_rows - left), left)
    return total


def partial_sums(
    parts: jax.Array, *, base: jax.Array | int, shape: tuple[int, ...]
) -> jax.Array:
    """The sums over parts at the same place of several arrays; traced.

    Args:
        parts: `[array, *part]`.
        base: index in the whole array of the part's first element.
        shape: of each whole array. Where its words are more than 2**32, JAX must
            have integers of 64 bits.

    Returns:
        `[array, 3]` in uint32: low lane, high lane, number of non-finite elements.
    """
    words = _words(parts)
    is_giant = has_wide_index(shape, parts.dtype)
    index_dtype = _index_dtype(shape, parts.dtype)
    index = jnp.asarray(base, index_dtype)
    stride = 1
    for dim in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(index_dtype, parts.shape, dim + 1)
        index = index + iota * _scalar(stride, index_dtype)
        stride *= shape[dim]
    lanes = [jnp.zeros(parts.shape, jnp.uint32) for _ in fingerprints.LANE_SEEDS]
    for number, word in enumerate(words):
        at = index * _scalar(len(words), index_dtype) + _scalar(number, index_dtype)
        key = at.astype(jnp.uint32) * _scalar(fingerprints.LOW_FACTOR)
        if is_giant:
            high = (at >> _scalar(32, index_dtype)).astype(jnp.uint32)
            key += high * _scalar(fingerprints.HIGH_FACTOR)
        for lane, seed in enumerate(fingerprints.LANE_SEEDS):
            lanes[lane] += _mix(word ^ _mix(key + _scalar(seed)))
    if fingerprints.can_be_nonfinite(parts.dtype):
        lanes.append(_is_nonfinite(parts).astype(jnp.uint32))
    # One pass over memory for all of them.
    totals = jax.lax.reduce(
        tuple(lanes),
        (_scalar(0),) * len(lanes),
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
        tuple(range(1, parts.ndim)),
    )
    zeros = [jnp.zeros(parts.shape[:1], jnp.uint32)] * (NUM_SUMS - len(totals))
    return jnp.stack([*totals, *zeros], axis=-1)


def _scalar(value: int, dtype: Any = jnp.uint32) -> Any:
    return np.dtype(dtype).type(value % (1 << np.dtype(dtype).itemsize * 8))


def _mix(x: jax.Array) -> jax.Array:
    first, second = fingerprints.MIX_FACTORS
    x = (x ^ (x >> _scalar(16))) * _scalar(first)
    x = (x ^ (x >> _scalar(15))) * _scalar(second)
    return x ^ (x >> _scalar(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """By number of the word in an element, the words, shaped like the elements."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(jnp.real(x)), *_words(jnp.imag(x))]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    num_bits = fingerprints.num_bits(x.dtype)
    if num_bits == 64:
        wide = jax.lax.bitcast_convert_type(x, jnp.uint64)
        high = wide >> _scalar(32, jnp.uint64)
        return [wide.astype(jnp.uint32), high.astype(jnp.uint32)]
    bits = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
    return [jax.lax.bitcast_convert_type(x, bits[num_bits]).astype(jnp.uint32)]


def _is_nonfinite(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)
    return ~jnp.isfinite(x)
