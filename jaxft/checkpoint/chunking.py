"""How arrays are cut into chunks and coded, as arithmetic.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/array_handler.py` next, which writes and reads the chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

_CODECS = ("raw", "lz4", "zstd")
_LAYOUTS = ("files", "ocdbt")
# Buffers of larger chunks are not reused by the allocator, and each is touched anew;
# smaller ones make too many files.
_MAX_CHUNK_BYTES = 2**24
_MIN_CHUNK_BYTES = 2**16
# So much of what is written or read is between the caller's arrays and the disk.
_MAX_FLYING_BYTES = 2**28
# Half-open ranges of indices, one for each axis.
Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class ArrayOptions:
    """How arrays are stored.

    Attributes:
        layout: "files" (a folder for each leaf, which can be linked) or "ocdbt" (few
            files, for many small leaves).
        codec: "raw", "lz4" or "zstd"; the latter two shuffle bytes first.
        memory_bytes: host memory that a save may hold beyond the state itself, and a
            restore beyond its result. A state that does not fit is written part by
            part, and the call returns when what is left fits. A single leaf, or a
            single chunk of a foreign writer, that is larger goes alone.
    """

    layout: str = "ocdbt"
    codec: str = "raw"
    memory_bytes: int = 2**62

    def __post_init__(self):
        if self.layout not in _LAYOUTS or self.codec not in _CODECS:
            raise ValueError(
                f"layout {self.layout!r} and codec {self.codec!r}: there are "
                f"{', '.join(_LAYOUTS)} and {', '.join(_CODECS)}"
            )
        if self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}: give at least 1")

    @property
    def flying_bytes(self) -> int:
        """Limit of what is between the arrays and the disk at once."""
        return max(1, min(_MAX_FLYING_BYTES, self.memory_bytes // 4))

    @property
    def chunk_bytes(self) -> int:
        """Limit of one chunk."""
        return max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, self.flying_bytes // 2))


# --- chunks and codecs --------------------------------------------------------


def make_codecs(codec: str, *, item_bytes: int) -> list[dict[str, Any]]:
    """Zarr's codec list: little endian, compressed or not, a checksum at the end."""
    chain: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    if codec != "raw":
        blosc = {
            "cname": codec,
            "clevel": 3,
            "shuffle": "shuffle",
            "typesize": item_bytes,
            "blocksize": 0,
        }
        chain.append({"name": "blosc", "configuration": blosc})
    return [*chain, {"name": "crc32c"}]


def choose_chunk_shape(
    shape: Sequence[int],
    write_shape: Sequence[int],
    *,
    item_bytes: int,
    max_bytes: int,
) -> tuple[int, ...]:
    """A chunk shape of at most `max_bytes` that is as long in memory as it can be.

    Leading axes are cut first, so that a chunk is one run of the array. Where several
    writers share an axis, a chunk divides the part of each, and no two writers touch
    the same; a part whose length has no useful divisor stays whole.

    Args:
        shape: of the array.
        write_shape: of the part that one writer writes.
        item_bytes: size of an element.
        max_bytes: see above.
    """
    chunk = [max(1, size) for size in write_shape]
    for axis, size in enumerate(chunk):
        rest = math.prod(chunk[axis + 1 :]) * item_bytes
        if size * rest <= max_bytes:
            break
        fits = max(1, max_bytes // rest)
        if chunk[axis] == shape[axis]:
            chunk[axis] = -(-size // -(-size // fits))
            continue
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        chunk[axis] = max(n for n in divisors if n <= fits)
        if rest <= max_bytes and 16 * chunk[axis] < fits:
            chunk[axis] = min(n for n in divisors if n > fits)
    return tuple(chunk)


# --- boxes --------------------------------------------------------------------


def cut(box: Box, chunk_shape: Sequence[int]) -> Iterator[Box]:
    """The parts of a box that lie in one chunk each, row-major."""
    ranges = []
    for part, size in zip(box, chunk_shape, strict=True):
        starts = range(part.start // size * size, part.stop, size)
        ranges.append(
            [
                slice(max(start, part.start), min(start + size, part.stop))
                for start in starts
            ]
        )
    return itertools.product(*ranges)


def make_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """An index as ranges that begin and end."""
    return tuple(
        slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
    )


def meet(one: Box, other: Box) -> Box | None:
    """What two boxes share; None where that is nothing."""
    both = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(one, other, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def inside(part: Box, box: Box) -> Box:
    """A part of a box, counted from the box's own corner."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start)
        for a, b in zip(part, box, strict=True)
    )


def count_elements(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(part.stop - part.start for part in box)
