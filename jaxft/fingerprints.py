"""Fingerprints of arrays: 64 bits that differ when one word differs, in NumPy.

World: host-only. Floor: the lowest, beside `records`. Read
`jaxft/parallel/fingerprint.py` next, which computes the same on the devices.

An array is seen as 32-bit words: narrower elements are zero-extended, wider ones are
split, low word first, complex ones into their parts. With `i` the row-major index of
the word in the whole array, as its low and high 32 bits `lo` and `hi`, a lane is

    sum over i of mix(word ^ mix(lo * 0x9E3779B9 + hi * 0x85EBCA77 + seed))

modulo 2**32. `mix` is a bijection: a change of a single word always shows in both
lanes. A sum takes its parts in any order, so how an array is split never matters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

LOW_FACTOR = 0x9E3779B9
HIGH_FACTOR = 0x85EBCA77
LANE_SEEDS = (1, 0x85EBCA6B)
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)

_NUM_VALUES = 1 << 32
# Three buffers of this many words stay in the second-level cache of a core.
_BLOCK_WORDS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Two lanes of 32 bits; `str()` gives 16 hexadecimal digits.

    Attributes:
        low: the first lane.
        high: the second lane.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        for lane in (self.low, self.high):
            if not 0 <= lane < _NUM_VALUES:
                raise ValueError(f"{lane} is not a lane of 32 bits")

    def __str__(self) -> str:
        return f"{self.low:08x}{self.high:08x}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Reads what `str()` gave.

        Raises:
            ValueError: it is anything else.
        """
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
            raise ValueError(f"{text!r} is not a fingerprint: 16 digits, 0-9 and a-f")
        return cls(int(text[:8], 16), int(text[8:], 16))


@dataclasses.dataclass(frozen=True)
class LeafDigest:
    """What one pass over an array tells.

    Attributes:
        fingerprint: of all its words.
        num_nonfinite: elements that are, or have a part that is, nan or infinite.
    """

    fingerprint: Fingerprint
    num_nonfinite: int


def combine(partials: Iterable[Sequence[int]]) -> LeafDigest:
    """The digest of an array from sums over parts that cover it once.

    Args:
        partials: (low lane, high lane, number of non-finite elements) of each part.
    """
    low = high = num_nonfinite = 0
    for part_low, part_high, part_nonfinite in partials:
        low += part_low
        high += part_high
        num_nonfinite += part_nonfinite
    fingerprint = Fingerprint(low % _NUM_VALUES, high % _NUM_VALUES)
    return LeafDigest(fingerprint, num_nonfinite)


def digest_array(array: np.ndarray) -> LeafDigest:
    """The digest of a whole array, of any dtype that a checkpoint holds.

    Raises:
        ValueError: its dtype has no words, e.g. text or objects.
    """
    array = np.asarray(array)
    digester = ArrayDigester(array.shape, array.dtype)
    digester.add(array, offsets=(0,) * array.ndim)
    return digester.result()


