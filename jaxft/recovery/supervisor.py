"""The process that outlives the worker: starts it, hears it, restarts it.

World: host-only; it must start where JAX cannot and must not hold the accelerator.
Floor: recovery. Read `jaxft/recovery/policy.py`, which decides, and
`jaxft/recovery/worker_process.py` before this file and
`jaxft/recovery/worker_link.py`, the worker's side of the pipes, after it.

One loop in one thread waits for three things: event lines from the worker, stop
signals, the worker's death. The worker lives in a session of its own, so that a
Ctrl-C reaches it once, from here, and its whole process group can be ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from jaxft.config import SupervisorConfig
from jaxft.events import Event, EventLog
from jaxft.limits import TimeLimits
from jaxft.records import ALONE, ExitCode, Fault, FaultKind
from jaxft.recovery.policy import (
    Action,
    ActionKind,
    CacheMode,
    RestartPolicy,
    WorkerExit,
)
from jaxft.recovery.signal_pipe import SignalPipe
from jaxft.recovery.silence import HangWatch
from jaxft.recovery.spare import SpareWorker
from jaxft.recovery.workdir import WorkdirLock
from jaxft.recovery.worker_process import Launch, WorkerProcess

# The same signal again within this time is an echo (a bounced key, a group kill and
# its forwarding); later it means: now.
REPEAT_SECS = 3.0
# What "now" leaves the worker to say its last words.
URGENT_SECS = 1.0
# Death is seen at once by the end of the pipe, unless a child of the worker holds it.
_POLL_SECS = 0.1
# How long two runs can work side by side after the lock was removed.
_LOOK_SECS = 1.0
# What a line of the history holds of a reason; people are told the whole.
MAX_REASON_CHARS = 240
# After a request to stop these end the run as stopped: a new start looks at them anew.
_BESIDE_A_STOP = (
    FaultKind.STOPPED,
    FaultKind.KILLED,
    FaultKind.EXCEPTION,
    FaultKind.HANG,
    FaultKind.PEER_LOST,
)


def _ignore(said: object) -> None:
    """For a caller that wants to hear nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the command ended.

    Attributes:
        exit_code: of the command.
        reason: one line.
        verdict: of that, why there was no further restart; empty where the fault's
            kind says so.
        step: last step the last worker is known to have finished; -1 for none.
        committed_step: last step known to be committed; -1 for none.
        num_restarts: workers after the first.
        lost_secs: summed, from each death to the next worker's first step.
        preflight_done: False: a wrong config or a stop ended the run before that;
            nothing but the lock was written, and `WorkdirLock.release(undo=True)`
            leaves the workdir as it was found.
        fault: what ended it; None when it is finished.
    """

    exit_code: ExitCode
    reason: str
    verdict: str
    step: int
    committed_step: int
    num_restarts: int
    lost_secs: float
    preflight_done: bool
    fault: Fault | None


class Supervisor:
    """Runs workers until one finishes or going on makes no sense.

    Args:
        make_argv: command line of a worker for a `Launch`.
        config: budget and back-off.
        signals: the signals that ask the run to stop, but for those that are ignored
            by now; each is passed on to the worker, which is started with them
            blocked so that none is lost before it listens (`StopRequests` unblocks
            them).
        grace_secs: time from a request to the worker's end, then it is killed.
        emit: the history; it is opened once a worker's preflight is over, or a
            worker has died of anything but its config or a request to stop.
        lock: the workdir's lock: workers inherit it, and where its names lead
            elsewhere the run ends, for another may have begun there; None for none.
        more_fds: other descriptors that workers inherit.
        env: environment of the workers; None for this process's own.
        hear: is given each event of each worker.
        tell: is given a line for people when a worker has died and is replaced.
        limits: after how long without progress a worker hangs; None for never.
        spare: what waits to be the next worker, ended with the run; None for none.
        clock: seconds, from any start, never backwards.
    """

    def __init__(
        self,
        make_argv: Callable[[Launch], Sequence[str]],
        *,
        config: SupervisorConfig,
        signals: Sequence[signal.Signals],
        grace_secs: float,
        emit: EventLog,
        lock: WorkdirLock | None = None,
        more_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        hear: Callable[[Event], None] = _ignore,
        tell: Callable[[str], None] = _ignore,
        limits: TimeLimits | None = None,
        spare: SpareWorker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._make_argv = make_argv
        self._policy = RestartPolicy(
            max_restarts=config.max_restarts,
            refill_steps=config.refill_steps,
            backoff_secs=config.backoff_secs,
            backoff_max_secs=config.backoff_max_secs,
        )
        self._signals = tuple(signals)
        self._grace_secs = grace_secs
        self._emit = emit
        self._lock = lock
        self._more_fds = more_fds
        self._env = env
        self._hear = hear
        self._tell = tell
        self._spare = spare
        self._clock = clock
        self._watch: HangWatch | None = None
        if limits is not None:
            workdir = None if lock is None else lock.workdir
            self._watch = HangWatch(limits, workdir=workdir, clock=clock)
        self._history: list[WorkerExit] = []
        self._attempt = 0
        self._place = ALONE
        self._committed_step = -1
        self._preflight_done = False
        self._lost_secs = 0.0
        self._died_at: float | None = None
        self._first_seen: dict[int, float] = {}
        self._stop_reason = ""
        self._kill_at = math.inf
        self._look_at = -math.inf
        self._lock_problem = ""

    @property
    def speaks(self) -> bool:
        """Whether people are told by this one how it ended."""
        return True

    def run(self) -> Outcome:
        """Blocks until the run is over; call it once, in the main thread.

        (In another thread it works too, but then nobody listens to signals, and a
        worker dies with the thread that started it.)
        """
        with SignalPipe(self._signals) as pipe, contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(pipe.read_fd, selectors.EVENT_READ, pipe)
            if self._spare is not None:
                stack.callback(self._spare.close)
            cache = CacheMode.KEEP
            while True:
                ended = self._run_worker(selector, pipe, cache=cache)
                self._history.append(ended)
                self._attempt += 1
                action = self._decide()
                if action.kind is not ActionKind.RESTART:
                    return self._finish(action)
                self._tell_of_restart(action)
                if self._pause(action.delay_secs, selector, pipe):
                    return self._finish(self._decide())
                cache = action.cache

    def _run_worker(
        self, selector: selectors.BaseSelector, pipe: SignalPipe, *, cache: CacheMode
    ) -> WorkerExit:
        try:
            worker = self._start(cache)
        except OSError as error:
            problem = f"the worker could not be started: {error}"
            return WorkerExit(
                kind=FaultKind.KILLED, status=1, evidence=problem, cache=cache
            )
        pid = worker.process.pid
        self._emit(
            "launch",
            worker_pid=pid,
            attempt=self._attempt,
            cache=cache,
            from_spare=worker.from_spare,
        )
        selector.register(worker.event_fd, selectors.EVENT_READ, worker)
        listening = True
        while not worker.is_dead():
            for key, _ in selector.select(_POLL_SECS):
                if key.data is pipe:
                    self._take_signals(pipe, worker)
                elif listening and not worker.read():
                    selector.unregister(worker.event_fd)
                    listening = False
            self._take_events(worker)
            self._end_in_time(worker)
            if self._spare is not None:
                self._spare.tend(pid, makes_steps=worker.heard.reached_first_step)
        while listening and worker.read():
            pass
        self._take_events(worker)
        if listening:
            selector.unregister(worker.event_fd)
        status = worker.reap()
        if self._died_at is None:  # Else the loss goes on since an earlier death.
            self._died_at = self._clock()
        ended = worker.heard.exit(status, cache=cache)
        if self._watch is not None and worker.heard.hang_phase is not None:
            self._watch.count_alarm(worker.heard.hang_phase)
        if self._lock_problem and ended.kind is not None:
            ended = dataclasses.replace(
                ended, kind=FaultKind.WORKDIR_IN_USE, evidence=self._lock_problem
            )
        self._emit("worker_exit", worker_pid=pid, status=status, step=ended.last_step)
        return ended

    def _end_in_time(self, worker: WorkerProcess) -> None:
        """Kills a worker that may not, shall not or does not go on."""
        if self._lock_is_lost() or self._clock() >= self._kill_at:
            worker.kill()
        folder = self._emit.path.parent if self._preflight_done else None
        if (hang := worker.end_hang(folder)) is not None:
            self._emit("hang", **hang)

    def _lock_is_lost(self) -> bool:
        """Whether the workdir may be another's by now; looks once in a while."""
        now = self._clock()
        if self._lock is not None and not self._lock_problem and now >= self._look_at:
            self._look_at = now + _LOOK_SECS
            self._lock_problem = self._lock.problem()
        return bool(self._lock_problem)

    def _start(self, cache: CacheMode) -> WorkerProcess:
        # Blocked signals stay pending through exec: one that comes while the new
        # interpreter starts neither kills it nor gets lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        # What is under suspicion begins with nothing that was there before.
        spare = self._spare if cache is CacheMode.KEEP else None
        try:
            return WorkerProcess(
                self._make_argv,
                attempt=self._attempt,
                place=self._place,
                lock_fds=self._lock.filenos() if self._lock else (),
                more_fds=self._more_fds,
                cache=cache,
                committed_step=self._committed_step,
                env=self._env,
                hear=self._hear,
                watch=self._watch,
                spare=spare,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _take_events(self, worker: WorkerProcess) -> None:
        """Keeps what outlives the worker; the rest is in `worker.heard`."""
        heard = worker.heard
        if self._watch and worker.silence and self._preflight_done:
            self._watch.keep(worker.silence)
        self._committed_step = max(self._committed_step, heard.committed_step)
        if heard.preflight_done:
            self._open_history()
        if heard.reached_first_step and self._died_at is not None:
            self._lost_secs += self._clock() - self._died_at
            self._died_at = None
        if heard.stop_reason and not self._stop_reason:
            # The worker was asked directly, or its time is up: the same deadline.
            self._stop(heard.stop_reason)

    def _open_history(self) -> None:
        self._preflight_done = True
        self._emit.open()

    def _take_signals(self, pipe: SignalPipe, worker: WorkerProcess | None) -> None:
        for number in pipe.read():
            if number == signal.SIGTSTP:
                began = self._clock()
                _suspend(worker)
                if (secs := self._clock() - began) > _POLL_SECS:
                    self._emit("suspended", secs=secs)
                continue
            now = self._clock()
            first = self._first_seen.setdefault(number, math.inf)
            if math.isinf(first):
                self._first_seen[number] = now
                if not self._stop_reason:
                    self._stop(signal.Signals(number).name)
            elif now - first > REPEAT_SECS:
                self._kill_at = min(self._kill_at, now + URGENT_SECS)
            else:
                continue
            if worker is not None:
                worker.send_signal(number)

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        self._kill_at = self._clock() + self._grace_secs

    def _decide(self) -> Action:
        """The policy's answer, unless somebody wants the run to stop."""
        action = self._policy.decide(self._history)
        last = self._history[-1]
        if self._stop_reason and last.kind in _BESIDE_A_STOP:
            action = dataclasses.replace(
                action,
                kind=ActionKind.STOP,
                cause=str(FaultKind.STOPPED),
                reason=self._stopped_because(last),
                verdict="",
                exit_code=ExitCode.STOPPED,
                delay_secs=0.0,
            )
        elif self._stop_reason and action.kind is ActionKind.RESTART:
            # The save of the stop failed: not tried again, and not hidden either.
            action = dataclasses.replace(action, kind=ActionKind.STOP, delay_secs=0.0)
        if last.kind not in (FaultKind.CONFIG, FaultKind.STOPPED):
            self._open_history()
        self._emit(
            "decision",
            action=str(action.kind),
            cause=action.cause,
            reason=action.reason[:MAX_REASON_CHARS],
            delay_secs=action.delay_secs,
            budget_left=action.budget_left,
        )
        return action

    def _tell_of_restart(self, action: Action) -> None:
        step = self._history[-1].last_step
        where = f"at step {step}" if step >= 0 else "before its first step"
        known = self._committed_step >= 0
        origin = "the newest checkpoint" if known else "the beginning"
        delay = f" in {action.delay_secs:.0f} s" if action.delay_secs >= 1 else ""
        self._tell(
            f"worker died {where}: {action.reason}; "
            f"restarting{delay} from {origin} "
            f"(restart {len(self._history)}, {action.budget_left} left)"
        )

    def _stopped_because(self, last: WorkerExit) -> str:
        if last.kind is FaultKind.STOPPED:
            return f"stopped by {self._stop_reason}"
        left_on = f"left on the last committed step {self._committed_step}"
        if self._committed_step < 0:
            left_on = "left before any step was committed"
        return f"stopped by {self._stop_reason}, {left_on}: {last.summary}"

    def _pause(
        self, secs: float, selector: selectors.BaseSelector, pipe: SignalPipe
    ) -> bool:
        """Waits; True as soon as the run is asked to stop."""
        until = self._clock() + secs
        while not self._stop_reason:
            left = until - self._clock()
            if selector.select(min(max(left, 0.0), _POLL_SECS)):
                self._take_signals(pipe, None)
            if left <= 0:
                break
        return bool(self._stop_reason)

    def _finish(self, action: Action) -> Outcome:
        last = self._history[-1]
        fault = None
        if action.kind is not ActionKind.FINISH:
            fault = Fault(
                kind=FaultKind(action.cause),
                step=last.last_step,
                evidence=last.evidence or action.reason,
            )
        self._emit(
            "supervisor_end",
            exit_code=int(action.exit_code),
            reason=action.reason[:MAX_REASON_CHARS],
        )
        return Outcome(
            exit_code=action.exit_code,
            reason=action.reason,
            verdict=action.verdict,
            step=last.last_step,
            committed_step=self._committed_step,
            num_restarts=len(self._history) - 1,
            lost_secs=self._lost_secs,
            preflight_done=self._preflight_done,
            fault=fault,
        )


def _suspend(worker: WorkerProcess | None) -> None:
    """Ctrl-Z: first the worker, which is no job of the shell's, then this process."""
    if worker is not None:
        worker.pause()
    earlier = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    # The signal itself and not SIGSTOP: without a shell that could wake us, the kernel
    # lets it pass.
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, earlier)
    if worker is not None:
        worker.go_on()
