"""The host half of training: what happens at every step border, in which order.

World: device. Floor: above `build`, below `worker`. Read `jaxft/build.py` before and
`jaxft/train/step.py`, the traced half, after this file.

At the border after step `s`, in this order (a test guards it):

1. a stop was agreed: save, leave;
2. evaluation is due: evaluate, before the save, which stores its result;
3. a save is due: snapshot, *before* the next batch is drawn: the stored data
   position is that of the next batch;
4. draw batch `batch_index(s, skipped)`, place it together with the control word;
5. dispatch step `s + 1`; it donates the state;
6. tell the watchdog; what is a phase of its own (input, evaluation, a save) was said
   before it began;
7. read the output of step `s`, never of the one just dispatched: the device always
   has work, and at most two programs are in flight. Control word and health first,
   then metrics;
8. after the last step: read its output, commit it once, wait.

The control word: each process puts its bits (`jaxft.records.Control`) in with the
batch, the step ors them, everybody reads the same word one step late. So all
processes stop, save or fail at the same border without an extra wait.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxft import settings
from jaxft.build import HostBatch, Parts
from jaxft.checkpoint import together
from jaxft.data.iterator import batch_index
from jaxft.faults.grace import SaveTimes, StopAction, StopQuestion, plan_stop
from jaxft.faults.inject import Injector
from jaxft.faults.nonfinite import NonfiniteRule
from jaxft.faults.preemption import StopRequests
from jaxft.faults.spikes import SpikeRule
from jaxft.faults.watchdog import PhaseBoard
from jaxft.metrics.meters import StepMeter, steps_per_sec
from jaxft.metrics.writers import ProgressLine
from jaxft.records import (
    Control,
    Emit,
    Fault,
    FaultError,
    FaultKind,
    Phase,
    first_line,
)
from jaxft.types import StepOutput, TrainState

# How much later than those that read for it a process hears of a signal to all.
_SIGNAL_SECS = 0.5
# How soon a process knows of its own part of a save that failed in another one.
_HEARD_SECS = 30.0
# How soon a wait for a save notices that a stop has become urgent.
_LOOK_SECS = 0.1


class Ending(enum.StrEnum):
    """How the loop ended when nothing failed."""

    FINISHED = "finished"
    STOPPED = "stopped"


class StopWhileWaiting(Exception):  # noqa: N818 (a wish, not an error)
    """A stop was requested while the loop waited for input; nothing was drawn."""


class Loop:
    """One pass of training over the parts of a run.

    Args:
        parts: from `jaxft.build.build`.
        step_fn: the compiled train step.
        eval_fn: the compiled evaluation step.
        stops: requests to stop.
        emit: the run's history.
        progress: the live line.
        restored: label of the step the state came from, -1 for a fresh start.
        evaluated: the step whose evaluation is already known, -1 for none.
        save_times: how long saves took; a stop goes by them.
        injector: makes faults happen on purpose; None for none.
        board: where the watchdog sees what this thread is at.
        spikes: looks at the losses; None for nobody.

    Attributes:
        step: finished step attempts, for whoever reports a failure.
    """

    def __init__(
        self,
        parts: Parts,
        step_fn: Callable[..., tuple[TrainState, StepOutput]],
        *,
        eval_fn: Callable[..., Any],
        stops: StopRequests,
        emit: Emit,
        progress: ProgressLine,
        restored: int = -1,
        evaluated: int = -1,
        save_times: SaveTimes | None = None,
        injector: Injector | None = None,
        board: PhaseBoard | None = None,
        spikes: SpikeRule | None = None,
    ):
        self.step = max(restored, 0)
        self._parts = parts
        self._step_fn = step_fn
        self._eval_fn = eval_fn
        self._stops = stops
        self._emit = emit
        self._progress = progress
        self._evaluated = evaluated
        self._injector = injector
        self._spikes = spikes
        self._evaluation: dict[str, float] = {}
        self._is_one_of_many = jax.process_count() > 1
        self._save_times = save_times or SaveTimes()
        self._board = board or PhaseBoard()
        self._step_phase = Phase.FIRST_STEP
        self._rate = 0.0
        self._meter = StepMeter(min_secs=parts.config.log.event_secs)
        self._rule = NonfiniteRule(
            max_in_a_row=parts.config.train.max_nonfinite,
            guarded=parts.config.train.guard,
        )

    def run(self, state: TrainState) -> tuple[TrainState, Ending]:
        """Trains to `train.num_steps` or until a stop is agreed.

        Raises:
            BadStepsError: it must not go on from here, see `jaxft/rollbacks.py`.
            FaultError: the run cannot go on.
        """
        parts, pending = self._parts, None
        num_steps = parts.config.train.num_steps
        control = Control.NOTHING
        self._emit("phase", name="train")
        self._board.enter(self._step_phase)
        self._meter.start()
        while True:
            if control & Control.STOP or self._stops.urgent:
                return self._leave(state, pending)
            if self._should_evaluate() and not self._evaluate(state):
                return self._leave(state, pending)
            if self.step >= num_steps:
                break
            if self._should_save(control):
                self._save(state)
            if self._injector is not None:
                state = self._inject(state)
            try:
                batch = self._draw()
            except StopWhileWaiting:
                return self._leave(state, pending)
            except Exception as error:
                if not self._is_of_stop(error):
                    raise
                return self._leave(state, pending)
            placed, word = parts.train_step.place(batch, control=self._own_bits())
            state, output = self._step_fn(state, placed, word)
            self.step += 1
            self._board.beat(self.step)
            control = self._read(pending, self.step - 1)
            pending = output
        self._read(pending, self.step)
        self._flush()
        if not self._save_last(state):
            return state, Ending.STOPPED
        return state, Ending.FINISHED

    def _should_save(self, control: Control) -> bool:
        """Never in the middle of bad steps: a resume would begin behind the first."""
        if self._rule.in_a_row:
            return False
        return bool(control & Control.SAVE) or (
            self._parts.manager.should_save(self.step)
        )

    def _inject(self, state: TrainState) -> TrainState:
        """What a plan of faults has for this border, and for the next batch."""
        assert self._injector is not None
        state = self._injector.at_border(self.step, state)
        iterator = self._parts.iterator
        number = batch_index(iterator.step, iterator.skipped)
        self._injector.at_draw(self.step + 1, number)
        return state

    def _draw(self) -> HostBatch:
        """The next batch; slow input is named as such."""
        self._board.enter(Phase.DATA)
        try:
            return next(self._parts.iterator)
        finally:
            self._board.enter(self._step_phase)

    def _is_of_stop(self, error: Exception) -> bool:
        """Whether input ends as the run is asked to stop; the state is good then.

        A signal to all processes ends those that read for us as well, and may reach
        them first. Of several processes none can leave alone.
        """
        if self._is_one_of_many:
            return False
        deadline = time.monotonic() + _SIGNAL_SECS
        while self._stops.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self._progress.note(f"step {self.step}: no more input: {first_line(error)}")
        return True

    def _own_bits(self) -> Control:
        """What this process has to tell with the next step."""
        bits = Control.NOTHING
        if self._stops.poll() is not None:
            bits |= Control.STOP
        if self._parts.manager.error() is not None:
            bits |= Control.ERROR
        if self._is_one_of_many and self._parts.manager.due_to_tell(self.step):
            bits |= Control.SAVE
        return bits

    def _read(self, output: StepOutput | None, step: int) -> Control:
        """Reads the output of finished step `step`; the agreed control word."""
        if output is None:
            return Control.NOTHING
        with self._board.waiting(for_peers=self._is_one_of_many):
            read = jax.device_get(output)
        self._step_phase = Phase.STEP
        control = Control(int(read.control))
        if control & Control.ERROR:
            raise self._failed_save(step)
        metrics = {name: float(value) for name, value in read.metrics.items()}
        finite = bool(read.finite)
        data_secs = self._parts.iterator.take_wait_secs()
        self._meter.observe(step, metrics, finite=finite, data_secs=data_secs)
        self._report(self._meter.take())
        self._rule.observe(step, finite=finite)
        if self._spikes is not None:
            self._spikes.observe(step, metrics["loss"])
        return control

    def _failed_save(self, step: int) -> FaultError:
        """The failed save that some process has told of; it fails in all of them."""
        manager = self._parts.manager
        if manager.error() is None:
            with self._board.during(Phase.SAVE), contextlib.suppress(FaultError):
                manager.wait(timeout_secs=_HEARD_SECS)
        elsewhere = Fault(
            kind=FaultKind.SAVE_FAILED,
            step=step,
            evidence="a save failed in another process, whose own message says why",
        )
        return manager.error() or FaultError(elsewhere)

    def _report(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        self._emit("step", **record)
        # A record that was cut off by an evaluation says nothing about speed.
        if self._rate == 0.0 or record["secs"] > 0.1:
            self._rate = steps_per_sec(record) * self._parts.items[1]
        self._progress.update(
            record["step"],
            loss=record["metrics"]["loss"],
            rate=self._rate,
            checkpoint=self._parts.manager.last_committed,
        )

    def _flush(self) -> None:
        self._report(self._meter.take(force=True))

    def _should_evaluate(self) -> bool:
        every = self._parts.config.eval.every_steps
        if every == 0 or self.step == self._evaluated:
            return False
        return self.step % every == 0 or self.step >= self._parts.config.train.num_steps

    def _evaluate(self, state: TrainState) -> bool:
        """Evaluates at this border; False when a stop came in between."""
        with self._board.during(Phase.EVALUATE):
            return self._evaluate_heldout(state)

    def _evaluate_heldout(self, state: TrainState) -> bool:
        self._flush()
        self._emit("phase", name="evaluate")
        started = time.monotonic()
        totals: dict[str, np.ndarray] = {}
        pending = None
        # One batch ahead of what is read, as in training.
        for batch in [*self._parts.heldout, None]:
            if not self._is_one_of_many and self._stops.poll() is not None:
                return False
            sums = None
            if batch is not None:
                placed, _ = self._parts.train_step.place(batch)
                sums = self._eval_fn(state, placed)
            with self._board.waiting(for_peers=self._is_one_of_many):
                read = jax.device_get(pending or {})
            for name, pair in read.items():
                totals[name] = totals.get(name, 0.0) + np.asarray(pair, np.float64)
            pending = sums
            self._board.beat()
        self._evaluated = self.step
        self._evaluation = {
            name: float(total / weight) if weight else 0.0
            for name, (total, weight) in totals.items()
        }
        secs = time.monotonic() - started
        self._emit("evaluation", step=self.step, metrics=self._evaluation, secs=secs)
        shown = "  ".join(f"{n} {v:.4f}" for n, v in self._evaluation.items())
        self._progress.note(f"step {self.step}: held-out {shown}")
        self._emit("phase", name="train")
        self._meter.start()
        return True

    def _save(
        self,
        state: TrainState,
        *,
        force: bool = False,
        timeout_secs: float | None = None,
    ) -> bool:
        assert self._parts.iterator.step == self.step, "a batch was drawn too early"
        metrics = self._evaluation if self._evaluated == self.step else None
        if self._injector is not None:
            self._injector.before_save(self.step)
        with self._board.during(Phase.SAVE):
            has_begun = self._parts.manager.save(
                self.step,
                state,
                data=self._parts.iterator.get_state(),
                run=self._run_record(),
                metrics=metrics,
                force=force,
                timeout_secs=timeout_secs,
            )
        if self._injector is not None:
            self._injector.in_save()
        return has_begun

    def _run_record(self) -> dict[str, Any]:
        """What a restart wants back beside state and data position."""
        record: dict[str, Any] = {
            "facts": self._parts.facts,
            "config": settings.flatten(self._parts.config),
        }
        if self._spikes is not None:
            record["losses"] = self._spikes.get_state()
        return record

    def _save_last(self, state: TrainState) -> bool:
        """Commits the state after the last step, once whichever rule asked.

        Returns:
            False when a stop left no time for it.

        Raises:
            FaultError: it could not be saved, or is not finite.
        """
        manager = self._parts.manager
        self._emit("phase", name="save")
        while True:
            # Not all of them need know yet that one in flight has committed.
            if together.where(manager.last_committed != self.step):
                self._save(state, force=True)
            try:
                if not self._wait_for_save():
                    return False
                break
            except FaultError:
                # The state is still there to be tried again.
                if self._is_one_of_many or not manager.should_retry:
                    raise
        if manager.last_committed != self.step:
            fault = Fault(
                kind=FaultKind.NONFINITE,
                step=self.step,
                evidence="the state after the last step is not finite, and not saved",
            )
            raise FaultError(fault)
        return True

    def _leave(
        self, state: TrainState, pending: StepOutput | None
    ) -> tuple[TrainState, Ending]:
        """Commits this border within the grace time, or leaves on the last step."""
        self._read(pending, self.step)
        self._flush()
        if self._is_one_of_many and self._stops.poll() is None:
            self._stops.request("a request to another process")
        if self._rule.in_a_row and not self._stops.urgent:
            self._wait_for_save()  # The last one; this border is no place to go on.
            return state, Ending.STOPPED
        while not self._stops.urgent:
            action = self._plan_stop()
            if action is StopAction.LEAVE:
                break
            self._emit("phase", name="save")
            is_over = self._act(state, action)
            if is_over is None:
                continue
            if not is_over:
                # The last committed step stands, this one is no more than a leftover
                # that the next start cleans up.
                reason = "the time to stop was over before it was written"
                self._emit("save_failed", step=self.step, reason=reason)
            if action is StopAction.SAVE or not is_over:
                break
        if (failure := self._parts.manager.error()) is not None:
            raise failure
        if (committed := self._parts.manager.last_committed) != self.step:
            left_on = f"left on the last committed step {committed}"
            if committed is None:
                left_on = "left before any step was committed"
            self._progress.note(f"step {self.step}: {left_on}")
        return state, Ending.STOPPED

    def _act(self, state: TrainState, action: StopAction) -> bool | None:
        """Saves or waits, in all processes; whether that was over in time.

        None: a save that was in flight failed, and may be made good by the next.
        """
        if action is StopAction.SAVE:
            left_secs = self._stops.deadline_secs()
            self._save(state, force=True, timeout_secs=left_secs)
        is_over = is_failed = False
        try:
            is_over = self._wait_for_save()
        except FaultError:
            if action is StopAction.SAVE:
                raise
            is_failed = True
        if together.where(is_failed):
            return None
        return not together.where(not is_over)

    def _plan_stop(self) -> StopAction:
        """What the grace time is used for next; the event says why."""
        manager, left_secs = self._parts.manager, self._stops.deadline_secs()
        flying, committed = manager.in_flight, manager.last_committed
        age_secs = self._save_times.age_secs(-1 if flying is None else flying)
        question = StopQuestion(
            left_secs=math.inf if left_secs is None else left_secs,
            is_committed=committed == self.step,
            in_flight_secs=age_secs if flying is not None else None,
            save_secs=self._save_times.last_secs(),
        )
        # Of several processes the primary one says what all do.
        action = StopAction(together.from_primary(plan_stop(question)))
        self._emit(
            "stop_plan",
            step=self.step,
            left_secs=question.left_secs,
            save_secs=list(question.save_secs),
            in_flight=-1 if flying is None else flying,
            committed=-1 if committed is None else committed,
            action=action,
        )
        return action

    def _wait_for_save(self) -> bool:
        """Waits while a stop leaves time, without one for the manager's own.

        Returns:
            Whether no save is in flight any more.

        Raises:
            FaultError: it failed, or was not over in the manager's own time.
        """
        manager = self._parts.manager
        self._board.enter(Phase.SAVE)
        while manager.in_flight is not None:
            # Not over yet, or failed: the last question tells that one apart.
            with contextlib.suppress(FaultError):
                manager.wait(timeout_secs=_LOOK_SECS)
            is_asked = self._stops.deadline_secs() == 0 or self._stops.urgent
            if is_asked and manager.in_flight is not None:
                return False
        left_secs = self._stops.deadline_secs()
        # Whoever follows the save has to tell of it, whatever is left.
        at_least = None if left_secs is None else max(left_secs, _LOOK_SECS)
        manager.wait(timeout_secs=at_least)
        return True