class ArrayDigester:
    """The digest of an array that is seen in parts, in any order.

    Memory of its own: under 1 MiB, whatever the size of a part.

    Args:
        shape: of the whole array.
        dtype: of the whole array; every part has it.

    Raises:
        ValueError: the dtype has no words.
    """

    def __init__(self, shape: Sequence[int], dtype: np.typing.DTypeLike):
        self._shape = tuple(int(dim) for dim in shape)
        self._dtype = np.dtype(dtype)
        self._num_bits = num_bits(self._dtype)
        self._can_be_nonfinite = can_be_nonfinite(self._dtype)
        self._sums = [0, 0]
        self._num_nonfinite = 0
        self._num_elements = 0

    def add(self, part: np.ndarray, *, offsets: Sequence[int]) -> None:
        """Counts one part.

        Args:
            part: a box of the array; it need not be contiguous.
            offsets: index in the whole array of the part's first element.

        Raises:
            ValueError: the part lies outside of the array, or has another dtype.
        """
        part = np.asarray(part)
        offsets = tuple(int(offset) for offset in offsets)
        self._check(part, offsets)
        self._num_elements += part.size
        if part.ndim == 0:
            part, offsets, shape = part[None], (0,), (1,)
        elif part.flags.c_contiguous:
            part, offsets, shape = _merge_dims(part, offsets, self._shape)
        else:
            shape = self._shape
        num_words = max(1, self._num_bits // 32)
        word_shape = (*shape[:-1], shape[-1] * num_words)
        for block, start in _blocks(part, _BLOCK_WORDS // num_words):
            if self._can_be_nonfinite:
                self._num_nonfinite += _count_nonfinite(block)
            corner = [at + first for at, first in zip(offsets, start, strict=True)]
            corner[-1] *= num_words
            words = self._words(block)
            for lane, total in enumerate(_lane_sums(words, corner, word_shape)):
                self._sums[lane] += total

    def partial(self) -> tuple[int, int, int]:
        """The sums over what was added so far; see `combine`."""
        low, high = (total % _NUM_VALUES for total in self._sums)
        return low, high, self._num_nonfinite

    def result(self) -> LeafDigest:
        """The digest of all parts.

        Raises:
            ValueError: the parts have more or fewer elements than the array.
        """
        num_elements = math.prod(self._shape)
        if self._num_elements != num_elements:
            raise ValueError(
                f"the parts have {self._num_elements} elements, "
                f"the array {list(self._shape)} has {num_elements}"
            )
        return combine([self.partial()])

    def _check(self, part: np.ndarray, offsets: tuple[int, ...]) -> None:
        if part.dtype != self._dtype:
            raise ValueError(f"a part is {part.dtype}, the array is {self._dtype}")
        if not len(part.shape) == len(offsets) == len(self._shape) or any(
            first < 0 or first + size > dim
            for first, size, dim in zip(offsets, part.shape, self._shape, strict=True)
        ):
            raise ValueError(
                f"a part of shape {list(part.shape)} at {list(offsets)} "
                f"is not in an array of shape {list(self._shape)}"
            )

    def _words(self, block: np.ndarray) -> np.ndarray:
        """A block as new 32-bit words; its last dim may be longer than it was."""
        block = np.ascontiguousarray(block)
        if not self._dtype.isnative:
            block = block.astype(self._dtype.newbyteorder("="))
        if self._num_bits >= 32:
            return block.view("<u4").astype(np.uint32, copy=False)
        words = block.view(f"<u{self._dtype.itemsize}").astype(np.uint32)
        if self._num_bits < 8:
            # What the spare bits of a byte hold is not part of the value.
            words &= np.uint32((1 << self._num_bits) - 1)
        return words


# --- dtypes -------------------------------------------------------------------


@functools.cache
def num_bits(dtype: np.dtype) -> int:
    """How many bits of an element count.

    Raises:
        ValueError: elements of this dtype are not seen as words.
    """
    if dtype == np.bool_:
        return 8
    if dtype.kind in "iufc":
        if dtype.itemsize in (1, 2, 4, 8) or dtype == np.complex128:
            return 8 * dtype.itemsize
    elif dtype.kind in "V" or dtype.type.__module__ == "ml_dtypes":
        for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
            try:
                return info(dtype).bits
            except ValueError:
                continue
    raise ValueError(f"an array of {dtype} has no fingerprint")


@functools.cache
def can_be_nonfinite(dtype: np.dtype) -> bool:
    """Whether a dtype that has words has floating-point parts."""
    if dtype.kind in "biu":
        return False
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        return True
    return False


@functools.cache
def _is_nonfinite_byte(dtype: np.dtype) -> np.ndarray:
    """Of each byte, whether it is nan or infinite as an element of one byte."""
    num_values = 1 << num_bits(dtype)
    table = np.zeros(256, np.int64)
    values = np.arange(num_values, dtype=np.uint8).view(dtype)
    with np.errstate(invalid="ignore"):
        table[:num_values] = ~np.isfinite(values.astype(np.float32))
    return table


def _count_nonfinite(block: np.ndarray) -> int:
    if block.dtype.itemsize > 1:
        # A signaling nan is a value like any other here.
        with np.errstate(invalid="ignore"):
            return block.size - int(np.count_nonzero(np.isfinite(block)))
    counts = np.bincount(block.reshape(-1).view(np.uint8), minlength=256)
    return int(counts @ _is_nonfinite_byte(block.dtype))


# --- words, and where they are ------------------------------------------------


def _merge_dims(
    part: np.ndarray, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    """The same box with its last dims as one, as far as the part has all of them."""
    last = part.ndim - 1
    while last and part.shape[last] == shape[last]:
        last -= 1
    row = math.prod(shape[last + 1 :])
    part = part.reshape(*part.shape[:last], part.shape[last] * row)
    return (
        part,
        (*offsets[:last], offsets[last] * row),
        (*shape[:last], shape[last] * row),
    )


def _blocks(
    part: np.ndarray, num_elements: int
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Boxes of at most so many elements that cover a part, and their first indices."""
    if not part.size:
        return
    counts = []  # into how many pieces each dim is cut
    inner = part.size
    for dim in part.shape:
        inner //= dim
        rows = max(1, num_elements // inner)
        counts.append(-(-dim // rows))
    steps = [-(-dim // count) for dim, count in zip(part.shape, counts, strict=True)]
    starts = (range(0, dim, step) for dim, step in zip(part.shape, steps, strict=True))
    for start in itertools.product(*starts):
        box = tuple(
            slice(first, first + step) for first, step in zip(start, steps, strict=True)
        )
        yield part[box], start


def _lane_sums(
    words: np.ndarray, corner: Sequence[int], shape: tuple[int, ...]
) -> Iterator[int]:
    """The sum of each lane over a block whose first word is at `corner`."""
    keys = _keys(words.shape, corner, shape)
    mixed = np.empty_like(keys)
    spare = np.empty_like(keys)
    for seed in LANE_SEEDS:
        np.add(keys, np.uint32(seed), out=mixed)
        _mix(mixed, spare)
        np.bitwise_xor(mixed, words, out=mixed)
        _mix(mixed, spare)
        yield int(np.add.reduce(mixed, axis=None, dtype=np.uint32))


def _keys(
    block: tuple[int, ...], corner: Sequence[int], shape: tuple[int, ...]
) -> np.ndarray:
    """`lo * LOW_FACTOR + hi * HIGH_FACTOR` of each word of a block."""
    first = last = 0
    rows = []  # by dim, the share of each of its indices in the index of the word
    stride = 1
    for dim in reversed(range(len(block))):
        start = corner[dim] * stride
        first += start
        last += start + (block[dim] - 1) * stride
        rows.append((block[dim], stride))
        stride *= shape[dim]
    rows.reverse()
    if first >> 32 != last >> 32:
        index = np.full((), first, np.uint64)
        for size, stride in rows:
            index = index[..., None] + np.arange(size, dtype=np.uint64) * np.uint64(
                stride
            )
        keys = index.astype(np.uint32) * np.uint32(LOW_FACTOR)
        keys += (index >> np.uint64(32)).astype(np.uint32) * np.uint32(HIGH_FACTOR)
        return keys
    # Modulo 2**32 the factor can be taken into each dim, and the high half is one.
    origin = first * LOW_FACTOR + (first >> 32) * HIGH_FACTOR
    keys = np.full((), origin % _NUM_VALUES, np.uint32)
    for size, stride in rows:
        factor = np.uint32(stride * LOW_FACTOR % _NUM_VALUES)
        keys = keys[..., None] + np.arange(size, dtype=np.uint32) * factor
    return keys


def _mix(x: np.ndarray, spare: np.ndarray) -> None:
    """In place, a bijection of 32 bits in which each bit depends on all."""
    for shift, factor in ((16, MIX_FACTORS[0]), (15, MIX_FACTORS[1]), (16, None)):
        np.right_shift(x, np.uint32(shift), out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor is not None:
            np.multiply(x, np.uint32(factor), out=x)
