"""Deletes the steps that nobody keeps, so that half a deletion is no step.

World: device. Floor: above `orbax_io`, beside `restore`. Read
`jaxft/checkpoint/policies.py` before and `jaxft/checkpoint/manager.py` after.

A step loses its name first and its files afterwards. What a kill in between leaves
is finished by the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping

from jaxft import records
from jaxft.checkpoint import decisions, layout, orbax_io, policies, run_record
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint import mirror as mirrors

_DOOMED = f"{layout.TMP_MARK}-deleted"


class Pins:
    """Steps that saves on their way still read from, and that must not go meanwhile.

    Attributes:
        lock: held while a step is renamed to be deleted, and while pins are set.
        mirror: copies steps; the one that it is busy with stays. None for none.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mirror: mirrors.Mirror | None = None
        self._held: dict[object, frozenset[int]] = {}

    def hold(self, steps: Iterable[int], *, by: object) -> None:
        """Pins `steps` for the save `by`; with the lock held.

        Not for its label: a save that was given up may end when the same step is being
        saved again.
        """
        self._held[by] = frozenset(steps)

    def release(self, *, by: object) -> None:
        """That save has read what it needs."""
        with self.lock:
            self._held.pop(by, None)

    def has(self, step: int) -> bool:
        """Whether some save needs `step`; with the lock held."""
        if self.mirror is not None and self.mirror.busy_step == step:
            return True
        return any(step in steps for steps in self._held.values())


class MetricWatch:
    """Tells once of a metric that a policy goes by and nobody has.

    Args:
        keep: the policy.
        emit: told of it.
    """

    def __init__(self, keep: records.KeepPolicy, *, emit: records.Emit):
        self._wanted = policies.metrics_of(keep)
        self._emit = emit

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at the metrics of the first step that has some."""
        if not metrics:
            return
        for metric in sorted(self._wanted - metrics.keys()):
            known = sorted(metrics)
            self._emit("metric_missing", step=step, metric=metric, known=known)
        self._wanted = frozenset()


def retain(
    root: str,
    *,
    keep: records.KeepPolicy,
    committed: int,
    in_flight: int | None,
    emit: records.Emit,
    pins: Pins | None = None,
) -> None:
    """Deletes what the policy does not keep, and what failed saves left.

    Args:
        root: the checkpoint root.
        keep: answers for the steps that are there now.
        committed: unfinished steps up to this one are leftovers.
        in_flight: but not this one.
        emit: told of deletions, and of those that failed: none is worth a run.
        pins: steps that saves on their way need.
    """
    try:
        found = decisions.discover(root)
        kept = decisions.read(root).pinned
    except (OSError, records.FaultError) as error:
        emit("delete_failed", path=root, reason=str(error))
        return
    infos = tuple(map(_with_health, found.committed))
    if policies.reads_metrics(keep):
        infos = tuple(map(_with_metrics, infos))
    with pins.lock if pins else contextlib.nullcontext():
        needed = {info.step for info in infos if pins and pins.has(info.step)}
    for info in policies.plan_deletions(
        infos, keep=keep, pinned=kept | needed, shares=_share_bytes
    ):
        delete(info.step, path=info.path, emit=emit, pins=pins)
    for path, step in found.unfinished:
        if step <= committed and step != in_flight:
            delete(step, path=path, emit=emit)


# --- what is asked about a step -------------------------------------------------

# Each once: another step under the same name has another time, and is read anew.


def _with_metrics(info: records.CheckpointInfo) -> records.CheckpointInfo:
    try:
        metrics = _read_metrics(info.path, info.commit_secs)
    except (OSError, run_record.RecordError, records.FaultError):
        return info  # it has none to be ranked by
    return dataclasses.replace(info, metrics=metrics)


@functools.lru_cache(maxsize=decisions.MANY_STEPS)
def _read_metrics(path: str, commit_secs: float) -> dict[str, float]:
    del commit_secs
    return run_record.read_record(path)["metrics"]


_NO_MANIFEST = (OSError, manifests.ManifestError, records.FaultError)
# As a manifest has it; no text inside it can look like that, with its quotes escaped.
_HEALTHY = b'"healthy":true'


def _with_health(info: records.CheckpointInfo) -> records.CheckpointInfo:
    try:
        healthy = _read_health(info.path, info.commit_secs)
    except _NO_MANIFEST:
        return info  # nothing is known against it; a restore judges it
    if healthy == info.healthy:
        return info
    return dataclasses.replace(info, healthy=healthy)


@functools.lru_cache(maxsize=decisions.MANY_STEPS)
def _read_health(path: str, commit_secs: float) -> bool:
    del commit_secs
    # All steps are asked after a restart, beside training, and a manifest of thousands
    # of leaves takes long to be understood. That of a damaged one is no matter here.
    file = pathlib.Path(path, layout.MANIFEST_ITEM, manifests.MANIFEST_FILE)
    return _HEALTHY in file.read_bytes() or manifests.read(path).healthy


def _share_bytes(first: records.CheckpointInfo, second: records.CheckpointInfo) -> bool:
    """Whether a file of one step is a file of the other as well."""
    try:
        ours = _read_origins(first.path, first.commit_secs)
        theirs = _read_origins(second.path, second.commit_secs)
    except _NO_MANIFEST:
        return False  # whoever links has a manifest
    return any(theirs.get(leaf) == step for leaf, step in ours.items())


@functools.lru_cache(maxsize=16)
def _read_origins(path: str, commit_secs: float) -> Mapping[str, int]:
    """Leaf path -> the step that wrote its bytes."""
    del commit_secs
    found = manifests.read(path).leaves
    return {leaf: entry.written_at for leaf, entry in found.items()}


# --- deletions ------------------------------------------------------------------


def finish_deletions(root: str, *, emit: records.Emit) -> None:
    """Deletes what interrupted deletions left; unfinished saves stay."""
    for path, step in layout.discover(root).unfinished:
        if path.endswith(_DOOMED):
            delete(step, path=path, emit=emit)


def delete(
    step: int, *, path: str, emit: records.Emit, pins: Pins | None = None
) -> None:
    """Deletes one folder of a step; one that has vanished is fine."""
    try:
        if layout.TMP_MARK not in os.path.basename(path):
            doomed = f"{path}{_DOOMED}"
            orbax_io.remove(doomed)
            with pins.lock if pins else contextlib.nullcontext():
                if pins and pins.has(step):
                    return  # The next retention sees it again.
                os.rename(path, doomed)
            path = doomed
        orbax_io.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        emit("delete_failed", path=path, reason=str(error))
        return
    emit("deleted", step=step, path=path)
