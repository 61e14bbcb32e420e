"""Copies committed steps to a second place in the background.

World: host-only. Floor: above `mirror_place`. Read `jaxft/checkpoint/mirror_place.py`
before and `jaxft/checkpoint/mirror_fetch.py` after.

After every commit the newest step that is not on the mirror yet is copied, then what
else the root has, the newest first, so that a slow mirror has the step that counts.
Before them goes what was decided about the root: a step that a rollback took out is
neither copied nor kept. What the root once had and no longer keeps goes once something
newer of the same root is there; where a copy finds no room, what is older than the
newest good step of the mirror goes before it. Steps that the root never had, or that
went bad in it, stay as long as the keep policy wants them. Nothing here stops a run:
a failure is an event, and the next commit tries again.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from jaxft import records
from jaxft.checkpoint import (
    array_store,
    decisions,
    layout,
    mirror_folder,
    mirror_mark,
    mirror_place,
    policies,
    stored_tree,
)

_QUARANTINED = re.compile(r"(\d+)\.quarantined-\d+")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# How often somebody who waits is asked whether to go on.
_POLL_SECS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """A root and its mirror at one moment.

    Attributes:
        found: what the root has.
        decided: what was decided about it.
        identity: who it is on the mirror.
        marks: what the mirror has.
    """

    found: layout.Discovery
    decided: decisions.Decisions
    identity: mirror_place.Identity
    marks: mirror_place.Marks

    @property
    def newest_good(self) -> int:
        """The mirror's newest healthy step that the root has gone on from; -1: none."""
        newest = max(self.found.steps, default=-1)
        owned = mirror_place.owned(self.marks, self.identity.owner)
        return max(
            (
                step
                for step, mark in owned.items()
                if step <= newest
                and mark.healthy
                and not self.decided.is_abandoned(step, timeline=mark.timeline)
            ),
            default=-1,
        )


