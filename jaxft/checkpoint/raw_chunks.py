"""Chunks whose bytes are the values: read straight to where they belong.

World: host-only. Floor: beside `array_reader`, its one user, above `chunking`. Read
`jaxft/checkpoint/manifest.py` before and `jaxft/checkpoint/array_reader.py` after.

TensorStore reads a chunk into memory of its own, checks it and copies it. Where the
values are proven by their fingerprint anyway, one `preadv` does all of it: the values
go to their place, and the four bytes of crc32c behind them are compared with what the
manifest says of them. What is in any way not as expected is left to TensorStore,
which finds out what is wrong with it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore as ts

from jaxft.checkpoint.chunking import Box, make_codecs

_CHECKSUM_BYTES = 4
# Every pattern of their bits is a value, and another one than every other pattern.
_BITWISE_DTYPE = re.compile(r"u?int(8|16|32|64)|b?float(8_.*|16|32|64)|complex.*")
# Single bytes have no order.
_CODECS = (
    make_codecs("raw", item_bytes=4),
    [{"name": "bytes"}, {"name": "crc32c"}],
)
# Both say `c/0/1`.
_KEY_ENCODINGS = (
    {"name": "default"},
    {"name": "default", "configuration": {"separator": "/"}},
)
# Of smaller ones the copy costs less than a turn in a thread.
_MIN_BYTES = 2**18


class RawChunks:
    """The chunks of one step that may be read without their checksum being computed.

    Args:
        checksums: absolute path of a chunk's file -> its last four bytes, in hex.
            Whoever gives them proves the values otherwise.
    """

    def __init__(self, checksums: Mapping[str, str]):
        self._checksums = checksums

    def of(self, store: ts.TensorStore) -> RawArray | None:
        """Those of one array; None where their bytes are not the values."""
        if not self._checksums or not _BITWISE_DTYPE.fullmatch(store.dtype.name):
            return None
        spec = store.spec().to_json()
        metadata = spec.get("metadata", {})
        if metadata.get("codecs") not in _CODECS:
            return None
        if metadata.get("chunk_key_encoding") not in _KEY_ENCODINGS:
            return None
        folder = os.path.join(spec["kvstore"].get("path", ""), "c")
        shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        if math.prod(shape) * store.dtype.numpy_dtype.itemsize < _MIN_BYTES:
            return None
        return RawArray(folder, shape, self._checksums)


class RawArray:
    """The chunks of one array.

    Args:
        folder: of their files.
        shape: of a whole chunk.
        checksums: as of `RawChunks`.
    """

    def __init__(self, folder: str, shape: Sequence[int], checksums: Mapping[str, str]):
        self._folder = folder
        self._shape = shape
        self._checksums = checksums

    def has(self, chunk: Box) -> bool:
        """Whether the values of a chunk are one run of bytes in a known file.

        Args:
            chunk: all of it that lies in the array.
        """
        return _is_run(chunk, self._shape) and self._path(chunk) in self._checksums

    def read(self, chunk: Box, out: np.ndarray) -> bool:
        """Reads a chunk into `out`; False when its file is not as it should be.

        Args:
            chunk: one that it has.
            out: contiguous; what is in it after a False is nothing.
        """
        missing = math.prod(self._shape) - out.size
        rest = bytearray(missing * out.itemsize + _CHECKSUM_BYTES)
        parts = [out.reshape(-1).view(np.uint8).data, memoryview(rest)]
        path = self._path(chunk)
        try:
            if not _read_all(path, parts):
                return False
        except OSError:
            return False
        filling, checksum = rest[:-_CHECKSUM_BYTES], rest[-_CHECKSUM_BYTES:]
        return not any(filling) and checksum.hex() == self._checksums[path]

    def _path(self, chunk: Box) -> str:
        places = [p.start // n for p, n in zip(chunk, self._shape, strict=True)]
        return os.path.join(self._folder, *map(str, places))


def _is_run(chunk: Box, shape: Sequence[int]) -> bool:
    """Whether what the file holds first, and nothing else, is the chunk's values."""
    is_cut = False
    for part, size in zip(chunk, shape, strict=True):
        if part.start % size:
            return False
        length = part.stop - part.start
        # Before the first axis that has more than one there may be no gaps.
        if length < size and is_cut:
            return False
        is_cut = is_cut or size > 1
    return True


def _read_all(path: str, parts: list[memoryview]) -> bool:
    """Whether a file holds as many bytes as the parts take; they are read then."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = sum(part.nbytes for part in parts)
        if os.fstat(fd).st_size != size:
            return False
        offset = 0
        while parts:
            done = os.preadv(fd, parts, offset)
            if done == 0:
                return False
            offset += done
            while parts and done >= parts[0].nbytes:
                done -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][done:]
        return True
    finally:
        os.close(fd)
