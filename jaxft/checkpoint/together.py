"""What several processes must agree on before one of them acts.

World: device. Floor: the lowest of `checkpoint`. Read `jaxft/checkpoint/restore.py`
next, its main user.

Each function is a call that all processes make at the same place; alone, a process
agrees with itself and nothing is sent. What one sees of a disk another may not see,
or not yet; and who raises alone leaves the others waiting in their next agreement.
So what can fail in one process is done inside `same_end`, and what is decided goes by
`gather` or `from_primary`.

Storage takes its time, and collectives have time-outs that know nothing of it. So who
is ready first waits for the others at a barrier, which is no program of the devices
and has a deadline of its own; what then goes by collectives is over at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxft import records

# Far more than any read takes: only who never comes is to be noticed by it.
_DEADLINE_SECS = 3600.0


@contextlib.contextmanager
def same_end(what: str, *, deadline_secs: float = _DEADLINE_SECS) -> Iterator[None]:
    """If the block fails in one process, it does in all.

    Args:
        what: was to be done, for those in which it went well: `read <path>`.
        deadline_secs: how long after the first process the last one may be ready.

    Raises:
        FaultError: kind CONFIG: another process failed; its own error says why. Kind
            EXCEPTION: one was not ready in time.
        Exception: this one did.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        _wait_for_all(what, deadline_secs=deadline_secs)
    except records.FaultError:
        if failure is None:
            raise
        raise failure from None
    bad = where(failure is not None)
    if failure is not None:
        raise failure
    if bad:
        text = f"process {bad[0]} cannot {what}; its own message says why"
        raise records.fault_error(records.FaultKind.CONFIG, text)


def _wait_for_all(what: str, *, deadline_secs: float) -> None:
    """Returns in all processes when the last one has called it.

    Raises:
        FaultError: kind EXCEPTION: that was not in time.
    """
    if jax.process_count() == 1:
        return
    wait = ocp.multihost.get_barrier_sync_fn()
    try:
        wait(key="jaxft", timeout_ms=round(deadline_secs * 1000))
    except jax.errors.JaxRuntimeError as error:
        reason = records.first_line(error)
        text = (
            f"waited at most {deadline_secs:g} s until all processes {what}: {reason}"
        )
        raise records.fault_error(records.FaultKind.EXCEPTION, text) from error


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
