"""Fingerprints in NumPy against the definition, written out in plain Python."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from jaxft.fingerprints import (
    ArrayDigester,
    Fingerprint,
    LeafDigest,
    combine,
    digest_array,
)

MASK = 0xFFFFFFFF

# Every dtype that a checkpoint holds: bits that count of an element, then what
# `patterned` of 6 x 35 of them gives. These values never change.
VECTORS = {
    "bool": (8, "40351d8ad1576de7", 0),
    "int2": (2, "ba051869ab100924", 0),
    "uint2": (2, "ba051869ab100924", 0),
    "int4": (4, "1b9e4c30576a17d6", 0),
    "uint4": (4, "1b9e4c30576a17d6", 0),
    "int8": (8, "b50e01d6e6767500", 0),
    "uint8": (8, "b50e01d6e6767500", 0),
    "int16": (16, "83b9c51549e98f0c", 0),
    "uint16": (16, "83b9c51549e98f0c", 0),
    "int32": (32, "39bbdff4587fd2bc", 0),
    "uint32": (32, "39bbdff4587fd2bc", 0),
    "int64": (64, "b5adae2dc44cacb1", 0),
    "uint64": (64, "b5adae2dc44cacb1", 0),
    "float4_e2m1fn": (4, "1b9e4c30576a17d6", 0),
    "float8_e3m4": (8, "b50e01d6e6767500", 27),
    "float8_e4m3": (8, "b50e01d6e6767500", 13),
    "float8_e4m3b11fnuz": (8, "b50e01d6e6767500", 0),
    "float8_e4m3fn": (8, "b50e01d6e6767500", 3),
    "float8_e4m3fnuz": (8, "b50e01d6e6767500", 0),
    "float8_e5m2": (8, "b50e01d6e6767500", 6),
    "float8_e5m2fnuz": (8, "b50e01d6e6767500", 0),
    "float8_e8m0fnu": (8, "b50e01d6e6767500", 1),
    "float16": (16, "83b9c51549e98f0c", 6),
    "bfloat16": (16, "83b9c51549e98f0c", 1),
    "float32": (32, "39bbdff4587fd2bc", 3),
    "float64": (64, "b5adae2dc44cacb1", 0),
    "complex64": (64, "b5adae2dc44cacb1", 6),
    "complex128": (128, "92c226d6eac9ecab", 0),
}
BITS = {dtype: bits for dtype, (bits, _, _) in VECTORS.items()}


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def reference(words, *, first=0):
    """The definition, word by word."""
    lanes = []
    for seed in (1, 0x85EBCA6B):
        total = 0
        for i, word in enumerate(words, first):
            lo, hi = i & MASK, i >> 32
            key = lo * 0x9E3779B9 + hi * 0x85EBCA77 + seed & MASK
            total += mix(word ^ mix(key))
        lanes.append(total & MASK)
    return Fingerprint(*lanes)


def words_of(array):
    """32-bit words of an array, by Python's own integers."""
    num_bits = BITS[str(array.dtype)]
    num_bytes = array.dtype.itemsize
    data = array.tobytes()
    words = []
    for at in range(0, len(data), num_bytes):
        value = int.from_bytes(data[at : at + num_bytes], "little")
        value &= (1 << num_bits) - 1
        words += [value >> shift & MASK for shift in range(0, max(32, num_bits), 32)]
    return words


def _as_array(data, shape, dtype):
    """Bytes as an array; bits that do not count are zero."""
    if dtype == "bool":
        data = data & 1
    elif BITS[dtype] < 8:
        data = data & ((1 << BITS[dtype]) - 1)
    return data.astype(np.uint8).view(np.dtype(dtype)).reshape(shape)


def patterned(shape, dtype):
    index = np.arange(math.prod(shape) * np.dtype(dtype).itemsize)
    return _as_array((37 * index * index + 11 * index + 5) % 256, shape, dtype)


