"""Copies committed steps to a second place in the background, and brings them back.

World: host-only. Floor: above `mirror_folder` and `mirror_objects`. Read
`jaxft/checkpoint/mirror_mark.py` before.

After every commit the newest step that is not on the mirror yet is copied, then what
else the root has, the newest first, so that a slow mirror has the step that counts.
What the root no longer keeps goes once something newer of the same root is there.
Nothing here stops a run: a failure is an event, and the next commit tries again.

A mirror may serve several roots: each has an identity, `<root>/mirror-id`, and only
steps that carry it are replaced or deleted. A root that is begun from the mirror goes
on as the one that wrote the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
import pathlib
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Mapping

from jaxft import records
from jaxft.checkpoint import (
    array_store,
    layout,
    mirror_folder,
    mirror_mark,
    mirror_objects,
    stored_tree,
)

Target = mirror_folder.FolderTarget | mirror_objects.ObjectTarget
Marks = Mapping[int, mirror_mark.Mark | None]

_ID_FILE = "mirror-id"
_ID = re.compile(r"[0-9a-f]{32}")
_ABANDONED = re.compile(r"(\d+)\.abandoned-t\d+")
_FETCHING = f"{layout.TMP_MARK}-fetch"


def open_target(target: str, *, timeout_secs: float) -> Target:
    """The place that an address names.

    Args:
        target: a folder, `file://...`, `s3://bucket/prefix` or `gs://bucket/prefix`;
            see `mirror_objects.ObjectStore` for stores that need an endpoint.
        timeout_secs: deadline of each request to an object store.

    Raises:
        ValueError: it names no place.
        MirrorError: the store cannot be opened.
    """
    check_target(target)
    if "://" in target and not target.startswith("file://"):
        return mirror_objects.ObjectTarget(target, timeout_secs=timeout_secs)
    return mirror_folder.FolderTarget(target.removeprefix("file://"))


def check_target(target: str) -> None:
    """Refuses an address that names no place; looks at nothing but the text.

    Raises:
        ValueError: it says what is wrong.
    """
    scheme, separator, rest = target.partition("://")
    schemes = ["file", *mirror_objects.DRIVERS]
    is_misspelt = not separator and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", target)
    if not target or is_misspelt or (separator and (scheme not in schemes or not rest)):
        known = ", ".join(f"{name}://" for name in schemes)
        raise ValueError(f"mirror {target!r} is no folder and no address of {known}")


class Mirror:
    """Keeps a second copy of the steps of a root.

    Args:
        target: where to; see `open_target`.
        bytes_per_sec: most of what is sent; 0 for no bound.
        emit: told of copies, deletions and failures, from another thread.
        timeout_secs: deadline of each request to an object store.

    Raises:
        ValueError: `target` names no place.
    """

    def __init__(
        self,
        target: str,
        *,
        bytes_per_sec: float = 0.0,
        emit: records.Emit = records.ignore_event,
        timeout_secs: float = 60.0,
    ):
        check_target(target)
        self._address = target
        self._timeout_secs = timeout_secs
        self._emit = emit
        self._stop = threading.Event()
        self._pace = mirror_mark.Pace(bytes_per_sec, self._stop)
        self._wake = threading.Event()
        self._closing = False
        self._root = ""
        self._target: Target | None = None
        self._refused: set[tuple[int, str]] = set()
        self._busy = -1
        # A daemon: a place that never answers must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name="jaxft-mirror", daemon=True
        )

    @property
    def busy_step(self) -> int:
        """The step that is being copied, which must stay until then; -1 for none."""
        return self._busy

    def offer(self, step_path: str) -> None:
        """Says that a step was committed, or that the root has changed; never waits.

        Args:
            step_path: the step's folder.
        """
        self._root = os.path.dirname(os.path.abspath(step_path))
        if not self._thread.ident:
            self._thread.start()
        self._wake.set()

    def close(self, timeout_secs: float = 60.0) -> bool:
        """Lets the copies finish that were asked for, or stops them at the deadline.

        Returns:
            Whether they are over; what failed was an event.
        """
        if not self._thread.ident:
            return True
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_secs)
        if not self._thread.is_alive():
            return True
        self._fail(self._busy, f"it was not over within {timeout_secs:g} s at the end")
        self._stop.set()
        return False

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            is_last = self._closing
            with contextlib.suppress(mirror_mark.CopyStoppedError):
                try:
                    self._copy_all()
                except Exception as error:  # None of them is worth a run.
                    self._fail(self._busy, mirror_mark.first_line(error))
            self._busy = -1
            if is_last:
                return

    def _fail(self, step: int, reason: str) -> None:
        self._emit("mirror_failed", step=step, target=self._address, reason=reason)

    def _copy_all(self) -> None:
        """One pass: until the root has nothing that the mirror lacks."""
        owner = _root_id(self._root)
        if self._target is None:
            target = open_target(self._address, timeout_secs=self._timeout_secs)
            if isinstance(
                target, mirror_folder.FolderTarget
            ) and mirror_folder.is_same_folder(target, self._root):
                raise mirror_mark.MirrorError(
                    f"{target.where} is the checkpoint root itself: use another place"
                )
            target.sweep(owner, marks=target.marks())
            self._target = target
        refused: set[int] = set()
        while True:
            self._busy = -1
            found = layout.discover(self._root)
            marks = self._target.marks()
            step = _next_step(found, marks=marks, refused=refused)
            if step is None:
                break
            try:
                self._copy(step, owner=owner, marks=marks)
            except (mirror_mark.SourceError, FileNotFoundError) as error:
                if not os.path.isdir(layout.step_path(self._root, step)):
                    continue  # The root no longer keeps it.
                if not isinstance(error, mirror_mark.SourceError):
                    raise
                refused.add(step)
                self._refuse(step, mirror_mark.first_line(error))
        self._retire(found, owner=owner, marks=marks)

    def _refuse(self, step: int, reason: str) -> None:
        """Says once what is wrong with a step of the root."""
        if (step, reason) not in self._refused:
            self._refused.add((step, reason))
            self._fail(step, reason)

    def _copy(self, step: int, *, owner: str, marks: Marks) -> None:
        assert self._target is not None
        start = time.monotonic()
        self._busy = step
        there = marks.get(step)
        if step in marks and (there is None or there.source != owner):
            raise mirror_mark.SourceError(
                f"{self._target.where} has a step {step} that is of another root, "
                "or whose mark is damaged: use another place"
            )
        source = mirror_mark.describe(layout.step_path(self._root, step))
        known = mirror_mark.Known(
            mark for mark in marks.values() if mark and mark.source == owner
        )
        _prove_chunks(source, known=known, pace=self._pace)
        mark, num_bytes = self._target.add(
            source, owner=owner, known=known, pace=self._pace
        )
        self._busy = -1
        total = sum(file.num_bytes for file in mark.files.values())
        self._emit(
            "mirror_commit",
            step=step,
            target=self._address,
            secs=time.monotonic() - start,
            num_bytes=num_bytes,
            num_shared_bytes=total - num_bytes,
        )

    def _retire(self, found: layout.Discovery, *, owner: str, marks: Marks) -> None:
        """Deletes what the root no longer keeps and something newer stands for."""
        assert self._target is not None
        mirrored = [
            info.step for info in found.committed if _is_copy(info, marks=marks)
        ]
        abandoned = {
            int(match[1])
            for path in found.set_aside
            if (match := _ABANDONED.fullmatch(os.path.basename(path)))
        }
        for step, mark in list(marks.items()):
            if mark is None or mark.source != owner or step in found.steps:
                continue
            if mirrored and (step < max(mirrored) or step in abandoned):
                self._target.remove(step, marks=marks)
                marks = {other: marks[other] for other in marks if other != step}
                self._emit("mirror_deleted", step=step, target=self._address)


def _next_step(
    found: layout.Discovery, *, marks: Marks, refused: set[int]
) -> int | None:
    """The newest step of the root that the mirror lacks."""
    for info in reversed(found.committed):
        if info.step not in refused and not _is_copy(info, marks=marks):
            return info.step
    return None


def _is_copy(info: records.CheckpointInfo, *, marks: Marks) -> bool:
    """Whether the mirror has this very step."""
    mark = marks.get(info.step)
    try:
        return mark is not None and mark.identity == mirror_mark.identify(info.path)
    except FileNotFoundError:  # It is damaged, or goes while one looks.
        return False


def _prove_chunks(
    source: mirror_mark.Source, *, known: mirror_mark.Known, pace: mirror_mark.Pace
) -> None:
    """Reads the arrays whose files only their own checksums prove.

    Raises:
        SourceError: a chunk is damaged; it is named.
    """
    folders = {
        os.path.dirname(file.path)
        for file in source.files
        if file.proof and not file.sha256 and not known.find(file, step=source.step)
    }
    if not folders:
        return
    try:
        arrays = array_store.ArrayStore(
            os.path.join(source.path, layout.STATE_ITEM), num_threads=1
        )
        for name in arrays.names():
            top = f"{layout.STATE_ITEM}/{name}/"
            if any(f"{folder}/".startswith(top) for folder in folders):
                for _ in arrays.read_chunks(name, max_bytes=mirror_mark.PIECE_BYTES):
                    pace.spend(0)
    except stored_tree.ArrayError as error:
        raise mirror_mark.SourceError(str(error)) from error


def _root_id(root: str) -> str:
    """The identity of a root, made when it is asked for first."""
    file = pathlib.Path(root, _ID_FILE)
    with contextlib.suppress(FileNotFoundError):
        text = file.read_text().strip()
        if _ID.fullmatch(text):
            return text
    return _write_id(root, uuid.uuid4().hex)


def _write_id(root: str, text: str) -> str:
    new = pathlib.Path(root, f"{_ID_FILE}.new")
    new.write_text(f"{text}\n")
    os.rename(new, pathlib.Path(root, _ID_FILE))
    layout.sync_folder(root)
    return text


# --- bringing steps back ------------------------------------------------------


def list_steps(
    target: str, *, healthy_only: bool = False, timeout_secs: float = 60.0
) -> list[int]:
    """The steps on a mirror, ascending.

    Args:
        target: the mirror; see `open_target`.
        healthy_only: leaves out those that are no resume points.
        timeout_secs: deadline of each request to an object store.

    Raises:
        ValueError: `target` names no place.
        MirrorError: the store fails or does not answer.
        OSError: the folder cannot be read.
    """
    marks = open_target(target, timeout_secs=timeout_secs).marks()
    return _steps(marks, healthy_only=healthy_only)


def _steps(marks: Marks, *, healthy_only: bool) -> list[int]:
    return sorted(
        step
        for step, mark in marks.items()
        if mark is not None and (mark.healthy or not healthy_only)
    )


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
            whole.
        FileExistsError: the root has a step of that label.
        ValueError: `target` names no place.
        MirrorError: the store fails or does not answer.
        OSError: a folder cannot be read or written.
    """
    place = open_target(target, timeout_secs=timeout_secs)
    marks = place.marks()
    there = _steps(marks, healthy_only=step is None)
    if step is not None and step not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise _no_checkpoint(f"step {step} is not on {place.where}; there: {listed}")
    reasons = []
    for label in [step] if step is not None else reversed(there):
        mark = marks[label]
        assert mark is not None
        start = time.monotonic()
        reason, path = _fetch(place, mark, root=layout.absolute_root(into))
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
    return records.FaultError(
        records.Fault(kind=records.FaultKind.NO_CHECKPOINT, evidence=text)
    )


def _fetch(place: Target, mark: mirror_mark.Mark, *, root: str) -> tuple[str, str]:
    """Why a step on the mirror is damaged, or empty and where it is now."""
    path = layout.step_path(root, mark.step)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: move it away to fetch it")
    layout.make_root(root)
    is_new = not layout.discover(root).committed
    copy = f"{path}{_FETCHING}"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(copy)
    try:
        _write_all(copy, mark, place.read(mark))
    except mirror_mark.DamageError as error:
        shutil.rmtree(copy)
        return str(error), ""
    for folder, _, _ in os.walk(copy, topdown=False):
        layout.sync_folder(folder)
    if is_new and not os.path.lexists(os.path.join(root, _ID_FILE)):
        _write_id(root, mark.source)
    os.rename(copy, path)
    layout.sync_folder(root)
    return "", path


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
