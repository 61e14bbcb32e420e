"""Deletes the steps that nobody keeps, so that half a deletion is no step.

World: device. Floor: above `orbax_io`, beside `restore`. Read
`jaxft/checkpoint/policies.py` before and `jaxft/checkpoint/manager.py` after.

A step loses its name first and its files afterwards. What a kill in between leaves
is finished by the next start.
"""

from __future__ import annotations

import os

from jaxft import records
from jaxft.checkpoint import layout, orbax_io, policies

_DOOMED = f"{layout.TMP_MARK}-deleted"


def retain(
    root: str,
    *,
    keep: records.KeepPolicy,
    committed: int,
    in_flight: int | None,
    emit: records.Emit,
) -> None:
    """Deletes what the policy does not keep, and what failed saves left.

    Args:
        root: the checkpoint root.
        keep: answers for the steps that are there now.
        committed: unfinished steps up to this one are leftovers.
        in_flight: but not this one.
        emit: told of deletions, and of those that failed: none is worth a run.
    """
    try:
        found = layout.discover(root)
    except (OSError, records.FaultError) as error:
        emit("delete_failed", path=root, reason=str(error))
        return
    for info in policies.plan_deletions(found.committed, keep=keep):
        delete(info.step, path=info.path, emit=emit)
    for path, step in found.unfinished:
        if step <= committed and step != in_flight:
            delete(step, path=path, emit=emit)


def finish_deletions(root: str, *, emit: records.Emit) -> None:
    """Deletes what interrupted deletions left; unfinished saves stay."""
    for path, step in layout.discover(root).unfinished:
        if path.endswith(_DOOMED):
            delete(step, path=path, emit=emit)


def delete(step: int, *, path: str, emit: records.Emit) -> None:
    """Deletes one folder of a step; one that has vanished is fine."""
    try:
        if layout.TMP_MARK not in os.path.basename(path):
            doomed = f"{path}{_DOOMED}"
            orbax_io.remove(doomed)
            os.rename(path, doomed)
            path = doomed
        orbax_io.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        emit("delete_failed", path=path, reason=str(error))
        return
    emit("deleted", step=step, path=path)
