"""What several processes must agree on before one of them acts.

World: device. Floor: above `causes`. Read `jaxft/checkpoint/restore.py` next, its main
user.

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
import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxft import records
from jaxft.checkpoint import causes
from jaxft.parallel import distributed, roll_call

# Far more than any read takes: only who never comes is to be noticed by it.
_DEADLINE_SECS = 3600.0
# How long a wait is before it is told of, and then twice as long, and so on.
_TELL_SECS = 5.0
_NAMES = re.compile(r"timed out task names:\s*((?:\d+\s*)+)")


@contextlib.contextmanager
def same_end(what: str, *, deadline_secs: float = _DEADLINE_SECS) -> Iterator[None]:
    """If the block fails in one process, it does in all.

    Args:
        what: was to be done, for those in which it went well: `read <path>`.
        deadline_secs: how long after the first process the last one may be ready.

    Raises:
        FaultError: kind CONFIG: another process failed; it tells which and why, and
            comes from a `causes.PeerError`. Kind PEER_LOST: one was not ready in time.
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
    if not bad:
        return
    try:
        reasons = gather("" if failure is None else records.first_line(failure))
    except Exception:
        if failure is None:
            raise
        raise failure from None
    if failure is not None:
        raise failure
    peer = causes.PeerError(bad[0], reasons[bad[0]])
    text = f"process {peer.process} cannot {what}: {peer.cause}"
    raise records.fault_error(records.FaultKind.CONFIG, text) from peer


def _wait_for_all(what: str, *, deadline_secs: float) -> None:
    """Returns in all processes when the last one has called it; a long wait is told.

    Raises:
        FaultError: kind PEER_LOST: somebody was not in time; it names who.
    """
    if jax.process_count() == 1:
        return
    wait = ocp.multihost.get_barrier_sync_fn()
    began, tell_secs = time.monotonic(), _TELL_SECS
    # Many, one after the other: each passes, or runs out of time, for all alike.
    for number in itertools.count():
        left_secs = max(0.5, deadline_secs - (time.monotonic() - began))
        wait_secs = min(tell_secs, left_secs)
        try:
            wait(key=f"jaxft.{number}", timeout_ms=round(wait_secs * 1000))
            return
        except jax.errors.JaxRuntimeError as error:
            waited_secs, absent = time.monotonic() - began, _absent(error)
            is_late = waited_secs >= deadline_secs
            if is_late or "DEADLINE_EXCEEDED" not in str(error):
                who = f"{roll_call.words(absent)} did not come"
                reason = who if absent else records.first_line(error)
                text = (
                    f"waited at most {deadline_secs:g} s until all processes {what}: "
                    f"{reason}"
                )
                fault = records.Fault(
                    kind=records.FaultKind.PEER_LOST,
                    process=absent[0] if absent else jax.process_index(),
                    evidence=text,
                )
                raise records.FaultError(fault) from error
        if waited_secs >= tell_secs:
            tell_secs *= 2
            distributed.tell_wait(what, absent=absent, secs=waited_secs)


def _absent(error: BaseException) -> list[int]:
    """The processes that a barrier has waited for in vain, where it says so."""
    found = _NAMES.search(str(error))
    return sorted(map(int, found[1].split())) if found else []


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
