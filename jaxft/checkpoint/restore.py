"""Finds the step to go on from: the newest that is proven to be what was saved.

World: device. Floor: above `judge`, below `manager`. Read
`jaxft/checkpoint/judge.py` before and `jaxft/checkpoint/manager.py` after.

Absent, unfinished, corrupt, unreadable and unhealthy are five answers. Nothing there
yet is a fresh start; what an interrupted save left is told and passed over. A corrupt
step is renamed aside, never deleted, together with every step that shares the bad
file, and the newest one outside is tried; when none is left although some were there,
that is an error and never a fresh start. A step that is not finite is renamed aside,
too. A step of somebody else where ours should be, a root or a file that may not be
read, a target that asks for another state, and a failure of this process are errors
that leave the store as it is.

Several processes try the same candidates, in the order of the primary one, and go on
from one only if all of them have read it well.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft import records
from jaxft.checkpoint import decisions, judge, layout
from jaxft.checkpoint.judge import Check, Damage, Reading, Restored
from jaxft.config import Verify

PyTree = Any


def restore_newest(
    root: str | os.PathLike[str],
    target: PyTree,
    *,
    step: int | None = None,
    check: Check | None = None,
    verify: Verify = Verify.FULL,
    memory_bytes: int = 2**62,
    emit: records.Emit = records.ignore_event,
) -> Restored | None:
    """Restores the newest good step of `root`, or exactly `step`.

    Args:
        root: the checkpoint root; it need not exist.
        target: the state to come back, as values or `jax.ShapeDtypeStruct`; see
            `jaxft.checkpoint.leaves.match`.
        step: this one, or an error; never replaced by another.
        check: what else the run record must fulfil: a text is damage, like any other.
        verify: how much is proven; see `jaxft.checkpoint.judge`.
        memory_bytes: host memory to use beyond the result.
        emit: told of foreign folders, bad steps, quarantines and the restore.

    Returns:
        None for a fresh start: there never was a committed step.

    Raises:
        FaultError: kind NO_CHECKPOINT: no good step is left, or `step` is not there
            or not good. Kind CONFIG: a newer jaxft wrote the step, the newest or only
            step is not ours, or the root or the step may not be read.
        TargetMismatchError: the target does not fit the stored state.
        OSError: the root cannot be read.
    """
    root = layout.absolute_root(root)
    reading = Reading(
        target=target,
        check=check,
        verify=verify,
        memory_bytes=memory_bytes,
        emit=emit,
    )
    found = decisions.discover(root)
    if step is not None:
        return _restore_exactly(root, reading, step=step, found=found)
    refuse_foreign(found)
    for path, reason in found.foreign:
        emit("not_a_checkpoint", path=path, reason=reason)
    for path, of_step in found.unfinished:
        emit("unfinished", path=path, step=of_step)
    reasons: list[str] = []
    left = _agree_on_steps(found.steps)
    while left:
        candidate = left.pop()
        outcome = _read_together(root, candidate, reading)
        if isinstance(outcome, Restored):
            return outcome
        sharing = judge.sharing_steps(root, candidate, damage=outcome, others=left)
        left = [other for other in left if other not in sharing]
        reasons.append(_set_aside(root, candidate, reason=outcome.reason, emit=emit))
        for other in sorted(sharing, reverse=True):
            why = f"it shares files with step {candidate}: {outcome.reason}"
            emit("corrupt", step=other, path=sharing[other], reason=why)
            reasons.append(_set_aside(root, other, reason=why, emit=emit))
    reasons += [f"kept as {path}" for path in found.set_aside]
    if reasons:
        raise _no_checkpoint(f"no readable step in {root}:\n  " + "\n  ".join(reasons))
    unfinished = f"; {len(found.unfinished)} unfinished" if found.unfinished else ""
    emit("fresh_start", reason=f"no checkpoint in {root}{unfinished}")
    return None


def _set_aside(root: str, step: int, *, reason: str, emit: records.Emit) -> str:
    """Quarantines a step, in the primary process; a line about it."""
    if jax.process_index() != 0:
        return f"step {step}: {reason}"
    aside = layout.quarantine(layout.step_path(root, step))
    emit("quarantine", step=step, path=aside, reason=reason)
    return f"step {step}: {reason}; kept as {aside}"


# --- several processes --------------------------------------------------------


def _agree_on_steps(steps: list[int]) -> list[int]:
    """The steps that the primary process sees: one look at the root for all."""
    if jax.process_count() == 1:
        return list(steps)
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    mine = np.zeros(count, np.int32)
    if jax.process_index() == 0:
        mine[:] = steps
    return [int(step) for step in multihost_utils.broadcast_one_to_all(mine)]


def _read_together(root: str, step: int, reading: Reading) -> Restored | Damage:
    """Reads one step; good only if it is in all processes.

    Raises:
        FaultError: another process failed for a reason that is not the step's.
        Exception: this one did.
    """
    path = layout.step_path(root, step)
    if jax.process_count() == 1:
        outcome = judge.read(path, reading, step=step)
        return (
            judge.prove(outcome, reading)
            if isinstance(outcome, Restored)
            else (outcome)
        )
    failure: BaseException | None = None
    outcome = None
    try:
        outcome = judge.read(path, reading, step=step)
    except Exception as error:
        failure = error
    _raise_together(failure, path)
    if bad := _bad_elsewhere(not isinstance(outcome, Restored)):
        return outcome if isinstance(outcome, Damage) else Damage.elsewhere(bad)
    assert isinstance(outcome, Restored)
    # The digests of all parts are added up in all processes: the same verdict.
    return judge.prove(outcome, reading)


def _raise_together(failure: BaseException | None, path: str) -> None:
    bad = _bad_elsewhere(failure is not None)
    if failure is not None:
        raise failure
    if bad:
        text = f"process {bad[0]} cannot read {path}; its own message says why"
        raise records.FaultError(
            records.Fault(kind=records.FaultKind.CONFIG, evidence=text)
        )


def _bad_elsewhere(is_bad: bool) -> list[int]:
    """The processes that say so; all of them ask at the same place."""
    answers = multihost_utils.process_allgather(np.int32(is_bad))
    return [index for index, answer in enumerate(np.ravel(answers)) if answer]


# --- refusals -----------------------------------------------------------------


def refuse_foreign(found: layout.Discovery) -> None:
    """Refuses a root whose newest step, or whose only one, something else wrote.

    To go on from an older one, or from nothing, would pass over it in silence.

    Raises:
        FaultError: kind CONFIG.
    """
    ours = max(found.steps, default=-1)
    for path, reason in found.foreign:
        # An empty folder holds nothing that could be passed over.
        is_step = os.path.isdir(path) and os.listdir(path)
        if is_step and int(os.path.basename(path)) > ours:
            text = (
                f"{path} is no checkpoint of ours ({reason}): use another workdir, "
                "or move it away; nothing was changed"
            )
            raise records.FaultError(
                records.Fault(kind=records.FaultKind.CONFIG, evidence=text)
            )


def _restore_exactly(
    root: str, reading: Reading, *, step: int, found: layout.Discovery
) -> Restored:
    if step not in found.steps:
        there = ", ".join(map(str, found.steps)) or "none"
        raise _no_checkpoint(f"step {step} is not in {root}; there: {there}")
    outcome = _read_together(root, step, reading)
    if isinstance(outcome, Restored):
        return outcome
    raise _no_checkpoint(f"step {step} in {root} cannot be read: {outcome.reason}")


def _no_checkpoint(text: str) -> records.FaultError:
    return records.FaultError(
        records.Fault(kind=records.FaultKind.NO_CHECKPOINT, evidence=text)
    )
