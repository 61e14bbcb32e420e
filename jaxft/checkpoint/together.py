"""What several processes must agree on before one of them acts.

World: device. Floor: the lowest of `checkpoint`. Read `jaxft/checkpoint/restore.py`
next, its main user.

Each function is a call that all processes make at the same place; alone, a process
agrees with itself and nothing is sent. What one sees of a disk another may not see,
or not yet; and who raises alone leaves the others waiting in their next agreement.
So what can fail in one process is done inside `same_end`, and what is decided goes by
`gather` or `from_primary`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft import records


@contextlib.contextmanager
def same_end(what: str) -> Iterator[None]:
    """If the block fails in one process, it does in all.

    Args:
        what: was to be done, for those in which it went well: `read <path>`.

    Raises:
        FaultError: kind CONFIG: another process failed; its own error says why.
        Exception: this one did.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    bad = where(failure is not None)
    if failure is not None:
        raise failure
    if bad:
        text = f"process {bad[0]} cannot {what}; its own message says why"
        raise records.fault_error(records.FaultKind.CONFIG, text)


def where(is_so: bool) -> list[int]:
    """The processes in which it is so."""
    if jax.process_count() == 1:
        return [0] if is_so else []
    answers = multihost_utils.process_allgather(np.int32(is_so))
    return [index for index, answer in enumerate(np.ravel(answers)) if answer]


def gather(value: Any) -> list[Any]:
    """The JSON value of each process, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    mine = np.zeros(_rounded(int(lengths.max())), np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(mine))
    return [
        json.loads(row[:length].tobytes())
        for row, length in zip(rows, lengths, strict=True)
    ]


def from_primary(value: Any) -> Any:
    """The JSON value of the primary process; that of the others does not count."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if jax.process_index() == 0 else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    mine = np.zeros(_rounded(length), np.uint8)
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    row = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return json.loads(row[:length].tobytes())


def _rounded(length: int) -> int:
    """A power of two: few sizes, as a program is compiled for each."""
    return max(256, 1 << (length - 1).bit_length())