class Mirror:
    """Keeps a second copy of the steps of a root.

    Args:
        target: where to; see `mirror_place.open_target`.
        bytes_per_sec: most of what is sent; 0 for no bound.
        keep: what stays of the steps that the root never had; None for all of them.
        emit: told of copies, deletions and failures, from another thread.
        timeout_secs: deadline of each request to an object store.

    Attributes:
        address: where to.

    Raises:
        ValueError: `target` names no place.
    """

    def __init__(
        self,
        target: str,
        *,
        bytes_per_sec: float = 0.0,
        keep: records.KeepPolicy | None = None,
        emit: records.Emit = records.ignore_event,
        timeout_secs: float = 60.0,
    ):
        mirror_place.check_target(target)
        self.address = target
        self._timeout_secs = timeout_secs
        self._keep = keep
        self._emit = emit
        self._stop = threading.Event()
        self._pace = mirror_mark.Pace(bytes_per_sec, self._stop)
        self._root = ""
        self._target: mirror_place.Target | None = None
        self._told: dict[str, bytes] = {}
        self._refused: set[tuple[int, str]] = set()
        self._busy = -1
        self._is_littered = False
        # Guards the two below.
        self._lock = threading.Lock()
        self._is_wanted = False
        self._thread: threading.Thread | None = None

    @property
    def busy_step(self) -> int:
        """The step that is being copied, which must stay until then; -1 for none."""
        return self._busy

    def offer(self, step_path: str) -> None:
        """Says that a step was committed, or that the root has changed; never waits.

        Args:
            step_path: the step's folder.
        """
        with self._lock:
            self._root = os.path.dirname(os.path.abspath(step_path))
            self._is_wanted = True
            self._stop.clear()
            if self._thread is None:
                # It ends when there is nothing more to do. A daemon: a place that
                # never answers must not keep the process alive.
                self._thread = threading.Thread(
                    target=self._run, name="jaxft-mirror", daemon=True
                )
                self._thread.start()

    def close(
        self,
        timeout_secs: float = 60.0,
        *,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Lets the copies finish that were asked for, or stops them at the deadline.

        A later `offer` begins anew.

        Args:
            timeout_secs: when to stop them.
            may_wait: asked all the time; False stops them at once.

        Returns:
            Whether they are over; what failed was an event.
        """
        start = time.monotonic()
        while (thread := self._thread) is not None:
            left_secs = start + timeout_secs - time.monotonic()
            if left_secs <= 0 or not may_wait():
                break
            thread.join(min(_POLL_SECS, left_secs))
        with self._lock:
            if self._thread is None:
                return True
            self._is_wanted = False
            self._stop.set()
        secs = min(time.monotonic() - start, timeout_secs)
        self._fail(self._busy, f"it was not over within {secs:.3g} s at the end")
        return False

    def _run(self) -> None:
        while self._has_more():
            try:
                self._copy_all()
            except mirror_mark.CopyStoppedError:
                pass  # Who stopped it has said so.
            except Exception as error:  # None of them is worth a run.
                self._fail(self._busy, records.first_line(error))
            self._busy = -1

    def _has_more(self) -> bool:
        """Whether another pass was asked for; otherwise the thread is over."""
        with self._lock:
            if not self._is_wanted:
                self._thread = None
            is_wanted, self._is_wanted = self._is_wanted, False
            return is_wanted

    def _fail(self, step: int, reason: str) -> None:
        self._emit("mirror_failed", step=step, target=self.address, reason=reason)

    def _copy_all(self) -> None:
        """One pass: until the root has nothing that the mirror lacks."""
        identity = mirror_place.identify(self._root)
        owner = identity.owner
        if self._target is None:
            self._target = self._open(owner)
        refused: set[int] = set()
        while True:
            self._busy = -1
            found = decisions.discover(self._root)
            # Read after the steps: what took any of them out is among them.
            texts = decisions.texts(self._root)
            decided = decisions.parse(
                texts, folder=os.path.join(self._root, decisions.FOLDER)
            )
            marks = self._target.marks()
            work = _Work(found=found, decided=decided, identity=identity, marks=marks)
            step = _next_step(found, marks=marks, refused=refused)
            try:
                self._send_decisions(texts, owner=owner)
                if step is None:
                    break
                if not self._try_to_copy(step, owner=owner, marks=marks):
                    refused.add(step)
            except OSError as error:
                if error.errno not in _NO_ROOM or not self._make_room(work):
                    raise
        if any(_is_copy(info, marks=marks) for info in found.committed):
            self._retire(work)
        if self._is_littered:
            self._target.sweep(owner, marks=self._target.marks())
            self._is_littered = False

    def _open(self, owner: str) -> mirror_place.Target:
        """The place, where nothing is left of what was interrupted."""
        target = mirror_place.open_target(self.address, timeout_secs=self._timeout_secs)
        if isinstance(
            target, mirror_folder.FolderTarget
        ) and mirror_folder.is_same_folder(target, self._root):
            raise mirror_mark.MirrorError(
                f"{target.where} is the checkpoint root itself: use another place"
            )
        target.sweep(owner, marks=target.marks())
        self._told = target.decisions(owner)
        return target

    def _send_decisions(self, texts: Mapping[str, bytes], *, owner: str) -> None:
        """Copies what was decided about the root."""
        assert self._target is not None
        for name, text in texts.items():
            there = self._told.get(name)
            if there is None:
                self._target.add_decision(name, text, owner=owner)
                self._told[name] = text
            elif there != text:
                raise mirror_mark.MirrorError(
                    f"{self._target.where} has another {decisions.FOLDER}/{name} than "
                    "the root: use another place"
                )

    def _try_to_copy(self, step: int, *, owner: str, marks: mirror_place.Marks) -> bool:
        """Copies a step; False where it is not as it was written, which is said.

        A step that the root gives up meanwhile is no failure.
        """
        try:
            self._copy(step, owner=owner, marks=marks)
        except (mirror_mark.SourceError, FileNotFoundError) as error:
            self._is_littered = True
            if not os.path.isdir(layout.step_path(self._root, step)):
                return True  # The root no longer keeps it.
            if not isinstance(error, mirror_mark.SourceError):
                raise
            self._refuse(step, records.first_line(error))
            return False
        except BaseException:
            self._is_littered = True
            raise
        return True

    def _refuse(self, step: int, reason: str) -> None:
        """Says once what is wrong with a step of the root."""
        if (step, reason) not in self._refused:
            self._refused.add((step, reason))
            self._fail(step, reason)

    def _copy(self, step: int, *, owner: str, marks: mirror_place.Marks) -> None:
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
            target=self.address,
            secs=time.monotonic() - start,
            num_bytes=num_bytes,
            num_shared_bytes=total - num_bytes,
        )

    def _make_room(self, work: _Work) -> bool:
        """Deletes ahead of a copy what may go without it; whether that was anything."""
        return work.newest_good >= 0 and self._retire(work)

    def _retire(self, work: _Work) -> bool:
        """Deletes what the root no longer keeps and something newer stands for."""
        assert self._target is not None
        marks, found = work.marks, work.found
        mirrored = [info for info in found.committed if _is_copy(info, marks=marks)]
        stand_in = work.newest_good
        if stand_in < 0:
            stand_in = max((info.step for info in mirrored), default=-1)
        gone = {
            step: mark
            for step, mark in mirror_place.owned(marks, work.identity.owner).items()
            if step not in found.steps and step not in work.decided.pinned
        }
        abandoned = {
            step
            for step, mark in gone.items()
            if work.decided.is_abandoned(step, timeline=mark.timeline)
        }
        # To what it never had, and to what it lost to damage, the root is no guide.
        guideless = work.identity.inherited | quarantined_steps(found.set_aside)
        let_go = {step for step in gone if step < stand_in} - guideless
        others = {step: gone[step] for step in gone.keys() - abandoned - let_go}
        let_go |= self._dropped(mirrored, marks=marks, others=others) - {stand_in}
        for step in sorted(abandoned | let_go):
            self._target.remove(step, marks=marks)
            marks = {other: marks[other] for other in marks if other != step}
            self._emit("mirror_deleted", step=step, target=self.address)
        return bool(abandoned | let_go)

    def _dropped(
        self,
        committed: Iterable[records.CheckpointInfo],
        *,
        marks: mirror_place.Marks,
        others: Mapping[int, mirror_mark.Mark],
    ) -> set[int]:
        """Which of `others` the keep policy drops, beside what the root has."""
        if self._keep is None:
            return set()
        infos = {info.step: info for info in committed}
        for step, mark in [*marks.items(), *others.items()]:
            if mark is not None and (step in infos or step in others):
                path = infos[step].path if step in infos else ""
                infos[step] = records.CheckpointInfo(
                    step=step,
                    path=path,
                    commit_secs=0.0,
                    metrics=dict(mark.metrics),
                    healthy=mark.healthy,
                )
        ordered = [infos[step] for step in sorted(infos)]

        def shares(
            first: records.CheckpointInfo, second: records.CheckpointInfo
        ) -> bool:
            one, other = marks.get(first.step), marks.get(second.step)
            if one is None or other is None:
                return False
            keys = mirror_mark.shared_keys(one).keys()
            return not keys.isdisjoint(mirror_mark.shared_keys(other))

        dropped = policies.plan_deletions(ordered, keep=self._keep, shares=shares)
        return {info.step for info in dropped} & others.keys()


def quarantined_steps(set_aside: Iterable[str]) -> frozenset[int]:
    """Labels of those that were damaged in the root, of what was moved aside there."""
    names = map(os.path.basename, set_aside)
    matches = map(_QUARANTINED.fullmatch, names)
    return frozenset(int(match[1]) for match in matches if match)


def _next_step(
    found: layout.Discovery, *, marks: mirror_place.Marks, refused: set[int]
) -> int | None:
    """The newest step of the root that the mirror lacks."""
    for info in reversed(found.committed):
        if info.step not in refused and not _is_copy(info, marks=marks):
            return info.step
    return None


def _is_copy(info: records.CheckpointInfo, *, marks: mirror_place.Marks) -> bool:
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
