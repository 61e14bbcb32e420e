"""Brings steps back from a mirror: every file proven, and by one rename.

World: host-only. Floor: above `mirror_place`, beside `mirror`. Read
`jaxft/checkpoint/mirror.py` before and `jaxft/checkpoint/mirrored.py` after.

A step that was rolled back does not exist, neither for who lists nor for who fetches,
whether or not the mirror has deleted it yet. What was decided about the root comes
back before its first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
import shutil
import time
from collections.abc import Iterable

from jaxft import durable, records
from jaxft.checkpoint import decisions, layout, mirror_mark, mirror_place

_FETCHING = f"{layout.TMP_MARK}-fetch"


def list_steps(
    target: str,
    *,
    healthy_only: bool = False,
    into: str | os.PathLike[str] = "",
    own_only: bool = False,
    timeout_secs: float = 60.0,
) -> list[int]:
    """The steps on a mirror, ascending, without those that were rolled back.

    Args:
        target: the mirror; see `open_target`.
        healthy_only: leaves out those that are no resume points.
        into: a root whose own decisions count, too.
        own_only: leaves out those that another root than `into` wrote.
        timeout_secs: deadline of each request to an object store.

    Raises:
        FaultError: kind CONFIG: what was decided cannot be understood.
        ValueError: `target` names no place.
        MirrorError: the store fails or does not answer.
        OSError: the folder cannot be read.
    """
    place = mirror_place.open_target(target, timeout_secs=timeout_secs)
    root = layout.absolute_root(into) if into else ""
    marks = place.marks()
    if own_only:
        identity = mirror_place.find_identity(root)
        marks = mirror_place.owned(marks, identity.owner) if identity else {}
    return _steps(place, marks, root=root, healthy_only=healthy_only)


def _steps(
    place: mirror_place.Target,
    marks: mirror_place.Marks,
    *,
    root: str,
    healthy_only: bool,
) -> list[int]:
    found: list[int] = []
    identity = mirror_place.find_identity(root) if root else None
    for owner in mirror_place.owners(marks):
        known = [mirror_place.decided(place, owner)]
        if identity is not None and identity.owner == owner:
            known.append(decisions.read(root))
        found += [
            step
            for step, mark in mirror_place.owned(marks, owner).items()
            if (mark.healthy or not healthy_only)
            and not any(one.is_abandoned(step, timeline=mark.timeline) for one in known)
        ]
    return sorted(found)


def fetch(
    target: str,
    step: int | None = None,
    *,
    into: str | os.PathLike[str],
    timeout_secs: float = 60.0,
    emit: records.Emit = records.ignore_event,
) -> str:
    """Copies one step from a mirror into a root, every file proven, by one rename.

    Args:
        target: the mirror; see `open_target`.
        step: this one, never replaced by another; None for the newest that may be
            resumed and comes back whole.
        into: the checkpoint root; it need not exist.
        timeout_secs: deadline of each request to an object store.
        emit: told of the fetch, and of steps that do not come back.

    Returns:
        The step's folder.

    Raises:
        FaultError: kind NO_CHECKPOINT: the mirror has no such step, or none that is
            whole. Kind CONFIG: what was decided cannot be understood, or something
            else was decided about `into`.
        FileExistsError: the root has a step of that label.
        ValueError: `target` names no place.
        MirrorError: the store fails or does not answer.
        OSError: a folder cannot be read or written.
    """
    place = mirror_place.open_target(target, timeout_secs=timeout_secs)
    marks = place.marks()
    root = layout.absolute_root(into)
    there = _steps(place, marks, root=root, healthy_only=step is None)
    if step is not None and step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise _no_checkpoint(f"step {step} is not on {place.where}; there: {listed}")
    reasons = []
    for label in [step] if step is not None else reversed(there):
        mark = marks[label]
        assert mark is not None
        start = time.monotonic()
        reason, path = _fetch(place, mark, root=root, marks=marks)
        if reason:
            emit("mirror_failed", step=label, target=target, reason=reason)
            reasons.append(f"step {label}: {reason}")
            continue
        num_bytes = sum(file.num_bytes for file in mark.files.values())
        secs = time.monotonic() - start
        emit("mirror_fetch", step=label, path=path, secs=secs, num_bytes=num_bytes)
        return path
    text = "\n  ".join([f"no step on {place.where} comes back", *reasons])
    raise _no_checkpoint(text)


def _no_checkpoint(text: str) -> records.FaultError:
    return records.fault_error(records.FaultKind.NO_CHECKPOINT, text)


def _fetch(
    place: mirror_place.Target,
    mark: mirror_mark.Mark,
    *,
    root: str,
    marks: mirror_place.Marks,
) -> tuple[str, str]:
    """Why a step on the mirror is damaged, or empty and where it is now."""
    path = layout.step_path(root, mark.step)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: move it away to fetch it")
    durable.make_folders(root)
    copy = f"{path}{_FETCHING}"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(copy)
    try:
        _write_all(copy, mark, place.read(mark))
        for folder, _, _ in os.walk(copy, topdown=False):
            durable.sync_folder(folder)
        _begin(place, root, mark=mark, marks=marks)
        os.rename(copy, path)
    except BaseException as error:
        # Whatever it was, a full disk among them, what is half there is of no use.
        shutil.rmtree(copy, ignore_errors=True)
        if isinstance(error, mirror_mark.DamageError):
            return str(error), ""
        raise
    durable.sync_folder(root)
    identity = mirror_place.find_identity(root)
    if identity is not None and mark.step in identity.inherited:
        # From now on the root has it, and may let go of it.
        rest = identity.inherited - {mark.step}
        mirror_place.write_identity(root, mirror_place.Identity(identity.owner, rest))
    return "", path


def _begin(
    place: mirror_place.Target,
    root: str,
    *,
    mark: mirror_mark.Mark,
    marks: mirror_place.Marks,
) -> None:
    """Gives a root without a step who it is, and what was decided about it."""
    identity = mirror_place.find_identity(root)
    is_new = not decisions.discover(root).committed
    if is_new and identity is None:
        inherited = frozenset(mirror_place.owned(marks, mark.source))
        mirror_place.write_identity(root, mirror_place.Identity(mark.source, inherited))
    # About another root, they could take out steps of this one.
    if is_new or (identity is not None and identity.owner == mark.source):
        decisions.adopt(root, place.decisions(mark.source))


def _write_all(
    copy: str, mark: mirror_mark.Mark, pieces: Iterable[tuple[str, bytes]]
) -> None:
    """Writes the files of a step, each proven before the next.

    Raises:
        DamageError: a file is not what the mark says.
        OSError: it cannot be written.
    """
    os.mkdir(copy)
    for name, group in itertools.groupby(pieces, key=operator.itemgetter(0)):
        path = os.path.join(copy, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        digest = hashlib.sha256()
        with open(path, "xb") as file:
            for _, piece in group:
                file.write(piece)
                digest.update(piece)
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
        if digest.hexdigest() != mark.files[name].sha256:
            raise mirror_mark.DamageError(f"{name} has changed since it was sent")
