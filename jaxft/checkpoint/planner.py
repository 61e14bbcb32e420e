"""Plans each save: the layout, the leaves that are linked, what proves the step.

World: device. Floor: above `proof` and `retention`, below `manager`. Read
`jaxft/checkpoint/proof.py` and `jaxft/checkpoint/incremental.py` before.

A leaf that has not changed is hard-linked to the bytes of the step before the newest
one, never of the newest: neighbouring steps share no file, so that a bad file always
leaves one of two neighbours whole. Several processes, which would have to agree on
every link, write in full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxft import durable, records
from jaxft.checkpoint import (
    decisions,
    layout,
    leaves,
    options,
    orbax_io,
    policies,
    proof,
    retention,
    run_record,
    shared_root,
    space,
)
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint.chunking import ArrayOptions
from jaxft.checkpoint.manifest import Manifest
from jaxft.config import ArrayLayout

PyTree = Any

_MAX_KNOWN = 4
# A committed manifest that another process does not see yet: a network file system.
_SEEN_SECS = 10.0
_POLL_SECS = 0.1


@dataclasses.dataclass(frozen=True)
class _Known:
    """A committed step, as the planner last saw it.

    Attributes:
        stamp: changes when another step takes the name.
        manifest: of the step.
        kinds: leaf path -> what it was, as text.
    """

    stamp: tuple[int, int]
    manifest: Manifest
    kinds: Mapping[str, str]


def _stamp(step_path: str) -> tuple[int, int]:
    path = os.path.join(step_path, layout.MANIFEST_ITEM, manifests.MANIFEST_FILE)
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def _kinds(record: Mapping[str, Any]) -> dict[str, str]:
    """Leaf path -> its kind, dtype and shape, as text."""
    specs = run_record.leaf_specs(record)
    return {path: str(spec) for path, spec in specs.items()}


class SavePlanner:
    """Plans the saves of one manager.

    Args:
        root: the checkpoint root, absolute.
        chosen: how steps are stored.
        keep: what stays of them.
        timeout_secs: deadline of a save.
        emit: told once which layout is written, and why.

    Attributes:
        pins: steps that the save in flight needs.
        write_rate: step -> bytes a second that its save writes at most; 0 for all.
    """

    def __init__(
        self,
        root: str,
        chosen: options.Options,
        *,
        keep: records.KeepPolicy,
        timeout_secs: float,
        emit: records.Emit,
    ):
        self.pins = retention.Pins()
        self.write_rate: Callable[[int], float] = lambda _: 0.0
        self._root = root
        self._options = chosen
        self._keep = keep
        self._timeout_secs = timeout_secs
        self._emit = emit
        self._has_links: bool | None = None
        self._layout: ArrayLayout | None = None
        self._known: dict[int, _Known] = {}
        self._is_shared = False
        self._is_tidy = False

    # --- what is there ----------------------------------------------------------

    def probe(self) -> None:
        """Tries what saves will ask of the root.

        Raises:
            SpaceError: it cannot hold checkpoints.
        """
        self._has_links = space.probe(self._root).has_links

    def check(self, target: PyTree, found: layout.Discovery) -> None:
        """Tries the root, and asks for room for what is kept and one more.

        Args:
            target: the state.
            found: what is there already.

        Raises:
            SpaceError: the root cannot hold checkpoints, or not so many.
        """
        self.probe()
        space.check_space(
            self._root,
            state_bytes=leaves.count_bytes(target),
            num_kept=max(1, policies.most_kept(self._keep)),
            num_there=len(found.steps),
            leftovers=[path for path, _ in found.unfinished],
        )

    def agree(self) -> None:
        """Proves once that all processes share the root; all call it together.

        Raises:
            ConfigError: they do not; see `shared_root.check` for the rest.
        """
        if not self._is_shared:
            shared_root.check(self._root)
        self._is_shared = True

    def make_way(self, step: int) -> bool:
        """Whether the step is to be written; takes away what would be in its way.

        Raises:
            ValueError: a newer step is there.
            FaultError: the root cannot be understood.
            OSError: it cannot be read or changed, or somebody else writes there.
        """
        if problem := self._options.may_commit():
            raise PermissionError(errno.EPERM, problem, self._root)
        found = decisions.discover(self._root)
        if found.abandoned:
            decisions.finish(self._root, emit=self._emit)
        if step in found.steps:
            return False
        if found.steps and found.steps[-1] > step:
            raise ValueError(
                f"cannot save step {step} into {self._root}: step {found.steps[-1]} is "
                "newer and would be resumed from; restore it, or use another folder"
            )
        is_primary = jax.process_index() == 0
        if not self._is_tidy and is_primary:
            # Before the first save nothing unfinished is ours, and it may be all the
            # room that there is; see `check`. Nor is it after one that several failed.
            for path, of_step in found.unfinished:
                retention.delete(of_step, path=path, emit=self._emit)
        self._is_tidy = True
        path = layout.step_path(self._root, step)
        if is_primary and os.path.lexists(path):
            aside = layout.quarantine(path)
            reason = "not a checkpoint, and in the way of one"
            self._emit("quarantine", step=step, path=aside, reason=reason)
        return True

    # --- one save ---------------------------------------------------------------

    def record(
        self, step: int, *, timeline: int, time_secs: float, **content: Any
    ) -> dict[str, Any]:
        """The run record of a save, but for its `state`.

        Args:
            step: the label.
            timeline: the one that was restored.
            time_secs: when, in seconds since the epoch.
            **content: what else the caller keeps with the state.

        Raises:
            FaultError: the decisions about the root cannot be understood.
        """
        return run_record.make_record(
            step,
            time_secs=time_secs,
            state=None,
            timeline=max(timeline, decisions.read(self._root).timeline),
            has_manifest=True,
            **content,
        )

    def plan(
        self, step: int, *, state: PyTree, record: Mapping[str, Any]
    ) -> proof.Proof:
        """Chooses how a state is written, and makes the root for it.

        Args:
            step: the label.
            state: what is saved.
            record: its run record.

        Raises:
            OSError: that is not possible.
        """
        durable.make_folders(self._root)
        if jax.process_count() > 1 and jax.process_index() == 0:
            # Where Orbax cannot, the others wait for it without limit.
            items = (layout.STATE_ITEM, layout.RUN_ITEM, layout.MANIFEST_ITEM)
            layout.try_folders(layout.step_path(self._root, step), items)
        arrays = ArrayOptions(
            layout=self._choose_layout(record).value,
            codec=self._options.codec.value,
            memory_bytes=self._options.memory_bytes,
        )
        one = proof.Proof(
            step,
            record=record,
            state=state,
            arrays=arrays,
            health=self._options.health,
        )
        try:
            self._plan_links(one, record)
        except BaseException:
            self.end(one, committed=False)
            raise
        return one

    def _choose_layout(self, record: Mapping[str, Any]) -> ArrayLayout:
        """The same for all saves of a manager."""
        if self._layout is not None:
            return self._layout
        if self._has_links is None and jax.process_count() == 1:
            try:
                self.probe()
            except space.SpaceError:
                self._has_links = False  # The save itself will tell what is wrong.
        num_leaves, num_bytes = proof.num_state_bytes(run_record.leaf_specs(record))
        self._layout, reason = options.choose_layout(
            self._options.layout,
            num_leaves=num_leaves,
            num_bytes=num_bytes,
            has_links=bool(self._has_links),
            num_processes=jax.process_count(),
        )
        self._emit(
            "checkpoint_layout",
            layout=self._layout.value,
            codec=self._options.codec.value,
            reason=reason,
        )
        return self._layout

    def _plan_links(self, one: proof.Proof, record: Mapping[str, Any]) -> None:
        can_link = self._layout is ArrayLayout.FILES and self._has_links
        if not can_link or not self._options.full_every or jax.process_count() > 1:
            return
        one.kinds = _kinds(record)
        # Between the look and the pin nothing may be deleted.
        with self.pins.lock:
            infos = decisions.discover(self._root).committed
            self.pins.hold([info.step for info in infos[-2:]], by=one)
        found = [self._look(info) for info in infos[-2:]]
        if len(found) < 2 or found[0] is None or found[1] is None:
            return
        base, newest = found[0], found[1]
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        neighbour = policies.lasting_neighbour(
            infos,
            records.CheckpointInfo(
                step=one.step, path="", commit_secs=0.0, metrics=metrics
            ),
            keep=self._keep,
            pinned=decisions.read(self._root).pinned,
        )
        beside = None if neighbour is None else self._look(neighbour)
        one.plan_links(
            # Another kind of leaf (NumPy's array, JAX's) is stored with other notes.
            alike=dict(one.kinds.items() & base.kinds.items()).keys(),
            newest=newest.manifest,
            base=base.manifest,
            base_path=infos[-2].path,
            full_every=self._options.full_every,
            beside=None if beside is None else beside.manifest,
        )

    def _look(self, info: records.CheckpointInfo) -> _Known | None:
        """What a committed step is made of; None when nothing tells."""
        try:
            stamp = _stamp(info.path)
            known = self._known.get(info.step)
            # Another writer may have put another step in its place.
            if known is None or known.stamp != stamp:
                kinds = _kinds(run_record.read_record(info.path))
                known = _Known(stamp, manifests.read(info.path), kinds)
                self._known[info.step] = known
            return known
        except (OSError, ValueError, records.FaultError):
            return None

    def start(
        self, one: proof.Proof, stored: PyTree, *, record: Mapping[str, Any]
    ) -> orbax_io.Write:
        """Starts to write what was planned; see `orbax_io.write_async`."""
        path = layout.step_path(self._root, one.step)
        write = None
        try:
            try:
                write = orbax_io.write_async(
                    path,
                    stored,
                    record=record,
                    timeout_secs=self._timeout_secs,
                    arrays=one.arrays,
                    links=one.links,
                    seal=self._seal(one, path),
                    may_commit=self._options.may_commit,
                    meanwhile=one.take_digests,
                )
            finally:
                one.start_digests()  # Also after a failure: somebody may wait for them.
            if jax.process_index() != 0:
                threading.Thread(
                    target=one.share,
                    args=(path,),
                    kwargs={"timeout_secs": self._timeout_secs},
                    name="jaxft-digests",
                    daemon=True,
                ).start()
        except BaseException:
            if write is not None:
                write.give_up()
            self.end(one, committed=False)
            raise
        return write

    def _seal(self, one: proof.Proof, path: str) -> Callable[[pathlib.Path], None]:
        """What finishes the step in the primary process."""
        seal = one.seal
        if jax.process_count() > 1:
            seal = functools.partial(
                one.seal_shared,
                step_path=path,
                timeout_secs=self._timeout_secs,
            )
        if rate := self.write_rate(one.step):
            return functools.partial(_seal_slowly, seal, rate=rate)
        return seal

    def verdict(self, one: proof.Proof) -> tuple[str, ...]:
        """Leaves for which a step that is written is no resume point; never raises.

        Only several processes write such a step, which all of them wait for. It stays
        until it is not the newest any more, so that each of them can read in its
        manifest what the primary one has found; a restore passes over it.
        """
        if jax.process_count() == 1:
            return ()  # The seal would have refused it.
        if one.manifest is not None:
            return one.manifest.unhealthy
        path = layout.step_path(self._root, one.step)
        deadline = time.monotonic() + _SEEN_SECS
        while True:
            try:
                return manifests.read(path).unhealthy
            except Exception as error:
                if time.monotonic() > deadline:
                    # Nothing is relied on that is not known to be good.
                    return (f"unknown: {records.first_line(error)}",)
            time.sleep(_POLL_SECS)

    def end(self, one: proof.Proof, *, committed: bool) -> None:
        """Keeps what the next save needs to know about this one."""
        self._is_tidy = self._is_tidy and (committed or jax.process_count() == 1)
        if committed and one.manifest is not None:
            with contextlib.suppress(OSError):
                stamp = _stamp(layout.step_path(self._root, one.step))
                self._known[one.step] = _Known(stamp, one.manifest, one.kinds)
            for old in sorted(self._known)[:-_MAX_KNOWN]:
                del self._known[old]
        self.pins.release(by=one)
        one.end(layout.step_path(self._root, one.step))

    def forget(self) -> None:
        """Something else than a save has changed the root."""
        self._known.clear()


def check_label(step: int, state: PyTree) -> None:
    """Refuses a label that is none, or that is not the state's own `step`.

    Raises:
        ValueError: it says why.
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"the label of a save is a number of steps, not {step!r}")
    own = state.get("step") if isinstance(state, Mapping) else None
    own = getattr(state, "step", own)
    if isinstance(own, jax.Array):
        is_label = own.ndim == 0 and jax.numpy.issubdtype(own.dtype, np.integer)
        if not is_label or own.is_deleted() or not own.is_fully_replicated:
            return
    elif type(own) is not int and not isinstance(own, np.integer):
        return
    if int(own) != step:
        raise ValueError(f"save({step}) of a state whose step is {int(own)}")


def _seal_slowly(
    seal: Callable[[pathlib.Path], None], folder: pathlib.Path, *, rate: float
) -> None:
    """As if the disk took no more than `rate` bytes a second."""
    time.sleep(layout.count_bytes(folder) / rate)
    seal(folder)
