"""The checkpoint manager: save in the background, find again, keep what is needed.

World: device. Floor: the highest of `checkpoint`. Read `jaxft/checkpoint/layout.py`
and `jaxft/checkpoint/restore.py` before and `jaxft/loop.py` after.

    with CheckpointManager("run/checkpoints", save="steps(100)") as checkpoints:
        restored = checkpoints.restore(state)
        start, state = (restored.step, restored.state) if restored else (0, state)
        for step in range(start, num_steps):
            state = train_step(state, batch(step))
            checkpoints.maybe_save(step + 1, state)
        checkpoints.save(num_steps, state, force=True)

Leave it by `with` or `close`: a program that ends without them can lose the save in
flight. The label of a save is the number of finished steps. At most one save is in
flight; a periodic one that comes due meanwhile is skipped and counted. A failed save
is never silent: `error()` tells a caller who polls, the next save raises it to one who
does not, `wait` and `close` raise it until a later save has committed. With
`on_save_error="warn"` or `"retry(n)"` the first two keep still as long as the policy
bears it; `wait` and `close` never do.

Several processes call the same methods at the same places. Whether a save begins, is
skipped or raises is then the same for all; a failure is known to all soon after it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax
from absl import logging

from jaxft import records
from jaxft.checkpoint import (
    at_exit,
    decisions,
    due,
    layout,
    leaves,
    mirror_check,
    mirrored,
    options,
    policies,
    retention,
    space,
    together,
)
from jaxft.checkpoint.judge import Check, Restored
from jaxft.checkpoint.planner import SavePlanner, check_label
from jaxft.checkpoint.proof import Proof
from jaxft.checkpoint.restore import refuse_foreign, restore_newest
from jaxft.checkpoint.saves import Saves
from jaxft.intervals import Experience

PyTree = Any


class CheckpointManager:
    """Saves, finds and deletes the steps below one root.

    Args:
        root: a local folder, made by the first save; relative to the working
            directory of now, `~` is expanded.
        save: when `maybe_save` saves, e.g. `steps(100) | secs(600)`, or `auto`.
        keep: what stays, e.g. `last(3) | best(2, loss)`; the newest always does.
        timeout_secs: deadline of one save, and of waiting for one.
        on_save_error: `fail`, `warn`: go on without it, or `retry(n)`: go on, and the
            next border saves at once, up to n times in a row.
        max_failed_saves: so many failures in a row end the run under `warn`.
        layout: of arrays on disk: `files`, `ocdbt` or `auto`.
        codec: of their chunks: `raw`, `lz4` or `zstd`.
        full_every: a leaf that does not change is hard-linked to the bytes of an
            earlier save, for at most so many commits; 0 writes everything every time.
        verify: what a restore proves: `full`, `sample` or `off`.
        health: globs of leaf paths; a state in which one of them is not finite is
            no resume point. The default is the one of the configuration.
        memory_budget: host memory of a save or restore beyond the state, e.g. `4GiB`;
            `auto` is half of what is available now.
        mirror: a folder or address of a second copy of all steps, made in the
            background; a root that has no good step is filled from it.
        mirror_rate: most bytes a second that go there, e.g. `50MB`; empty for all.
        experience: for `auto`, an `Experience`; by default a failure a day is expected.
        clock_is_told: of several processes the primary one is asked `due_to_tell` and
            tells the others; then `secs` and `auto` may be used there, too.
        may_commit: asked just before each commit, and why not; see `options.MayCommit`.
        emit: told of everything; the default logs what nothing is raised about.
        clock: seconds since the epoch, for the run record.
        timer: seconds that never go back, for the save policy.

    Attributes:
        root: the absolute root.

    Raises:
        ConfigError: a policy, the root or another setting cannot be used; `secs` or
            `auto` with several processes, whose clocks would not agree, is such one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: str = "steps(100)",
        keep: str = "last(3)",
        timeout_secs: float = 600.0,
        on_save_error: str = "fail",
        max_failed_saves: int = 3,
        layout: str = "auto",
        codec: str = "raw",
        full_every: int = 10,
        verify: str = "full",
        health: str = options.HEALTH,
        memory_budget: str = "auto",
        mirror: str = "",
        mirror_rate: str = "",
        experience: Experience | None = None,
        clock_is_told: bool = False,
        may_commit: options.MayCommit = options.always,
        emit: records.Emit = records.log_event,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ):
        self.root = options.checked_root(root, timeout_secs=timeout_secs)
        self._due = due.DueSaves(
            save,
            emit=emit,
            known=experience,
            timer=timer,
            num_processes=jax.process_count(),
            is_told=clock_is_told,
        )
        emit = self._due.emit
        self._keep_policy = policies.parse_keep(keep)
        self._timeout_secs = timeout_secs
        self._options = options.make_options(
            array_layout=layout,
            codec=codec,
            full_every=full_every,
            verify=verify,
            health=health,
            memory_budget=memory_budget,
            may_commit=may_commit,
        )
        self._emit = emit
        self._clock = clock
        self._saves = Saves(
            self.root,
            timeout_secs=timeout_secs,
            errors=policies.parse_save_error(
                on_save_error, max_failed=max_failed_saves
            ),
            emit=emit,
        )
        self._planner = SavePlanner(
            self.root,
            self._options,
            keep=self._keep_policy,
            timeout_secs=timeout_secs,
            emit=emit,
        )
        self._mirror = mirrored.make_mirror(
            mirror, root=self.root, rate=mirror_rate, keep=self._keep_policy, emit=emit
        )
        if self._mirror is not None:
            self._planner.pins.mirror = self._mirror
        self._metrics = retention.MetricWatch(self._keep_policy, emit=emit)
        self._timeline = 0
        self._retention_lock = threading.Lock()
        at_exit.finish_at_exit(self)

    # --- saving ---------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether a periodic save is due at this border; once a step at most."""
        # Alone, a process tries again by itself; several agree in their loop.
        retry = jax.process_count() == 1 and self.should_retry
        return self._due.at(step, retry=retry)

    def due_to_tell(self, step: int) -> bool:
        """Whether this process, one of several, is to tell all that a save is due."""
        by_clock = jax.process_index() == 0
        return self._due.to_tell(step, retry=self.should_retry, by_clock=by_clock)

    def maybe_save(self, step: int, state: PyTree, **content: Any) -> bool:
        """Saves when the policy says so; see `save`. Whether a save began."""
        if jax.process_count() == 1:  # Several raise together, where one is due.
            self._saves.raise_news()
        return self.should_save(step) and self.save(step, state, **content)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        timeout_secs: float | None = None,
    ) -> bool:
        """Begins to save; returns as soon as `state` may change or be donated.

        Args:
            step: finished steps; must equal the state's own `step` if it has one.
            state: any tree of arrays, numbers and text; see
                `jaxft.checkpoint.leaves`.
            data: the data position, JSON.
            run: anything else to get back, JSON.
            metrics: evaluation results, name -> number.
            force: wait for a save in flight instead of skipping this one, and do not
                raise an earlier failure first.
            timeout_secs: how long to wait for that; None is the manager's.

        Returns:
            False when the step is committed already, is in flight, or was skipped
            because another one is in flight; and when it could not begin and the
            policy for failed saves is to go on.

        Raises:
            FaultError: kind SAVE_FAILED: an earlier save failed (told once), the one
                in flight missed its deadline, or this one could not begin, and the
                policy for failed saves is at its end; a forced save always raises.
            LeafError: a leaf cannot be stored; nothing was written.
            ValueError: the label is not the state's step, a newer step exists, or not
                all processes share the root (`ConfigError`).
        """
        check_label(step, state)
        wait_secs = self._timeout_secs if timeout_secs is None else timeout_secs
        if not self._saves.may_begin(step, force=force, timeout_secs=wait_secs):
            self._due.skipped()
            return False
        content = {"data": data, "run": run, "metrics": metrics}
        try:
            self._planner.agree()
            if not self._begin(step, state, content=content):
                return False
        except (OSError, records.FaultError) as error:
            # Whatever else `_begin` meets comes here as one of the first kind.
            refusal = self._saves.refuse(step, error)
            if force or not self._saves.is_borne:
                raise refusal from error
            return False
        self._due.begun(step)
        self._metrics.look(step, metrics or {})
        return True

    def _begin(self, step: int, state: PyTree, *, content: dict[str, Any]) -> bool:
        """Takes the snapshot and lets it be written; False when it is there already.

        Raises:
            OSError: it could not begin.
            FaultError: the root cannot be understood, or another process could not.
            ValueError: see `save`.
        """
        start = time.monotonic()
        record: dict[str, Any] = {}
        plan, stored, planning_secs = None, None, 0.0
        with together.same_end(f"begin to save step {step}"):
            if self._planner.make_way(step):
                record |= self._planner.record(
                    step, time_secs=self._clock(), timeline=self._timeline, **content
                )
                with self._saves.cleaning(step):
                    stored, record["state"] = leaves.encode(state)
                    planning = time.monotonic()
                    plan = self._planner.plan(step, state=state, record=record)
                    planning_secs = time.monotonic() - planning
        if together.where(plan is None) or plan is None:
            if plan is not None:
                self._planner.end(plan, committed=False)
            return False
        with self._saves.cleaning(step):
            write = self._planner.start(plan, stored, record=record)
        try:
            self._saves.begin(
                step,
                write,
                facts=plan.facts,
                verdict=functools.partial(self._planner.verdict, plan),
                on_end=functools.partial(self._end, plan),
            )
            blocking_secs = time.monotonic() - start
            self._emit(
                "save_start",
                step=step,
                blocking_secs=blocking_secs,
                planning_secs=planning_secs,
            )
        finally:
            write.begin()  # As the last: what writes takes the processor.
        return True

    def slow_down(self, write_rate: Callable[[int], float]) -> None:
        """For drills: step -> bytes a second that its save writes at most; 0: all."""
        self._planner.write_rate = write_rate

    # --- in the background ----------------------------------------------------

    def _end(self, plan: Proof, committed: bool) -> None:
        self._planner.end(plan, committed=committed)
        if jax.process_index() != 0:
            return
        if committed and self._mirror is not None:
            self._mirror.offer(layout.step_path(self.root, plan.step))
        if committed or plan.is_unhealthy:
            self._retain(plan.step)

    def _retain(self, committed: int) -> None:
        """Deletes what the policy does not keep, as the disk is now."""
        with self._retention_lock:
            retention.retain(
                self.root,
                keep=self._keep_policy,
                committed=committed,
                in_flight=self.in_flight,
                pins=self._planner.pins,
                emit=self._emit,
            )

    # --- what is there --------------------------------------------------------

    def check(self, target: PyTree) -> None:
        """Refuses before the first step what would fail at the first save.

        All processes call it at the same place, like `save` and `restore`.

        Args:
            target: the state, as values or `jax.ShapeDtypeStruct`.

        Raises:
            ConfigError: the root is no folder to be read and written, lacks something
                that saves need (see `jaxft.checkpoint.space`) or the room for what is
                kept, its newest or only step is not ours, a leaf of the target
                cannot be stored, `health` names none, a mirror in a folder cannot
                be written, or not all processes share the root.
            FaultError: kind SAVE_FAILED: the disk is full, or read-only by now, and
                steps are there already; see `space.refusal`.
        """
        found = None
        try:
            with together.same_end(f"save to {self.root}"):
                found = decisions.discover(self.root)
                refuse_foreign(found)
                layout.check_writable(self.root)
                leaves.check(target)
                options.check_health(self._options.health, leaves.flatten(target))
                if jax.process_index() == 0:
                    self._planner.check(target, found)
                    if self._mirror is not None:
                        mirror_check.check_folder(self._mirror.address)
            self._planner.agree()
        except (records.FaultError, OSError, ValueError) as error:
            newest = max(found.steps, default=None) if found else None
            raise space.refusal(error, newest=newest) from error

    def restore(
        self, target: PyTree, *, step: int | None = None, check: Check | None = None
    ) -> Restored | None:
        """Waits for a save in flight; then see `jaxft.checkpoint.restore`."""
        self._saves.wait_for_flight(self._timeout_secs)

        def try_root() -> Restored | None:
            return restore_newest(
                self.root,
                target,
                step=step,
                check=check,
                verify=self._options.verify,
                memory_bytes=self._options.memory_bytes,
                emit=self._emit,
            )

        if self._mirror is None or step is not None:
            restored = try_root()
        else:
            restored = mirrored.restore_through(
                self._mirror, self.root, restore=try_root, emit=self._emit
            )
        self._planner.forget()
        if jax.process_index() == 0:
            with self._retention_lock:
                retention.finish_deletions(self.root, emit=self._emit)
        if restored is not None:
            self._due.begun(restored.step)
            # An older one that was asked for by name leaves newer ones there.
            newer = -1 if step is None else self._saves.last_committed or -1
            self._saves.set_last_committed(max(restored.step, newer))
            self._timeline = restored.record["timeline"]
            if self._mirror is not None and jax.process_index() == 0:
                self._mirror.offer(restored.path)  # What the last run could not.
        return restored

    def rollback(self, to: int, **decision: Any) -> None:
        """Makes `to` the newest step for good, by `decisions.roll_back`.

        Raises:
            FaultError: `to` is not there, or a save in flight is not over in time.
        """
        self._saves.join(self._timeout_secs)
        with together.same_end(f"go back to step {to}"), self._retention_lock:
            if jax.process_index() == 0:
                decisions.roll_back(self.root, to=to, emit=self._emit, **decision)
        self._planner.forget()
        if self._mirror is not None and jax.process_index() == 0:
            self._mirror.offer(layout.step_path(self.root, to))
        self._saves.set_last_committed(to)
        self._due.begun(to)

    def steps(self) -> list[int]:
        """Committed steps on disk, ascending."""
        return decisions.discover(self.root).steps

    def latest(self) -> int | None:
        """The newest committed step on disk."""
        return max(self.steps(), default=None)

    @property
    def last_committed(self) -> int | None:
        """The newest committed step that this manager knows; None before any."""
        return self._saves.last_committed

    @property
    def num_skipped(self) -> int:
        """Periodic saves that came due while one was in flight."""
        return self._saves.num_skipped

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved."""
        return self._saves.in_flight

    # --- failures and the end -------------------------------------------------

    def error(self) -> records.FaultError | None:
        """The failed save that ends the run unless a later one has made it good.

        Does not block. Who asks has been told: `save` does not raise it any more.
        """
        return self._saves.error()

    @property
    def should_retry(self) -> bool:
        """Whether the last save failed and the next border is to save at once."""
        return self._saves.should_retry

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until nothing goes on in the background.

        Args:
            timeout_secs: at most so long; None is the manager's `timeout_secs`.

        Raises:
            FaultError: kind SAVE_FAILED: a save failed that no later one made good,
                whatever the policy for failed saves, or is not over in time.
        """
        self._saves.join(self._timeout_secs if timeout_secs is None else timeout_secs)
        if (failure := self._saves.failure()) is not None:
            raise failure

    def finish(self) -> None:
        """Waits like `wait`, but logs a failure that nobody has been told."""
        try:
            self._saves.join(self._timeout_secs)
            self._saves.raise_news()
        except records.FaultError as error:
            logging.error("%s", error)

    def close(self, *, may_wait: Callable[[], bool] = lambda: True) -> bool:
        """Waits and raises like `wait`; call it at the end of the run.

        What goes to the mirror is waited for, too, as long as `may_wait` says so, and
        never raises; the answer is whether no copy was cut off.
        """
        mirror, timeout_secs = self._mirror, self._timeout_secs
        try:
            self.wait()
        finally:
            is_over = mirror is None or mirror.close(timeout_secs, may_wait=may_wait)
        return is_over

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except records.FaultError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
