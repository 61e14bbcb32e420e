"""Writes leaves of a step into one file that other programs read.

World: host-only. Floor: above `contents`, beside `verify`. Read
`jaxft/checkpoint/contents.py` before.

    .safetensors    8 bytes of length, a JSON header, then the arrays: written here,
                    since the library holds all arrays in memory and knows fewer dtypes
    .npz            NumPy's own; only dtypes that NumPy itself has

Leaves are called by their name in the store, `params.dense.kernel`. Every leaf that
has a fingerprint is checked while it is copied; the file appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pathlib
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from jaxft import durable
from jaxft.checkpoint.contents import Contents
from jaxft.patterns import Patterns

MEMORY_BYTES = 2**27

SUFFIXES = (".safetensors", ".npz")
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex64": "C64",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


class ExportError(ValueError):
    """Something that cannot be exported as it was asked for; nothing was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        num_bytes: its size.
        names: of the arrays in it.
        left_out: paths of the selected leaves that are text, which no such file has.
        is_proven: whether every array was checked against a fingerprint.
    """

    path: str
    num_bytes: int
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    is_proven: bool


def export(
    step_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    paths: str = "**",
    overwrite: bool = False,
    memory_bytes: int = MEMORY_BYTES,
) -> Exported:
    """Writes leaves of a step to `out`.

    Args:
        step_path: the folder of a step, or an item folder of any Orbax checkpoint.
        out: ends in `.safetensors` or `.npz`.
        paths: globs of the leaves to write, see `jaxft/patterns.py`.
        overwrite: whether a file of that name may be replaced.
        memory_bytes: for what is read, at a time.

    Raises:
        ExportError: a dtype, a suffix, a name that is taken; nothing to write.
        ArrayError: an array is missing or damaged, or is not what was saved.
        RecordError: the run record is damaged.
        FaultError: kind CONFIG: a newer jaxft wrote the step.
        OSError: something cannot be read or written.
    """
    path = os.path.abspath(out)
    suffix = pathlib.Path(path).suffix
    if suffix not in SUFFIXES:
        raise ExportError(f"{path} ends in neither {' nor '.join(SUFFIXES)}")
    if os.path.lexists(path) and not overwrite:
        raise ExportError(f"{path} is there already: choose another name")
    select = Patterns(paths).match
    step = Contents(step_path)
    chosen = [leaf for leaf in step.leaves.values() if select(leaf.path)]
    arrays = [leaf for leaf in chosen if leaf.dtype]
    if not arrays:
        raise ExportError(f"no array of {step.path} is named by {paths!r}")
    types = {leaf.path: step.value_type(leaf.path) for leaf in arrays}
    _check_dtypes(types, suffix)
    write = _write_safetensors if suffix == ".safetensors" else _write_npz
    with durable.whole_file(path) as target:
        write(target, step, types, memory_bytes=memory_bytes)
    return Exported(
        path=path,
        num_bytes=os.path.getsize(path),
        names=tuple(leaf.name for leaf in arrays),
        left_out=tuple(leaf.path for leaf in chosen if not leaf.dtype),
        is_proven=all(leaf.entry or 0 in leaf.shape for leaf in arrays),
    )


# Leaf path -> dtype and shape of what is written.
_Types = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def _check_dtypes(types: _Types, suffix: str) -> None:
    for path, (dtype, _) in types.items():
        if suffix == ".npz" and not _is_of_numpy(dtype):
            hint = "use .safetensors" if str(dtype) in _SAFETENSORS else ""
        elif suffix == ".safetensors" and str(dtype) not in _SAFETENSORS:
            hint = "use .npz" if _is_of_numpy(dtype) else ""
        else:
            continue
        raise ExportError(
            f"leaf {path} is {dtype}, which {suffix} does not have: "
            f"{hint or 'leave it out'}"
        )


def _is_of_numpy(dtype: np.dtype) -> bool:
    return dtype.type.__module__ == "numpy"


def _write_safetensors(
    target: str, step: Contents, types: _Types, *, memory_bytes: int
) -> None:
    # Wide elements first: so each array starts at a multiple of its element's size.
    paths = sorted(types, key=lambda path: -types[path][0].itemsize)
    header: dict[str, Any] = {}
    if step.record is not None:
        header["__metadata__"] = {"jaxft_step": str(step.record["step"])}
    end = 0
    for path in paths:
        dtype, shape = types[path]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[step.leaves[path].name] = {
            "dtype": _SAFETENSORS[str(dtype)],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with open(target, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        _reserve(file, start + end)
    for path in paths:
        begin = start + header[step.leaves[path].name]["data_offsets"][0]
        _fill(target, step, path, offset=begin, memory_bytes=memory_bytes)


def _write_npz(
    target: str, step: Contents, types: _Types, *, memory_bytes: int
) -> None:
    spare = f"{target}.npy"
    try:
        with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED) as archive:
            for path, (dtype, shape) in types.items():
                with open(spare, "wb") as file:
                    header = {
                        "descr": np.lib.format.dtype_to_descr(dtype),
                        "fortran_order": False,
                        "shape": shape,
                    }
                    np.lib.format.write_array_header_2_0(file, header)
                    start = file.tell()
                    _reserve(file, start + math.prod(shape) * dtype.itemsize)
                _fill(spare, step, path, offset=start, memory_bytes=memory_bytes)
                archive.write(spare, f"{step.leaves[path].name}.npy")
    finally:
        pathlib.Path(spare).unlink(missing_ok=True)


def _reserve(file: IO[bytes], num_bytes: int) -> None:
    """Takes the space now: a full disk must be an error here and no signal later."""
    file.flush()
    if not num_bytes:
        return
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        file.truncate(num_bytes)  # This file system promises no space.


def _fill(
    target: str, step: Contents, path: str, *, offset: int, memory_bytes: int
) -> None:
    """Writes a leaf in row-major order into its place, box by box."""
    dtype, shape = step.value_type(path)
    if 0 in shape:
        return
    place = np.memmap(target, dtype, "r+", offset, shape)
    for offsets, part in step.read_parts(path, max_bytes=memory_bytes):
        pairs = zip(offsets, part.shape, strict=True)
        place[tuple(slice(first, first + size) for first, size in pairs)] = part
    place.flush()
