"""One worker's life: build, preflight, restore or begin, compile, train, close.

World: device. Floor: above `loop`, below `main` and `jaxft/notebook.py`, where it is
lived. Read `jaxft/loop.py` next.

Until the preflight is over nothing but the lock is written: a run that cannot work
leaves the workdir as it found it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from jaxft import durable, init_params, memory_record, rollbacks, settings
from jaxft.build import Parts, build
from jaxft.checkpoint import (
    decisions,
    layout,
    mirrored,
    run_record,
    space,
    state_digests,
    together,
)
from jaxft.config import Config, ConfigError, Progress, ResumeMode
from jaxft.data.windows import add_skips, parse_skip
from jaxft.events import EventLog
from jaxft.faults.grace import SaveTimes
from jaxft.faults.inject import Injector
from jaxft.faults.nonfinite import BadStepsError
from jaxft.faults.preemption import StopRequests
from jaxft.faults.watchdog import PhaseBoard
from jaxft.loop import Ending, Loop, StopWhileWaiting
from jaxft.metrics.notes import Notes
from jaxft.metrics.tensorboard import TensorBoard, folder_of
from jaxft.metrics.writers import ProgressLine, say
from jaxft.parallel.compile_cache import CompileCache
from jaxft.records import ALONE, Emit, Fault, FaultError, FaultKind, JobPlace, Phase
from jaxft.recovery.generations import Fence
from jaxft.recovery.resume import check_resume
from jaxft.team import Team
from jaxft.train.injected import exhaust_memory, flip_bit
from jaxft.types import TrainState


class Worker:
    """Brings the parts of a run to life once.

    Args:
        config: resolved and locked.
        workdir: absolute; it is there, and locked by the caller.
        log: the run's history; opened here when the preflight is over.
        stops: requests to stop.
        attempt: workers that this command started before.
        cache: `keep`, `off` or `fresh`: what to do with the compile cache.
        committed_step: newest step that those workers committed; -1 for none.
        board: where a watchdog sees what this thread is at.
        place: which process of its job this is.
        end: ends the process when another one of its job has ended, from any thread.

    Attributes:
        entered: whether the preflight is over and the workdir was written to.
        team: the other processes of its job.
    """

    def __init__(
        self,
        config: Config,
        *,
        workdir: pathlib.Path,
        log: EventLog,
        stops: StopRequests,
        attempt: int = 0,
        cache: str = "keep",
        committed_step: int = -1,
        board: PhaseBoard | None = None,
        place: JobPlace = ALONE,
        end: Callable[[Fault], NoReturn] | None = None,
    ):
        self.entered = False
        self._place = place
        self._board = board or PhaseBoard()
        self.team = Team(
            place, config, stops=stops, emit=log, board=self._board, end=end
        )
        self._config = config
        self._workdir = workdir
        self._log = log
        self._stops = stops
        self._attempt = attempt
        self._committed_step = committed_step
        self._was_used = (workdir / "config.json").exists()
        mode = cache if config.compile.cache else "off"
        self._cache = CompileCache(workdir / "compile_cache", mode=mode, emit=log)
        self._loop: Loop | None = None
        self._remat: memory_record.PlanInForce | None = None
        self._peak_bytes = 0
        self._progress: ProgressLine | None = None
        self._curves: pathlib.Path | None = None
        self._save_times = SaveTimes()
        self._injector: Injector | None = None
        self._spikes = rollbacks.make_spike_rule(config.rollback)
        self._notes = Notes(
            self._note,
            failed_saves=config.checkpoint.on_save_error.strip() != "fail",
            stop_secs=config.preemption.grace_secs,
        )

    def live(self) -> tuple[TrainState, Ending]:
        """Runs to the end, a stop or a failure.

        Raises:
            ConfigError: before the preflight was over, or a resume that is refused.
            FaultError: anything else; the `fault` event says the same.
        """
        self._log("start", attempt=self._attempt, argv=sys.argv)
        parts = None
        try:
            # Building may read a whole corpus: a stop must not wait for it.
            with self._stops.may_leave():
                self.team.join()
                where = {"workdir": self._workdir, "emit": self.tell}
                self._remat = memory_record.find_plan(self._config, **where)
                parts = build(
                    self._config,
                    plan=self._remat.plan if self._remat else None,
                    workdir=self._workdir,
                    emit=self.tell,
                    poll=self._poll_while_waiting,
                    may_commit=Fence(self._workdir, generation=self._place.generation),
                )
                self._plan_faults(parts)
                self._preflight(parts)
            self._enter(parts)
            state, ending = self._train(parts)
            stats = parts.train_step.mesh.local_devices[0].memory_stats()
            memory_record.compare_peak(self._peak_bytes, stats, emit=self.tell)
            if ending is Ending.FINISHED and not self._close_manager(parts):
                # What the mirror lacks, the next start of the command sends.
                ending = Ending.STOPPED
        except (Exception, SystemExit) as error:
            step = self._loop.step if self._loop else -1
            self.team.begin_end()
            fault = self.team.fault_of(error, step=step)
            if not self.entered and fault.kind is FaultKind.SAVE_FAILED:
                # No restore has told it: a disk that takes no more holds it.
                self._log("found", step=fault.step)
            if not self.team.ends_alone(fault):
                self._finish_save(parts)
            self._log("fault", **fault.event())
            self.team.tell_end(fault)
            if isinstance(error, ConfigError):
                raise
            raise FaultError(fault) from error
        finally:
            if parts is not None:
                parts.iterator.close()
            self._cache.close()
        assert self._loop is not None
        self._log("end", step=self._loop.step, reason=ending)
        self.team.leave()
        self._log.close()
        return state, ending

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Adds an event to the history, and for some a line that a person sees."""
        if self._injector is not None:
            self._injector.hear(kind)  # First: it may give the log its room back.
        self._log(kind, **fields)
        if self._injector is not None:
            self._injector.tell_late()
        self._notes.take(kind, fields)
        self._save_times.take(kind, fields)
        if kind == "mirror_commit" and self._board.phase is Phase.MIRROR:
            self._board.beat()

    def _plan_faults(self, parts: Parts) -> None:
        """Faults on purpose; what an earlier one still holds is given back."""

        def committed() -> list[int]:
            parts.manager.finish()  # Else another one could become the newest.
            return parts.manager.steps()

        if parts.faults:
            self._injector = Injector(
                parts.faults,
                workdir=self._workdir,
                root=parts.manager.root,
                committed=committed,
                acts={"flip_bit": flip_bit, "exhaust_memory": exhaust_memory},
                emit=self._log,
                process=jax.process_index(),
            )
            parts.manager.slow_down(self._injector.write_rate)

    def _note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.note(text)

    def _preflight(self, parts: Parts) -> None:
        """Refuses what cannot be saved or resumed, from what is on disk."""
        root = parts.manager.root
        self._curves = folder_of(self._config.log.tensorboard, workdir=self._workdir)
        parts.manager.check(parts.train_step.abstract_state)
        newest = parts.manager.latest()
        mode = self._config.resume.mode
        if mode is ResumeMode.NEVER and newest is not None:
            raise ConfigError(
                "resume.mode",
                f"never, but {root} holds step {newest}: choose another workdir",
            )
        if newest is None:
            self._check_beginning(root, parts=parts)
            return
        # One that cannot be read is for the restore to deal with.
        with contextlib.suppress(OSError, run_record.RecordError):
            record = run_record.read_record(layout.step_path(root, newest))
            if not _damage(record):
                self._compare(parts, record["run"])

    def _check_beginning(self, root: str, *, parts: Parts) -> None:
        """Refuses a run that could neither go on nor begin."""
        on_mirror = mirrored.list_steps(self._config.checkpoint.mirror, root=root)
        mode = self._config.resume.mode
        if mode is ResumeMode.REQUIRED and not on_mirror:
            raise ConfigError(
                "resume.mode", f"required, but {root} holds no checkpoint"
            )
        if mode is ResumeMode.NEVER and on_mirror:
            place = self._config.checkpoint.mirror
            raise ConfigError(
                "resume.mode",
                f"never, but {place} holds step {on_mirror[-1]}: choose another one",
            )
        if self._config.init.checkpoint and not on_mirror:
            params = parts.train_step.abstract_state.params
            init_params.check(self._config.init, params)

    def _compare(self, parts: Parts, record: dict[str, Any]) -> dict[str, Any]:
        saved = record.get("facts", {})
        return check_resume(
            saved,
            parts.facts,
            allow=self._config.resume.allow,
            fixed_order=self._config.train.virtual_shards > 0,
        )

    def _enter(self, parts: Parts) -> None:
        """The preflight is over: from here on the workdir is ours to write."""
        unit, per_step = parts.items
        self._log("facts", facts=parts.facts)
        self._log(
            "run",
            num_steps=self._config.train.num_steps,
            unit=unit,
            per_step=per_step,
            num_params=parts.num_params(),
        )
        if target := self._config.checkpoint.mirror:
            self._log("mirror_target", target=target)
        try:
            with together.same_end(f"write to {self._workdir}"):
                if self._place.is_primary:
                    _write_config(self._workdir / "config.json", self._config)
                    if self._remat and self._remat.is_new:
                        self._remat.write(self._workdir)
        except (ConfigError, FaultError) as error:
            raise space.refusal(error, newest=parts.manager.latest()) from error
        self._log("preflight_done")
        self.entered = True
        self._log.open()

    def _train(self, parts: Parts) -> tuple[TrainState, Ending]:
        mode = self._config.log.progress
        progress = ProgressLine(
            num_steps=self._config.train.num_steps,
            unit=parts.items[0],
            restarts=self._attempt,
            mode=mode if self._place.is_primary else Progress.NEVER,
        )
        self._progress = progress
        with contextlib.ExitStack() as stack:
            stack.callback(progress.close)
            if problem := self._cache.enable(
                device=parts.train_step.mesh.devices.flat[0]
            ):
                progress.note(f"warning: compiling without a cache: {problem}")
            with self._stops.may_leave():
                state, restored, evaluated = self._first_state(parts, progress)
                self._board.enter(Phase.COMPILE)
                state_digests.prepare(state)  # Else the first save would wait for it.
                step_fn, eval_fn = self._compile(parts, state)
                self.team.meet()
            emit = self._drawing(restored, stack)
            while True:
                self._loop = Loop(
                    parts,
                    step_fn,
                    eval_fn=eval_fn,
                    stops=self._stops,
                    emit=emit,
                    progress=progress,
                    restored=restored,
                    evaluated=evaluated,
                    save_times=self._save_times,
                    injector=self._injector,
                    board=self._board,
                    spikes=self._spikes,
                )
                try:
                    return self._loop.run(state)
                except BadStepsError as error:
                    bad = error.with_traceback(None)  # Its frames hold the state,
                del state  # for which there would not be room twice.
                self._board.enter(Phase.RESTORE)  # All of a step is read twice.
                rollbacks.roll_back(parts, bad, emit=self.tell)
                with self._stops.may_leave():
                    state, restored, evaluated = self._first_state(parts, progress)

    def _drawing(self, restored: int, stack: contextlib.ExitStack) -> Emit:
        """The history, and where they are asked for curves beside it."""
        if self._curves is None or jax.process_index():
            return self._log
        curves = TensorBoard(
            self._curves,
            emit=self._log,
            first_step=restored + 1,
            warn=self._note,
        )
        stack.callback(curves.close)
        return curves

    def _first_state(
        self, parts: Parts, progress: ProgressLine
    ) -> tuple[TrainState, int, int]:
        """The newest good state or that of step 0, its label, the evaluated step."""
        self._log("phase", name="restore")
        self._board.enter(Phase.RESTORE)
        restored = parts.manager.restore(parts.train_step.abstract_state, check=_damage)
        if restored is None:
            return self._begin(parts, progress), -1, -1
        changes = self._compare(parts, restored.run)
        # Those that change no numbers need no permission, but are told.
        saved = restored.run.get("config", {})
        told = changes | {
            path: [saved[path], value]
            for path, value in settings.flatten(self._config).items()
            if path in saved and saved[path] != value
        }
        if told:
            self._log("resume_changed", changes=told)
        if changes:
            progress.note(f"resuming with other settings: {', '.join(changes)}")
        if restored.data.get("step") != restored.step:
            # Saved by another loop: its data position is not ours.
            raise FaultError(
                Fault(
                    kind=FaultKind.NO_CHECKPOINT,
                    step=restored.step,
                    evidence=f"{restored.path} holds no data position of its step",
                )
            )
        skipped = [(start, stop) for start, stop in restored.data["skipped"]]
        # Rollbacks to this step took them out.
        decided = decisions.read(parts.manager.root)
        skipped += decided.skips_since(restored.record["timeline"])
        wanted = parse_skip(self._config.data.skip)
        skipped = add_skips(skipped, wanted, step=restored.step)
        others = changes.keys() - {"data.skip"}
        if not any(name == "corpus" or name.startswith("data.") for name in others):
            # Else, allowed by name, the place in the order stays in another order.
            parts.iterator.set_state(restored.data)
        parts.iterator.seek(restored.step, skipped=skipped)
        origin = f" from {restored.path}"
        if restored.step in self._notes.fetched:
            origin = f", fetched from the mirror {self._config.checkpoint.mirror}"
        progress.note(f"resuming at step {restored.step}{origin}")
        if self._spikes is not None:
            self._spikes.set_state(restored.run.get("losses"))
        evaluated = restored.step if restored.metrics else -1
        return restored.state, restored.step, evaluated

    def _begin(self, parts: Parts, progress: ProgressLine) -> TrainState:
        """The state of step 0, if there never was another one.

        Raises:
            FaultError: kind NO_CHECKPOINT: this very command has saved a step.
        """
        root = parts.manager.root
        if self._committed_step >= 0:
            text = (
                f"step {self._committed_step} was saved, and {root} holds no step now: "
                "put it back; a new start of the command begins anew"
            )
            kind, step = FaultKind.NO_CHECKPOINT, self._committed_step
            raise FaultError(Fault(kind=kind, step=step, evidence=text))
        self._log("phase", name="init")
        self._board.enter(Phase.INIT)
        why = f"{root} holds no step: " if self._was_used else ""
        progress.note(f"{why}a fresh start: compiling")
        return self._init(parts)

    def _init(self, parts: Parts) -> TrainState:
        """The state of step 0, with the parameters of another run if asked to."""
        chosen = self._config.init
        if not chosen.checkpoint:
            return parts.train_step.init()
        params = init_params.load(chosen, parts.train_step, emit=self._log)
        return parts.train_step.init(params=params)

    def _compile(self, parts: Parts, state: TrainState) -> tuple[Any, Any]:
        """The train and, if it is used, the evaluation step; before the loop begins."""
        self._log("phase", name="compile")
        started, hits = time.monotonic(), self._cache.num_hits
        batch, word = parts.train_step.place(parts.example)
        step_fn = parts.train_step.lower(state, batch, word).compile()
        eval_fn = None
        if parts.heldout and self._config.eval.every_steps:
            eval_fn = parts.eval_step.lower(state, batch).compile()
        memory = memory_record.observe(step_fn)
        self._peak_bytes = memory.get("peak_bytes", 0)
        self._log(
            "compile",
            secs=time.monotonic() - started,
            cached=self._cache.num_hits > hits,
            **memory,
        )
        return step_fn, eval_fn

    def _poll_while_waiting(self) -> None:
        # Alone, a process may leave by itself; several must agree in a step.
        if self._loop and jax.process_count() == 1 and self._stops.poll() is not None:
            raise StopWhileWaiting

    def _close_manager(self, parts: Parts) -> bool:
        """Lets the mirror have the last steps; False when a stop left no time."""
        is_told = False

        def may_wait() -> bool:
            nonlocal is_told
            if not is_told:
                is_told = True
                self._log("phase", name="mirror")
                place = self._config.checkpoint.mirror
                say(f"waiting until {place} has the last step", stream=sys.stderr)
            return self._stops.deadline_secs() != 0 and not self._stops.urgent

        self._board.enter(Phase.MIRROR)
        is_over = parts.manager.close(may_wait=may_wait)
        return is_over or self._stops.poll() is None

    def _finish_save(self, parts: Parts | None) -> None:
        """Lets a save in flight end well although the run does not."""
        if parts is None or parts.manager.error() is not None:
            return
        self._board.enter(Phase.SAVE)
        # A failure is told already by whoever saw it.
        with contextlib.suppress(FaultError):
            parts.manager.wait(timeout_secs=self._config.checkpoint.timeout_secs)


def _damage(record: dict[str, Any]) -> str:
    """Why the record of one of our runs is not as it was saved; empty if it is."""
    run, data = record["run"], record["data"]
    if any(not isinstance(run.get(name, {}), dict) for name in ("facts", "config")):
        return "its settings cannot be understood"
    windows = data.get("skipped")
    is_whole = isinstance(windows, list) and all(
        isinstance(window, list) and [type(x) for x in window] == [int, int]
        for window in windows
    )
    # Other loops have no facts, and may have any data position.
    if "facts" in run and (data.get("step") != record["step"] or not is_whole):
        return "it holds no data position of its step"
    return ""


def _write_config(path: pathlib.Path, config: Config) -> None:
    """Replaces the file by an atomic rename: a reader never sees half of it.

    Raises:
        ConfigError: the workdir takes no file.
    """
    # What a kill at this very moment left is ours: we hold the lock.
    durable.sweep(path)
    body = json.dumps(settings.flatten(config), indent=1) + "\n"
    try:
        durable.replace(path, body.encode())
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise ConfigError("", problem) from error
