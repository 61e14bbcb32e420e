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
does not, `wait` and `close` raise it until a later save has committed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxft import config, records
from jaxft.checkpoint import (
    at_exit,
    layout,
    leaves,
    orbax_io,
    policies,
    retention,
    run_record,
)
from jaxft.checkpoint.flight import Flight
from jaxft.checkpoint.restore import Check, Restored, refuse_foreign, restore_newest

PyTree = Any


class CheckpointManager:
    """Saves, finds and deletes the steps below one root.

    Args:
        root: a local folder, made by the first save; relative to the working
            directory of now, `~` is expanded.
        save: when `maybe_save` saves, e.g. `steps(100) | secs(600)`.
        keep: what stays, e.g. `last(3) | every(1000)`; the newest always does.
        timeout_secs: deadline of one save, and of waiting for one.
        emit: told of starts, commits, skips, failures, deletions.
        clock: seconds since the epoch, for the run record.
        timer: seconds that never go back, for the save policy.

    Attributes:
        root: the absolute root.
        num_skipped: periodic saves that came due while one was in flight.

    Raises:
        ConfigError: a policy, the root or the deadline cannot be used; `secs` with
            several processes, whose clocks would not agree, is such a policy.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: str = "steps(100)",
        keep: str = "last(3)",
        timeout_secs: float = 600.0,
        emit: records.Emit = records.ignore_event,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ):
        try:
            self.root = layout.absolute_root(root)
        except ValueError as error:
            raise config.ConfigError("checkpoint", str(error)) from error
        if not timeout_secs > 0:
            raise config.ConfigError(
                "checkpoint.timeout_secs", f"must be positive, is {timeout_secs}"
            )
        self.num_skipped = 0
        self._save_policy = policies.parse_save(save)
        if policies.reads_clock(self._save_policy) and jax.process_count() > 1:
            raise config.ConfigError(
                "checkpoint.save",
                f"{save!r} goes by a clock, on which {jax.process_count()} processes "
                "do not agree: use steps(n)",
            )
        self._keep_policy = policies.parse_keep(keep)
        self._timeout_secs = timeout_secs
        self._emit = emit
        self._clock = clock
        self._timer = timer
        self._last_step = -1
        self._last_secs = timer()
        self._answered_step = -1
        # What the threads share.
        self._lock = threading.Lock()
        self._retention_lock = threading.Lock()
        self._flight: Flight | None = None
        self._threads: list[threading.Thread] = []
        self._failure: records.Fault | None = None
        self._failure_is_news = False
        self._last_committed: int | None = None
        at_exit.finish_at_exit(self)

    # --- saving ---------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether a periodic save is due at this border; once a step at most."""
        if step in (self._answered_step, self._last_step):
            return False
        question = records.SaveQuestion(
            step=step,
            now_secs=self._timer(),
            last_step=self._last_step,
            last_secs=self._last_secs,
        )
        if not self._save_policy.should_save(question):
            return False
        self._answered_step = step
        return True

    def maybe_save(self, step: int, state: PyTree, **content: Any) -> bool:
        """Saves when the policy says so; see `save`. Whether a save began."""
        self._raise_news()
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
            because another one is in flight.

        Raises:
            FaultError: kind SAVE_FAILED: an earlier save failed (told once), the one
                in flight missed its deadline, or this one could not begin.
            LeafError: a leaf cannot be stored; nothing was written.
            ValueError: the label is not the state's step, or a newer step exists.
        """
        if not force:
            self._raise_news()
        self._check_label(step, state)
        if (flying := self.in_flight) is not None:
            if not force:
                if flying != step:
                    self.num_skipped += 1
                    self._last_secs = self._timer()  # not again at every border
                    reason = f"step {flying} is still being saved"
                    self._emit("save_skipped", step=step, reason=reason)
                return False
            self._wait_for_flight(
                self._timeout_secs if timeout_secs is None else timeout_secs
            )
        try:
            if not self._is_new(step):
                return False
        except (OSError, records.FaultError) as error:
            raise self._refuse(step, error) from error
        stored, types = leaves.encode(state)
        now = self._clock()
        record = run_record.make_record(
            step, time_secs=now, state=types, data=data, run=run, metrics=metrics
        )
        self._begin(step, stored, record=record)
        self._last_step, self._last_secs = step, self._timer()
        return True

    def _check_label(self, step: int, state: PyTree) -> None:
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

    def _is_new(self, step: int) -> bool:
        """Whether the step is to be written; makes room for it."""
        found = layout.discover(self.root)
        if step in found.steps:
            return False
        if found.steps and found.steps[-1] > step:
            raise ValueError(
                f"cannot save step {step} into {self.root}: step {found.steps[-1]} is "
                "newer and would be resumed from; restore it, or use another folder"
            )
        path = layout.step_path(self.root, step)
        if os.path.lexists(path):
            aside = layout.quarantine(path)
            reason = "not a checkpoint, and in the way of one"
            self._emit("quarantine", step=step, path=aside, reason=reason)
        return True

    def _begin(self, step: int, stored: PyTree, *, record: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            layout.make_root(self.root)
            write = orbax_io.write_async(
                layout.step_path(self.root, step),
                stored,
                record=record,
                timeout_secs=self._timeout_secs,
            )
        except (OSError, ValueError) as error:
            self._clean_failed(layout.step_path(self.root, step))
            raise self._refuse(step, error) from error
        flight = Flight(step, write)
        thread = threading.Thread(
            target=self._follow, args=(flight,), name="jaxft-commit", daemon=True
        )
        with self._lock:
            self._flight = flight
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        self._emit("save_start", step=step, blocking_secs=time.monotonic() - start)
        thread.start()

    def _refuse(self, step: int, error: Exception) -> records.FaultError:
        """A save that could not begin; it is raised, so it is no news any more."""
        fault = self._fault(step, error)
        with self._lock:
            self._failure, self._failure_is_news = fault, False
        self._emit("save_failed", step=step, reason=fault.evidence)
        return records.FaultError(fault)

    # --- in the background ----------------------------------------------------

    def _follow(self, flight: Flight) -> None:
        """Waits for one save, keeps how it ended, and cleans up behind it."""
        flight.write.wait()
        error = flight.write.error()
        if error is not None and self._owns_leftovers(flight):
            self._clean_failed(flight.write.path)
        try:
            self._end(flight, error)
        finally:
            flight.over.set()
        if error is None and jax.process_index() == 0:
            self._retain(flight.step)

    def _end(self, flight: Flight, error: BaseException | None) -> None:
        fault = None if error is None else self._fault(flight.step, error)
        with self._lock:
            was_given_up = self._flight is not flight
            if not was_given_up:
                self._flight = None
            if fault is None:
                self._last_committed = max(flight.step, self._last_committed or 0)
                # Made good; but not by one that comes late, unless it is its own.
                failed_step = -1 if self._failure is None else self._failure.step
                if not was_given_up or failed_step == flight.step:
                    self._failure, self._failure_is_news = None, False
            elif not was_given_up:
                self._failure, self._failure_is_news = fault, True
        if fault is None:
            num_bytes = layout.count_bytes(flight.write.path)
            secs = flight.write.age_secs
            self._emit("save_commit", step=flight.step, secs=secs, num_bytes=num_bytes)
        elif not was_given_up:
            self._emit("save_failed", step=flight.step, reason=fault.evidence)

    def _fault(self, step: int, error: BaseException) -> records.Fault:
        path = layout.step_path(self.root, step)
        known = self._last_committed  # without the lock: it may be held
        resume = "nothing is saved yet"
        if known is not None:
            resume = f"the same command goes on from step {known}"
        text = (
            f"save of step {step} to {path} failed: {orbax_io.cause(error)}; "
            f"{orbax_io.remedy(error, root=self.root)}; {resume} "
            f"({orbax_io.first_line(error)})"
        )
        return records.Fault(
            kind=records.FaultKind.SAVE_FAILED,
            step=step,
            process=jax.process_index(),
            evidence=text,
        )

    def _owns_leftovers(self, flight: Flight) -> bool:
        """False when the same step, given up before, is being saved again."""
        with self._lock:
            current = self._flight
        if current is None or current is flight:
            return True
        return current.step != flight.step

    def _clean_failed(self, path: str) -> None:
        """Gives back the space of a failed save."""
        try:
            orbax_io.remove_unfinished(path)
        except (OSError, records.FaultError) as error:
            self._emit("delete_failed", path=path, reason=str(error))

    def _retain(self, committed: int) -> None:
        """Deletes what the policy does not keep, as the disk is now."""
        with self._retention_lock:
            retention.retain(
                self.root,
                keep=self._keep_policy,
                committed=committed,
                in_flight=self.in_flight,
                emit=self._emit,
            )

    # --- what is there --------------------------------------------------------

    def check(self, target: PyTree) -> None:
        """Refuses before the first step what would fail at the first save.

        Args:
            target: the state, as values or `jax.ShapeDtypeStruct`.

        Raises:
            ConfigError: the root is no folder to be read and written, its newest or
                only step is not ours, or a leaf of the target cannot be stored.
        """
        try:
            refuse_foreign(layout.discover(self.root))
            layout.check_writable(self.root)
            leaves.check(target)
        except (records.FaultError, OSError, layout.LeafError) as error:
            raise config.ConfigError("checkpoint", str(error)) from error

    def restore(
        self, target: PyTree, *, step: int | None = None, check: Check | None = None
    ) -> Restored | None:
        """Waits for a save in flight; then see `jaxft.checkpoint.restore`."""
        self._wait_for_flight(self._timeout_secs)
        restored = restore_newest(
            self.root, target, step=step, check=check, emit=self._emit
        )
        if jax.process_index() == 0:
            with self._retention_lock:
                retention.finish_deletions(self.root, emit=self._emit)
        if restored is not None:
            self._last_step, self._last_secs = restored.step, self._timer()
            with self._lock:
                # An older one that was asked for by name leaves newer ones there.
                newer = -1 if step is None else self._last_committed or -1
                self._last_committed = max(restored.step, newer)
        return restored

    def steps(self) -> list[int]:
        """Committed steps on disk, ascending."""
        return layout.discover(self.root).steps

    def latest(self) -> int | None:
        """The newest committed step on disk."""
        return max(self.steps(), default=None)

    @property
    def last_committed(self) -> int | None:
        """The newest committed step that this manager knows; None before any."""
        with self._lock:
            return self._last_committed

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved."""
        with self._lock:
            return None if self._flight is None else self._flight.step

    # --- failures and the end -------------------------------------------------

    def error(self) -> records.FaultError | None:
        """The failed save that no later one has made good; does not block.

        Who asks has been told: `save` does not raise this failure any more.
        """
        self._check_deadline()
        with self._lock:
            self._failure_is_news = False
            return None if self._failure is None else records.FaultError(self._failure)

    def _raise_news(self) -> None:
        self._check_deadline()
        with self._lock:
            is_news = self._failure_is_news
        if is_news and (error := self.error()) is not None:
            raise error

    def _check_deadline(self) -> None:
        """Stops to count on a save that missed its deadline."""
        with self._lock:
            flight = self._flight
            if flight is None or flight.write.age_secs <= self._timeout_secs:
                return
            fault = self._late(flight)
            self._flight = None
            self._failure, self._failure_is_news = fault, True
        self._emit("save_failed", step=flight.step, reason=fault.evidence)

    def _late(self, flight: Flight) -> records.Fault:
        text = f"not over after {flight.write.age_secs:.1f} s"
        return self._fault(flight.step, TimeoutError(text))

    def _wait_for_flight(self, timeout_secs: float) -> None:
        with self._lock:
            flight = self._flight
        if flight is None or flight.over.wait(timeout_secs):
            return
        self._check_deadline()
        raise records.FaultError(self._late(flight))

    def wait(self, timeout_secs: float | None = None) -> None:
        """Waits until nothing goes on in the background.

        Args:
            timeout_secs: at most so long; None is the manager's `timeout_secs`.

        Raises:
            FaultError: kind SAVE_FAILED: a save failed that no later one made good,
                or is not over in time.
        """
        self._join(self._timeout_secs if timeout_secs is None else timeout_secs)
        if (error := self.error()) is not None:
            raise error

    def _join(self, timeout_secs: float) -> None:
        deadline = time.monotonic() + timeout_secs
        self._wait_for_flight(timeout_secs)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        """Waits like `wait`, but logs a failure that nobody has been told."""
        try:
            self._join(self._timeout_secs)
            self._raise_news()
        except records.FaultError as error:
            logging.error("%s", error)

    def close(self) -> None:
        """Waits and raises like `wait`; call it at the end of the run."""
        self.wait()

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
