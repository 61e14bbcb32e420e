"""Finds the step to go on from: the newest that can be read.

World: device. Floor: above `orbax_io`, below `manager`. Read
`jaxft/checkpoint/orbax_io.py` before and `jaxft/checkpoint/manager.py` after.

Absent, unfinished, damaged and unreadable are four answers. Nothing there yet is a
fresh start. A damaged step is renamed aside, never deleted, and the one before it
tried; when none is left although some were there, that is an error and never a fresh
start. A step of somebody else where ours should be, a root or a file that may not be
read, a target that asks for another state, and a failure of this process are errors
that leave the store as it is.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Callable
from typing import Any

from jaxft import records
from jaxft.checkpoint import decisions, layout, orbax_io, quiet, run_record

PyTree = Any

# Looks at a run record; why the step is not as it was saved, empty when it is.
Check = Callable[[dict[str, Any]], str]

# What a store says that is there and does not answer now.
_NOT_NOW = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """One step, back in memory.

    Attributes:
        step: its label.
        state: the state, in the structure and placement of the target.
        data: the data position saved with it.
        run: what the caller saved as `run`.
        metrics: evaluation results saved with it.
        record: the whole run record.
        path: its folder.
    """

    step: int
    state: PyTree
    data: dict[str, Any]
    run: dict[str, Any]
    metrics: dict[str, float]
    record: dict[str, Any]
    path: str


def restore_newest(
    root: str | os.PathLike[str],
    target: PyTree,
    *,
    step: int | None = None,
    check: Check | None = None,
    emit: records.Emit = records.ignore_event,
) -> Restored | None:
    """Restores the newest readable step of `root`, or exactly `step`.

    Args:
        root: the checkpoint root; it need not exist.
        target: the state to come back, as values or `jax.ShapeDtypeStruct`; see
            `jaxft.checkpoint.leaves.match`.
        step: this one, or an error; never replaced by another.
        check: what else the run record must fulfil: a text is damage, like any other.
        emit: told of foreign folders, quarantines and the restore.

    Returns:
        None for a fresh start: there never was a committed step.

    Raises:
        FaultError: kind NO_CHECKPOINT: no readable step is left, or `step` is not
            there or damaged. Kind CONFIG: a newer jaxft wrote the step, the newest
            or only step is not ours, or the root or the step may not be read.
        TargetMismatchError: the target does not fit the stored state.
        OSError: the root cannot be read.
    """
    root = layout.absolute_root(root)
    found = decisions.discover(root)
    if step is not None:
        return _restore_exactly(
            root, target, step=step, found=found, check=check, emit=emit
        )
    refuse_foreign(found)
    for path, reason in found.foreign:
        emit("not_a_checkpoint", path=path, reason=reason)
    reasons = []
    for info in reversed(found.committed):
        outcome = _try_restore(
            info.path, target, step=info.step, check=check, emit=emit
        )
        if isinstance(outcome, Restored):
            return outcome
        aside = layout.quarantine(info.path)
        emit("quarantine", step=info.step, path=aside, reason=outcome)
        reasons.append(f"step {info.step}: {outcome}; kept as {aside}")
    reasons += [f"kept as {path}" for path in found.set_aside]
    if reasons:
        raise _no_checkpoint(f"no readable step in {root}:\n  " + "\n  ".join(reasons))
    left = f"; {len(found.unfinished)} unfinished" if found.unfinished else ""
    emit("fresh_start", reason=f"no checkpoint in {root}{left}")
    return None


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
    root: str,
    target: PyTree,
    *,
    step: int,
    found: layout.Discovery,
    check: Check | None,
    emit: records.Emit,
) -> Restored:
    if step not in found.steps:
        there = ", ".join(map(str, found.steps)) or "none"
        raise _no_checkpoint(f"step {step} is not in {root}; there: {there}")
    path = layout.step_path(root, step)
    outcome = _try_restore(path, target, step=step, check=check, emit=emit)
    if isinstance(outcome, Restored):
        return outcome
    raise _no_checkpoint(f"step {step} in {root} cannot be read: {outcome}")


def _no_checkpoint(text: str) -> records.FaultError:
    return records.FaultError(
        records.Fault(kind=records.FaultKind.NO_CHECKPOINT, evidence=text)
    )


def _try_restore(
    path: str, target: PyTree, *, step: int, check: Check | None, emit: records.Emit
) -> Restored | str:
    """The step, or why its folder is damaged."""
    with quiet.quiet_orbax():
        outcome = _read(path, target, step=step, check=check, emit=emit)
        if isinstance(outcome, str):
            quiet.drain()
    return outcome


def _read(
    path: str, target: PyTree, *, step: int, check: Check | None, emit: records.Emit
) -> Restored | str:
    start = time.monotonic()
    try:
        record = run_record.read_record(path)
        if record["step"] != step:
            return f"it says that it is step {record['step']}"
        if check is not None and (reason := check(record)):
            return reason
        state = orbax_io.read_state(path, target, record=record)
    except records.FaultError:
        raise
    except Exception as error:
        if isinstance(error, run_record.RecordError):
            return str(error)
        # Damaged, or is it the target, the devices or this process? Ask the files, but
        # not by Orbax first: it takes some that may not be read for absent ones.
        _read_anything(path)
        if orbax_io.cause(error) in ("no permission", "I/O error"):
            raise layout.unreadable(path, orbax_io.first_line(error)) from error
        if orbax_io.is_process_failure(error):
            raise
        if reason := orbax_io.probe(path):
            return reason
        raise
    emit(
        "restore",
        step=step,
        secs=time.monotonic() - start,
        num_bytes=layout.count_bytes(path),
    )
    return Restored(
        step=step,
        state=state,
        data=record["data"],
        run=record["run"],
        metrics=record["metrics"],
        record=record,
        path=path,
    )


def _read_anything(path: str) -> None:
    """Raises when a part of a step is there but cannot be read now.

    Raises:
        FaultError: kind CONFIG: the store does not give it.
        OSError: this process has no files left.
    """
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _read_anything(entry.path)
                elif entry.is_file():
                    with open(entry.path, "rb", buffering=0) as file:
                        file.read(1)
    except OSError as error:
        if error.errno in _NOT_NOW:
            where, why = error.filename or path, str(error.strerror)
            raise layout.unreadable(where, why) from error
        if orbax_io.is_process_failure(error):
            raise
