"""Reads one step and judges it: good, or damaged and why.

World: device. Floor: above `proof`, below `restore`. Read `jaxft/checkpoint/proof.py`
before and `jaxft/checkpoint/restore.py` after.

* `full`: the manifest, the length of every file, each sha256 that the manifest has,
  and the fingerprint of every restored leaf, taken where it lies now;
* `sample`: the same, with the fingerprints of a stable eighth of the leaves;
* `off`: nothing but the checksums that end each chunk. A step that its manifest calls
  unhealthy is none to go on from then, either.

A step of an older jaxft has no manifest: it is restored with the event `unverified`,
on the word of its checksums. One whose run record says that it was given a manifest
and that has none is damaged. When a step cannot be read, or differs, it is verified
on the disk, without any device, and the file or leaf that is to blame is named; when
the disk is right, the failure is not the step's and is raised.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxft import records
from jaxft.checkpoint import (
    causes,
    layout,
    orbax_io,
    proof,
    quiet,
    run_record,
    together,
    verify,
)
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint.manifest import Manifest, Problem
from jaxft.checkpoint.state_digests import Digests
from jaxft.config import Verify

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
        num_proven: leaves whose values were proven to be those that were saved.
        secs: what reading and proving took.
        manifest: what proves it; None where nothing was to be proven.
    """

    step: int
    state: PyTree
    data: dict[str, Any]
    run: dict[str, Any]
    metrics: dict[str, float]
    record: dict[str, Any]
    path: str
    num_proven: int = 0
    secs: float = 0.0
    manifest: Manifest | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a restore asks of each step; see `restore.restore_newest`."""

    target: PyTree
    check: Check | None
    verify: Verify
    memory_bytes: int
    emit: records.Emit


@dataclasses.dataclass(frozen=True)
class Damage:
    """A step that is not what was saved.

    Attributes:
        reason: one line.
        problems: the files and leaves that are to blame.
        unhealthy: leaves that are not finite, where that is all: what was saved is
            there, and is no resume point.
    """

    reason: str
    problems: tuple[Problem, ...] = ()
    unhealthy: tuple[str, ...] = ()

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Damage:
        """Several, told by the first and their number."""
        problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return cls(f"{problems[0]}{more}", problems)

    @classmethod
    def union(cls, seen: Sequence[Damage | None]) -> Damage | None:
        """What several processes see of one step, by their index; None for nothing."""
        found = {index: one for index, one in enumerate(seen) if one is not None}
        if not found:
            return None
        index, first = next(iter(found.items()))
        problems = tuple(
            dict.fromkeys(p for one in found.values() for p in one.problems)
        )
        if problems:
            first = cls.of(problems)
        if len(found) < len(seen):
            reason = f"{first.reason} (seen by process {index})"
            first = dataclasses.replace(first, reason=reason)
        return first

    def to_json(self) -> list[Any]:
        """As plain values."""
        problems = [[one.path, one.reason, one.leaf] for one in self.problems]
        return [self.reason, problems, list(self.unhealthy)]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Damage:
        """Reads what `to_json` gave."""
        reason, problems, unhealthy = value
        return cls(reason, tuple(Problem(*one) for one in problems), tuple(unhealthy))


# --- reading ------------------------------------------------------------------


def read(path: str, reading: Reading, *, step: int) -> Restored | Damage:
    """Reads a step that is whole as far as its files tell; see also `prove`.

    Raises:
        FaultError: kind CONFIG: a newer jaxft wrote it, or it may not be read now.
        TargetMismatchError: the target does not fit the stored state.
        Exception: a failure that is not the step's.
    """
    with quiet.quiet_orbax():
        outcome = _read(path, reading, step=step)
        if isinstance(outcome, Damage):
            quiet.drain()
    return outcome


def tell(damage: Damage, *, step: int, emit: records.Emit) -> None:
    """Emits what is wrong with a step."""
    if damage.unhealthy:
        emit("unhealthy", step=step, leaves=list(damage.unhealthy))
        return
    where = damage.problems[0].path if damage.problems else ""
    emit("corrupt", step=step, path=where, reason=damage.reason)


def _read(path: str, reading: Reading, *, step: int) -> Restored | Damage:
    start = time.monotonic()
    manifest: Manifest | None = None
    try:
        record = run_record.read_record(path)
        if record["step"] != step:
            return Damage(f"it says that it is step {record['step']}")
        manifest = _manifest(path, record, is_needed=reading.verify is not Verify.OFF)
        if problems := _check_files(path, manifest, reading.verify):
            return Damage.of(problems)
        if reading.check is not None and (reason := reading.check(record)):
            return Damage(reason)
        if manifest is not None and not manifest.healthy:
            return _unhealthy(manifest)
        state = orbax_io.read_state(
            path,
            reading.target,
            record=record,
            memory_bytes=reading.memory_bytes,
            proof=manifest if reading.verify is Verify.FULL else None,
        )
    except records.FaultError as error:
        if "cannot be read" in str(error):
            reading.emit("unreadable", step=step, reason=str(error))
        raise
    except Exception as error:
        return _explain(error, path, reading=reading, step=step)
    return Restored(
        step=step,
        state=state,
        data=record["data"],
        run=record["run"],
        metrics=record["metrics"],
        record=record,
        path=path,
        secs=time.monotonic() - start,
        manifest=None if reading.verify is Verify.OFF else manifest,
    )


def _manifest(path: str, record: dict[str, Any], *, is_needed: bool) -> Manifest | None:
    """The manifest; None for a step that never had one.

    Where it is not needed, also None for one that is damaged or lost.
    """
    try:
        return manifests.read(path)
    except manifests.ManifestError:
        if is_needed:
            raise
        return None
    except (FileNotFoundError, NotADirectoryError):
        if is_needed and record.get("has_manifest"):
            file = f"{layout.MANIFEST_ITEM}/{manifests.MANIFEST_FILE}"
            raise manifests.ManifestError(f"{file} is missing") from None
        return None


def _check_files(path: str, manifest: Manifest | None, mode: Verify) -> list[Problem]:
    """What is wrong but for the values, which are proven when they are there."""
    if manifest is None or mode is Verify.OFF:
        return []
    return verify.check_step(path, manifest, full=True)


def _unhealthy(manifest: Manifest) -> Damage:
    leaves = manifest.unhealthy
    reason = f"it is no resume point: not finite: {', '.join(leaves[:20])}"
    return Damage(reason, unhealthy=leaves or ("of an unknown name",))


def _explain(error: Exception, path: str, *, reading: Reading, step: int) -> Damage:
    """The damage that an error comes from.

    Raises:
        FaultError: kind CONFIG: the step may not be read now.
        Exception: the error itself, when the step is not to blame.
    """
    if isinstance(error, run_record.RecordError | manifests.ManifestError):
        return Damage.of([_blame(error, path)])
    # Damaged, or is it the target, the devices or this process? Ask the files, but
    # not by Orbax first: it takes some that may not be read for absent ones.
    try:
        _read_anything(path)
        if causes.cause(error) in ("no permission", "I/O error"):
            raise layout.unreadable(path, records.first_line(error)) from error
    except records.FaultError as refusal:
        reading.emit("unreadable", step=step, reason=str(refusal))
        raise
    if causes.is_process_failure(error):
        raise error
    if problems := _verify(path):
        return Damage.of(problems)
    if reason := orbax_io.probe(path):
        return Damage(reason)
    raise error


def _verify(path: str) -> list[Problem]:
    """What a reader without devices finds wrong with a step."""
    try:
        return verify.verify_step(path, allow_unproven=True)
    except OSError as error:
        if causes.is_process_failure(error):
            raise
        return [Problem(os.path.basename(path), records.first_line(error))]


def _blame(error: Exception, path: str) -> Problem:
    """The file that an error about one speaks of."""
    if isinstance(error, manifests.ManifestError):
        file = f"{layout.MANIFEST_ITEM}/{manifests.MANIFEST_FILE}"
    else:
        file = f"{layout.RUN_ITEM}/{run_record.RECORD_FILE}"
    text = str(error).removeprefix(os.path.join(path, file)).removeprefix(file)
    return Problem(file, text.strip())


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
        if causes.is_process_failure(error):
            raise


# --- proving ------------------------------------------------------------------


def prove(restored: Restored, reading: Reading) -> Restored | Damage:
    """Compares what was restored with what was saved; all processes together.

    Args:
        restored: what `read` gave.
        reading: the same.

    Raises:
        FaultError: kind EXCEPTION: the step on disk is right, and what was restored
            of it is not: this machine cannot be trusted.
    """
    start = time.monotonic()
    num_proven, mode = 0, reading.verify.value
    problems: list[Problem] = []
    if reading.verify is not Verify.OFF:
        manifest = restored.manifest
        if manifest is None:
            mode = "none"
            reason = "it has no manifest: an older jaxft wrote it"
            reading.emit("unverified", step=restored.step, reason=reason)
        else:
            is_sample = reading.verify is Verify.SAMPLE
            paths = proof.sample(manifest) if is_sample else list(manifest.leaves)
            num_proven = len(paths)
            problems = _differences(restored, manifest, paths)
    if problems:
        return _judge_difference(restored, problems)
    verify_secs = time.monotonic() - start
    secs = restored.secs + verify_secs
    reading.emit(
        "restore",
        step=restored.step,
        secs=secs,
        num_bytes=layout.count_bytes(restored.path),
        verify=mode,
        num_proven=num_proven,
        verify_secs=verify_secs,
    )
    return dataclasses.replace(restored, num_proven=num_proven, secs=secs)


def _differences(
    restored: Restored, manifest: Manifest, paths: list[str]
) -> list[Problem]:
    """What differs in any process: each has its own host memory."""
    with together.same_end(f"prove what it has restored of {restored.path}"):
        digests = Digests(restored.state, paths=paths)
        digests.start()
        digests.partials()
    found = proof.differing_leaves(digests, manifest)
    all_found = dict.fromkeys(
        tuple(one) for each in together.gather(found) for one in each
    )
    return [Problem(leaf, reason, leaf) for leaf, reason in all_found]


def _judge_difference(restored: Restored, problems: list[Problem]) -> Damage:
    with together.same_end(f"verify {restored.path}"):
        is_primary = jax.process_index() == 0
        found = _verify(restored.path) if is_primary else []
    on_disk = Damage.of(found).to_json() if found else None
    if on_disk := together.from_primary(on_disk):
        return Damage.from_json(on_disk)
    text = (
        f"{restored.path} is right on disk, but restored from it {problems[0]}: memory "
        "or a device of this machine changes values; use another one"
    )
    raise records.fault_error(records.FaultKind.EXCEPTION, text)


# --- what else a bad file belongs to -------------------------------------------


def sharing_steps(
    root: str, step: int, *, damage: Damage, others: Iterable[int]
) -> dict[int, str]:
    """Steps that contain the same bad file as `step`, and the path of that.

    Args:
        root: the checkpoint root.
        step: the damaged step, still under its name.
        damage: what is wrong with it.
        others: the steps to look at.
    """
    path = layout.step_path(root, step)
    bad = sorted(_bad_files(path, damage.problems))
    found: dict[int, str] = {}
    for other in others:
        for file in bad:
            if _is_same(os.path.join(path, file), os.path.join(root, str(other), file)):
                found[other] = file
                break
    return found


def _bad_files(path: str, problems: Iterable[Problem]) -> set[str]:
    """Files of a step that are to blame; of a leaf that is, all of its files.

    A file that is missing is not among them: its other names are whole.
    """
    files: set[str] = set()
    names: dict[str, str] = {}
    for problem in problems:
        if os.path.isfile(os.path.join(path, problem.path)):
            files.add(problem.path)
        elif problem.path == problem.leaf:
            names = names or _leaf_names(path)
            folder = os.path.join(
                layout.STATE_ITEM, names.get(problem.leaf, problem.leaf)
            )
            for parent, _, inside in os.walk(os.path.join(path, folder)):
                relative = os.path.relpath(parent, path)
                files.update(os.path.join(relative, file) for file in inside)
    return files


def _leaf_names(path: str) -> dict[str, str]:
    try:
        leaves = manifests.read(path).leaves
    except (OSError, manifests.ManifestError, records.FaultError):
        return {}
    return {leaf: entry.name for leaf, entry in leaves.items()}


def _is_same(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False
