"""Fingerprints in NumPy against the definition, written out in plain Python."""

import math

import numpy as np
import pytest

from jaxft.fingerprints import Fingerprint, digest_array

MASK = 0xFFFFFFFF

# Every dtype that a checkpoint holds, and bits that count of an element.
BITS = {
    "bool": 8,
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "int8": 8,
    "uint8": 8,
    "int16": 16,
    "uint16": 16,
    "int32": 32,
    "uint32": 32,
    "int64": 64,
    "uint64": 64,
    "float4_e2m1fn": 4,
    "float8_e3m4": 8,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
}


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


def random_array(shape, dtype, seed=0):
    """Random bits: nan, infinities and both zeros among them."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    if dtype == np.bool_:
        data &= 1
    elif BITS[str(dtype)] < 8:
        data &= (1 << BITS[str(dtype)]) - 1
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)], ids=str)
def test_an_array_of_each_dtype_is_as_defined(dtype, shape):
    array = random_array(shape, dtype)
    assert digest_array(array).fingerprint == reference(words_of(array))