def random_array(shape, dtype, seed=0):
    """Random bits: nan, infinities and both zeros among them."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return _as_array(data, shape, dtype)


# --- values -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", VECTORS)
def test_the_vectors(dtype):
    digest = digest_array(patterned((6, 35), dtype))
    assert (str(digest.fingerprint), digest.num_nonfinite) == VECTORS[dtype][1:]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(0, np.float32), "0000000000000000"),
        (np.zeros((), np.float32), "58f54975a11e2aea"),
        (np.float32(1), "0dd2a7ec7e7ab88d"),
        (np.float32(-0.0), "4fedfdb29ad31bf6"),
        (np.int64(-1), "fae0f9fa2b826924"),
        (np.arange(100_000, dtype=np.int32), "346acb873c05e963"),
    ],
    ids=["empty", "zero", "one", "minus zero", "minus one", "many"],
)
def test_small_vectors(array, text):
    assert str(digest_array(array).fingerprint) == text
    array = np.asarray(array)
    assert digest_array(array.reshape(*array.shape, 1)) == digest_array(array)


@pytest.mark.parametrize("dtype", VECTORS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4)], ids=str)
def test_an_array_of_each_dtype_is_as_defined(dtype, shape):
    array = random_array(shape, dtype)
    assert digest_array(array).fingerprint == reference(words_of(array))


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
def test_bits_that_are_no_part_of_the_value_do_not_count(dtype):
    array = random_array((50,), dtype)
    other = (array.view(np.uint8) | 0xF0).view(array.dtype)
    assert digest_array(other) == digest_array(array)


def test_equal_values_of_two_dtypes_have_equal_words():
    values = [0, 1, 2, 3]
    small = {str(digest_array(np.array(values, t)).fingerprint) for t in ("u1", "u4")}
    assert len(small) == 1
    assert digest_array(np.array(values, "uint2")) == digest_array(
        np.array(values, "uint8")
    )


def test_the_order_of_bytes_and_of_memory_does_not_matter():
    array = random_array((6, 10, 4), "float32")
    want = digest_array(array)
    assert digest_array(array.astype(">f4")) == want
    assert digest_array(np.asfortranarray(array)) == want
    assert digest_array(array[::-1][::-1]) == want
    assert digest_array(array.swapaxes(0, 2).copy().swapaxes(0, 2)) == want
    wide = np.zeros((6, 10, 8), np.float32)
    wide[:, :, ::2] = array
    assert digest_array(wide[:, :, ::2]) == want


def test_each_bit_and_each_exchange_shows_in_both_lanes():
    array = np.arange(64, dtype=np.uint32)
    want = digest_array(array).fingerprint
    for index in range(64):
        for bit in range(32):
            other = array.copy()
            other[index] ^= np.uint32(1 << bit)
            found = digest_array(other).fingerprint
            assert found.low != want.low
            assert found.high != want.high
    seen = {str(digest_array(np.roll(array, by)).fingerprint) for by in range(64)}
    assert len(seen) == 64


# --- nan and infinity ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in VECTORS if BITS[d] <= 16])
def test_all_values_of_a_small_dtype_are_judged(dtype):
    num_bits = 1 if dtype == "bool" else BITS[dtype]
    values = np.arange(1 << num_bits).astype(np.uint16 if num_bits > 8 else np.uint8)
    values = values.view(np.dtype(dtype))
    num_nonfinite = 0
    if "float" in dtype:
        with np.errstate(invalid="ignore"):
            numbers = [float(value) for value in values]
        num_nonfinite = sum(not math.isfinite(number) for number in numbers)
    assert digest_array(values).num_nonfinite == num_nonfinite


def test_an_element_of_two_parts_counts_once():
    nan, inf = math.nan, math.inf
    values = [complex(nan, inf), complex(1, nan), complex(-inf, 0), 1j]
    for dtype in (np.complex64, np.complex128):
        assert digest_array(np.array(values, dtype)).num_nonfinite == 3
    assert digest_array(np.array([nan, inf, -inf, 1e308])).num_nonfinite == 3


# --- parts --------------------------------------------------------------------


def _cut(shape, rng):
    """Boxes that cover a shape once, in random order."""
    edges = []
    for dim in shape:
        cuts = rng.choice(dim - 1, min(2, dim - 1), replace=False) + 1
        edges.append([0, *sorted(cuts.tolist()), dim])
    boxes = list(itertools.product(*[list(itertools.pairwise(edge)) for edge in edges]))
    return [boxes[index] for index in rng.permutation(len(boxes))]


@pytest.mark.parametrize(
    "dtype", ["uint4", "bool", "bfloat16", "float32", "complex128"]
)
@pytest.mark.parametrize("seed", range(6))
def test_parts_in_any_order_are_the_whole(dtype, seed):
    rng = np.random.default_rng(seed)
    shape = [(100,), (9, 7), (3, 50, 11), (5, 4, 3, 2), (2, 30_000), (30_000, 2)][seed]
    array = random_array(shape, dtype, seed)
    digester = ArrayDigester(shape, array.dtype)
    for box in _cut(shape, rng):
        part = array[tuple(slice(*pair) for pair in box)]
        if rng.integers(2):
            part = np.ascontiguousarray(part)
        digester.add(part, offsets=[first for first, _ in box])
    assert digester.result() == digest_array(array)


def test_partial_sums_are_combined():
    array = random_array((10, 3), "float32")
    sums = []
    for first in range(0, 10, 5):
        digester = ArrayDigester(array.shape, array.dtype)
        digester.add(array[first : first + 5], offsets=(first, 0))
        sums.append(digester.partial())
    assert combine(sums) == combine(sums[::-1]) == digest_array(array)
    assert combine([]) == LeafDigest(Fingerprint(0, 0), 0)


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3, 2**32 + 7, 2**40 - 1])
@pytest.mark.parametrize("width", [1, 2], ids=["flat", "rows"])
def test_indices_above_32_bits(first, width):
    part = random_array((6, 1) if width > 1 else (6,), "float32")
    digester = ArrayDigester((2**41, 2)[:width], np.float32)
    digester.add(part, offsets=(first, 1)[:width])
    want = [0, 0]
    for row, word in enumerate(words_of(part)):
        at = (first + row) * width + width - 1
        single = reference([word], first=at)
        want[0] += single.low
        want[1] += single.high
    assert digester.partial()[:2] == (want[0] & MASK, want[1] & MASK)


def test_memory_does_not_grow_with_the_array():
    array = np.zeros((2048, 2048), np.float32)
    digester = ArrayDigester(array.shape, array.dtype)
    tracemalloc.start()
    try:
        digester.add(array, offsets=(0, 0))
        digester = ArrayDigester(array.shape, array.dtype)
        digester.add(array.T, offsets=(0, 0))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# --- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", "M8[s]", "V3", "f2,f2", np.longdouble], ids=str
)
def test_what_has_no_words_is_refused(dtype):
    with pytest.raises(ValueError, match="has no fingerprint"):
        digest_array(np.zeros(2, dtype))


@pytest.mark.parametrize("offsets", [(3, 0), (0, -1), (0,), (0, 0, 0)], ids=str)
def test_a_part_outside_of_the_array_is_refused(offsets):
    digester = ArrayDigester((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"shape \[2, 2\] at .* is not in an array"):
        digester.add(np.zeros((2, 2), np.float32), offsets=offsets)


def test_parts_that_are_missing_doubled_or_of_another_dtype_are_refused():
    digester = ArrayDigester((4,), np.float32)
    with pytest.raises(ValueError, match="a part is float64, the array is float32"):
        digester.add(np.zeros(4), offsets=(0,))
    part = np.zeros(3, np.float32)
    digester.add(part, offsets=(0,))
    with pytest.raises(ValueError, match=r"have 3 elements, the array \[4\] has 4"):
        digester.result()
    digester.add(part, offsets=(1,))
    with pytest.raises(ValueError, match="have 6 elements"):
        digester.result()


def test_a_fingerprint_is_read_back_and_anything_else_refused():
    fingerprint = Fingerprint(0x12, 0xFFFFFFFF)
    assert str(fingerprint) == "00000012ffffffff"
    assert Fingerprint.parse(str(fingerprint)) == fingerprint
    good = "00000012ffffffff"
    for text in (
        "",
        good[1:],
        good + "0",
        good.upper(),
        f" {good[1:]}",
        "0x" + good[2:],
    ):
        with pytest.raises(ValueError, match="is not a fingerprint"):
            Fingerprint.parse(text)
    for text in (None, 18, good.encode(), "\u0660" * 16, good + "\n"):
        with pytest.raises(ValueError, match="is not a fingerprint"):
            Fingerprint.parse(text)
    for lane in (-1, 2**32):
        with pytest.raises(ValueError, match="not a lane"):
            Fingerprint(lane, 0)
