"""What a device computes for a fingerprint: sums over its own part of an array.

World: device, traced. Floor: `parallel`. Read `jaxft/fingerprints.py`, which defines
the words and lanes, before this file and `jaxft/parallel/fingerprint.py` after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    stacks: Sequence[jax.Array],
    *,
    base: Any,
    shape: tuple[int, ...],
    num_elements: int,
) -> jax.Array:
    """`partial_sums` in a loop over blocks of at most so many elements; traced."""
    like = stacks[0]
    size = math.prod(like.shape[1:])
    if size <= num_elements or max(like.shape) >= 1 << 31:  # no index of a block
        return partial_sums(stacks, base=base, shape=shape)
    axis = next(axis for axis in range(1, like.ndim) if like.shape[axis] > 1)
    num_rows = like.shape[axis]
    most = max(1, num_elements * num_rows // size)
    # With rows left over, the program would have two bodies.
    even = (rows for rows in range(most, most // 2, -1) if num_rows % rows == 0)
    rows = next(even, most)
    stride = math.prod(shape[axis:])
    index_dtype = _index_dtype(shape, like.dtype)
    base = jnp.asarray(base, index_dtype)

    def sums(first: Any, rows: int) -> jax.Array:
        blocks = [
            jax.lax.dynamic_slice_in_dim(stack, first, rows, axis) for stack in stacks
        ]
        start = jnp.asarray(first, index_dtype) * _scalar(stride, index_dtype)
        return block_sums(
            blocks, base=base + start, shape=shape, num_elements=num_elements
        )

    total = jax.lax.fori_loop(
        jnp.int32(0),
        jnp.int32(num_rows // rows),
        lambda number, total: total + sums(number * rows, rows),
        jnp.zeros((len(stacks) * like.shape[0], NUM_SUMS), jnp.uint32),
    )
    if left := num_rows % rows:
        total += sums(np.int32(num_rows - left), left)
    return total


def partial_sums(
    stacks: Sequence[jax.Array], *, base: jax.Array | int, shape: tuple[int, ...]
) -> jax.Array:
    """The sums over parts at the same place of several arrays; traced.

    Args:
        stacks: each `[array, *part]`, of one shape and dtype. What depends on the
            place alone is computed once for all stacks.
        base: index in the whole array of the part's first element.
        shape: of each whole array. Where its words are more than 2**32, JAX must
            have integers of 64 bits.

    Returns:
        `[array, 3]` in uint32, of one stack after the other: low lane, high lane,
        number of non-finite elements.
    """
    like = stacks[0]
    words = [_words(stack) for stack in stacks]
    lanes = [
        [jnp.zeros(like.shape, jnp.uint32) for _ in fingerprints.LANE_SEEDS]
        for _ in stacks
    ]
    for number, keys in enumerate(_keys(like, len(words[0]), base=base, shape=shape)):
        for own_lanes, own_words in zip(lanes, words, strict=True):
            for lane, key in enumerate(keys):
                own_lanes[lane] = own_lanes[lane] + _mix(own_words[number] ^ key)
    if fingerprints.can_be_nonfinite(like.dtype):
        for own_lanes, stack in zip(lanes, stacks, strict=True):
            own_lanes.append(_is_nonfinite(stack).astype(jnp.uint32))
    # One pass over memory for all of them.
    operands = tuple(lane for own_lanes in lanes for lane in own_lanes)
    totals = jax.lax.reduce(
        operands,
        (_scalar(0),) * len(operands),
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
        tuple(range(1, like.ndim)),
    )
    num_lanes = len(lanes[0])
    zeros = [jnp.zeros(like.shape[:1], jnp.uint32)] * (NUM_SUMS - num_lanes)
    rows = [
        jnp.stack([*totals[at : at + num_lanes], *zeros], axis=-1)
        for at in range(0, len(totals), num_lanes)
    ]
    return jnp.concatenate(rows)


def _keys(
    like: jax.Array, num_words: int, *, base: jax.Array | int, shape: tuple[int, ...]
) -> Iterator[list[jax.Array]]:
    """By number of the word in an element, what its place adds to each lane."""
    is_giant = has_wide_index(shape, like.dtype)
    index_dtype = _index_dtype(shape, like.dtype)
    index = jnp.asarray(base, index_dtype)
    stride = 1
    for dim in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(index_dtype, like.shape, dim + 1)
        index = index + iota * _scalar(stride, index_dtype)
        stride *= shape[dim]
    for number in range(num_words):
        at = index * _scalar(num_words, index_dtype) + _scalar(number, index_dtype)
        key = at.astype(jnp.uint32) * _scalar(fingerprints.LOW_FACTOR)
        if is_giant:
            high = (at >> _scalar(32, index_dtype)).astype(jnp.uint32)
            key += high * _scalar(fingerprints.HIGH_FACTOR)
        yield [_mix(key + _scalar(seed)) for seed in fingerprints.LANE_SEEDS]


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
