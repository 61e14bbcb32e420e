"""Finds the step to go on from: the newest that is proven to be what was saved.

World: device. Floor: above `judge`, below `manager`. Read
`jaxft/checkpoint/judge.py` before and `jaxft/checkpoint/manager.py` after.

Absent, unfinished, corrupt, unreadable and unhealthy are five answers. Nothing there
yet is a fresh start; what an interrupted save left is told and passed over. A corrupt
step is renamed aside, never deleted, together with every step that shares the bad
file, and the newest one outside is tried; where nothing may be renamed that is told,
and the step is passed over all the same; when none is left although some were there,
that is an error and never a fresh start. A step that is not finite is renamed aside,
too. A step of somebody else where ours should be, a root or a file that may not be
read, a target that asks for another state, and a failure of this process are errors
that leave the store as it is.

Several processes try the same candidates, in the order of the primary one, and go on
from one only if all of them have read it well. What is wrong with it is what any of
them sees; what shares its files the primary one says, before it renames anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax

from jaxft import records
from jaxft.checkpoint import decisions, judge, layout, together
from jaxft.checkpoint.judge import Check, Damage, Reading, Restored
from jaxft.config import Verify

PyTree = Any

# A store that is there to be read: none of its steps can be in the way of a save.
_MAY_NOT_RENAME = (errno.EROFS, errno.EACCES, errno.EPERM)


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
        target: the state to come back, as values or, not to have it in memory twice,
            `jax.ShapeDtypeStruct`; see `jaxft.checkpoint.leaf_requests.match`.
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
    with together.same_end(f"look into {root}"):
        found = decisions.discover(root)
        if step is None:
            refuse_foreign(found)
    steps = _agree_on_steps(root, found.steps)
    if step is not None:
        return _restore_exactly(root, reading, step=step, steps=steps)
    for path, reason in found.foreign:
        emit("not_a_checkpoint", path=path, reason=reason)
    for path, of_step in found.unfinished:
        emit("unfinished", path=path, step=of_step)
    reasons: list[str] = []
    left = list(steps)
    while left:
        candidate = left.pop()
        outcome = _read_together(root, candidate, reading)
        if isinstance(outcome, Restored):
            return outcome
        sharing = _sharing_steps(root, candidate, damage=outcome, others=left)
        left = [other for other in left if other not in sharing]
        doomed = {candidate: outcome.reason}
        for other in sorted(sharing, reverse=True):
            why = f"it shares files with step {candidate}: {outcome.reason}"
            emit("corrupt", step=other, path=sharing[other], reason=why)
            doomed[other] = why
        reasons += _set_aside(root, doomed, emit=emit)
    kept = together.from_primary(list(found.set_aside))
    reasons += [f"kept as {path}" for path in kept]
    if reasons:
        raise _no_checkpoint(f"no readable step in {root}:\n  " + "\n  ".join(reasons))
    unfinished = f"; {len(found.unfinished)} unfinished" if found.unfinished else ""
    emit("fresh_start", reason=f"no checkpoint in {root}{unfinished}")
    return None


def _set_aside(
    root: str, doomed: Mapping[int, str], *, emit: records.Emit
) -> list[str]:
    """Quarantines steps, in the primary process; a line about each.

    Args:
        root: the checkpoint root.
        doomed: step -> why.
        emit: told of each.

    Raises:
        OSError: one could not be renamed, although the store may be written.
    """
    lines = []
    with together.same_end(f"rename steps of {root} aside"):
        for step, reason in doomed.items() if jax.process_index() == 0 else ():
            path = layout.step_path(root, step)
            try:
                aside = layout.quarantine(path)
            except OSError as error:
                if error.errno not in _MAY_NOT_RENAME:
                    raise
                why = f"it cannot be moved aside: {error.strerror}"
                emit("quarantine_failed", step=step, path=path, reason=why)
                lines.append(f"step {step}: {reason}; {why}: {path}")
                continue
            emit("quarantine", step=step, path=aside, reason=reason)
            lines.append(f"step {step}: {reason}; kept as {aside}")
    return together.from_primary(lines)


# --- several processes --------------------------------------------------------


def _agree_on_steps(root: str, seen: list[int]) -> list[int]:
    """The steps that the primary process sees.

    Raises:
        FaultError: kind CONFIG: it sees none where another process sees some: to
            begin anew would pass over them.
    """
    (primary_root, steps), *others = together.gather([root, seen])
    for index, (where, other) in enumerate(others, start=1):
        if other and not steps:
            text = f"process {index} sees step {max(other)} in {where}"
            raise _not_shared(f"{text}, process 0 sees none in {primary_root}")
    return steps


def _read_together(root: str, step: int, reading: Reading) -> Restored | Damage:
    """Reads one step; good only if it is in all processes.

    Raises:
        FaultError: another process failed for a reason that is not the step's.
        Exception: this one did.
    """
    path = layout.step_path(root, step)
    with together.same_end(f"read {path}"):
        # What a process does not see at all is no damage: it looks elsewhere.
        if jax.process_index() != 0 and not os.path.isdir(path):
            raise _not_shared(f"process 0 sees {path}, this process does not")
        outcome = judge.read(path, reading, step=step)
    if damage := _any_damage(outcome):
        judge.tell(damage, step=step, emit=reading.emit)
        return damage
    assert isinstance(outcome, Restored)
    _compare_records(outcome)
    outcome = judge.prove(outcome, reading)
    if isinstance(outcome, Damage):
        judge.tell(outcome, step=step, emit=reading.emit)
    return outcome


def _any_damage(outcome: Restored | Damage) -> Damage | None:
    """What any process has found wrong: the same in all of them."""
    seen = outcome.to_json() if isinstance(outcome, Damage) else None
    return Damage.union(
        [one and Damage.from_json(one) for one in together.gather(seen)]
    )


def _compare_records(restored: Restored) -> None:
    """Refuses to go on where each process has a step of its own under one label.

    Raises:
        FaultError: kind CONFIG.
    """
    if jax.process_count() == 1:
        return
    leaves = restored.manifest.leaves if restored.manifest else {}
    values = {path: str(leaf.fingerprint) for path, leaf in leaves.items()}
    mine = json.dumps([restored.record["time"], restored.record["state"], values])
    seen = together.gather(hashlib.sha256(mine.encode()).hexdigest())
    if others := [index for index, one in enumerate(seen) if one != seen[0]]:
        raise _not_shared(f"processes 0 and {others[0]} see different {restored.path}")


def _not_shared(text: str) -> records.FaultError:
    text = f"{text}: the root must be one folder that all processes share"
    return records.fault_error(records.FaultKind.CONFIG, text)


def _sharing_steps(
    root: str, step: int, *, damage: Damage, others: list[int]
) -> dict[int, str]:
    """See `judge.sharing_steps`; the primary process looks, nobody has renamed yet."""
    with together.same_end(f"look for what shares files with step {step} of {root}"):
        pairs: list[tuple[int, str]] = []
        if jax.process_index() == 0:
            found = judge.sharing_steps(root, step, damage=damage, others=others)
            pairs = list(found.items())
    return dict(together.from_primary(pairs))


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
            raise records.fault_error(records.FaultKind.CONFIG, text)


def _restore_exactly(
    root: str, reading: Reading, *, step: int, steps: list[int]
) -> Restored:
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise _no_checkpoint(f"step {step} is not in {root}; there: {there}")
    outcome = _read_together(root, step, reading)
    if isinstance(outcome, Restored):
        return outcome
    raise _no_checkpoint(f"step {step} in {root} cannot be read: {outcome.reason}")


def _no_checkpoint(text: str) -> records.FaultError:
    return records.fault_error(records.FaultKind.NO_CHECKPOINT, text)
