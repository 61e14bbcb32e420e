"""The supervisor of one of several workers, which live and die together.

World: host-only. Floor: recovery. Read `jaxft/recovery/supervisor.py`, which does the
same for a worker alone, and `jaxft/recovery/council.py` before this file and
`jaxft/recovery/local_job.py`, which starts several on one machine, after it.

Each turn has three parts: agree on a generation, run its worker until somebody's is
down, say how it ended. In the first the member of lowest index decides for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import selectors
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from jaxft.config import ConfigError, ElasticConfig
from jaxft.records import EXIT_CODES, ExitCode, Fault, FaultKind, JobPlace
from jaxft.recovery import council
from jaxft.recovery.addresses import free_address
from jaxft.recovery.generations import (
    Down,
    End,
    Generation,
    Generations,
    Seat,
)
from jaxft.recovery.launchers import Launcher
from jaxft.recovery.members import Members, Sight
from jaxft.recovery.policy import ActionKind, CacheMode, WorkerExit
from jaxft.recovery.signal_pipe import SignalPipe
from jaxft.recovery.supervisor import MAX_REASON_CHARS, Outcome, Supervisor
from jaxft.recovery.workdir import WorkdirLock
from jaxft.recovery.worker_process import Launch, WorkerProcess

_POLL_SECS = 0.1
_TELL_SECS = 10.0
# How long those that are ready wait for the one of them that is to decide, beyond the
# longest delay that it may be waiting for.
_DECIDE_SECS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRules:
    """How long the members of a job wait for each other.

    Attributes:
        num_configured: processes that the job is meant to have.
        lost_secs: silence after which a member counts as lost.
        wait_secs: how long an absent one is waited for.
        min_processes: then the rest goes on, if it is so many; 0 for never.
    """

    num_configured: int
    lost_secs: float
    wait_secs: float
    min_processes: int = 0


class JobSupervisor(Supervisor):
    """Runs the workers of one member, one a generation, until the job is over.

    Args:
        make_argv: command line of a worker for a `Launch`.
        seat: who this member is.
        workdir: of the job; all members share it.
        rules: how long to wait for whom.
        find_address: a `host:port` that is free here now, for others to reach.
        refuse: why so few processes cannot go on alone, one line; empty if they can.
        more: as for `Supervisor`.

    Attributes:
        generation: the newest one that this member was in; None before the first.
        end: how the job ended; None until then.
    """

    def __init__(
        self,
        make_argv: Callable[[Launch], Sequence[str]],
        *,
        seat: Seat,
        workdir: Any,
        rules: JobRules,
        find_address: Callable[[], str],
        refuse: Callable[[int], str] = lambda _: "",
        **more: Any,
    ):
        super().__init__(make_argv, **more)
        self._seat = seat
        self._rules = rules
        self._find_address = find_address
        self._refuse = refuse
        self._longest_delay_secs = more["config"].backoff_max_secs
        self._generations = Generations(workdir)
        self._members = Members(
            workdir, seat, lost_secs=rules.lost_secs, clock=self._clock
        )
        names = (council.member_name(i) for i in range(rules.num_configured))
        self._names = tuple(names)
        self.generation: Generation | None = None
        self.end: End | None = None
        self._lookout: council.Lookout | None = None
        self._call_off: council.CallOff | None = None
        # A generation that had ended before this member came.
        self._old_end: int | None = None
        self._beginnings = council.Beginnings(rules.lost_secs, clock=self._clock)
        self._quiet_since: float | None = None
        self._tell_at = -math.inf
        self._decided = 0
        self._propose_at = math.inf
        self._next_cache = CacheMode.KEEP
        self._next_reason = ""

    @property
    def speaks(self) -> bool:
        """Whether people are told by this one: of a generation its first member."""
        return self.generation is None or self.generation.rank(self._seat) == 0

    def run(self) -> Outcome:
        """Blocks until the job is over; call it once, in the main thread."""
        with SignalPipe(self._signals) as pipe, contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(pipe.read_fd, selectors.EVENT_READ, pipe)
            stack.callback(self._members.leave)
            if self._spare is not None:
                stack.callback(self._spare.close)
            while True:
                turn = self._await_turn(selector, pipe)
                if isinstance(turn, End):
                    return self._leave(turn)
                self._live(turn, selector, pipe)

    def _await_turn(
        self, selector: selectors.BaseSelector, pipe: SignalPipe
    ) -> Generation | End:
        """The next generation with this member in it, or the end of the job."""
        self._quiet_since, self._tell_at = None, self._clock() + _TELL_SECS
        while True:
            if selector.select(_POLL_SECS):
                self._take_signals(pipe, None)
            self._members.beat()
            # A storage that does not answer well says nothing.
            with contextlib.suppress(OSError):
                if (turn := self._look()) is not None:
                    return turn
            if self._stop_reason and self._clock() >= self._kill_at:
                return self._stopped()
            if self._lock_is_lost():
                return self._own_end(FaultKind.WORKDIR_IN_USE, self._lock_problem)

    def _look(self) -> Generation | End | None:
        """One look at the files, and what this member has to do about them."""
        newest = self._generations.newest()
        number = 0 if newest is None else newest.number
        end = self._generations.end(number)
        is_in_it = newest is not None and self._seat in newest
        if self._old_end is None:
            self._old_end = number if end is not None and not is_in_it else -1
        if end is not None and number != self._old_end:
            return end
        if self._beginnings.look(number, is_in_it=is_in_it):
            self._quiet_since = None
        begun = 0 if self.generation is None else self.generation.number
        if newest is not None and is_in_it and number > begun:
            return newest
        downs = {} if newest is None else self._generations.downs(newest)
        sights = self._members.look(self._names)
        standing = council.assess(
            self._names,
            newest=newest,
            downs=downs,
            sights=sights,
            has_ended=end is not None,
            has_just_begun=self._beginnings.has_just_begun,
        )
        if self._stop_reason:
            return self._stop_between(number, standing, is_in_it=is_in_it)
        if (missing := standing.busy + standing.unsure) or not standing.ready:
            self._quiet_since = None
            self._tell_of_wait(missing)
            return None
        return self._conclude(newest, standing, downs, sights)

    def _conclude(
        self,
        newest: Generation | None,
        standing: council.Standing,
        downs: dict[str, Down],
        sights: dict[str, Sight],
    ) -> End | None:
        """All that are there are ready: waits for the rest, decides, or follows."""
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now
        quiet_secs = now - self._quiet_since
        if standing.absent:
            self._tell_of_wait(standing.absent)
            if quiet_secs < self._rules.wait_secs:
                return None
            if not 0 < self._rules.min_processes <= len(standing.ready):
                who = ", ".join(standing.absent)
                where = f"in {self._members.folder}, which all hosts must share"
                text = f"{who} did not come within {self._rules.wait_secs:g} s, {where}"
                return self._own_end(FaultKind.PEER_LOST, text)
            if problem := self._refuse(len(standing.ready)):
                return self._own_end(FaultKind.CONFIG, problem)
        if standing.ready[0] != self._seat.name:
            patience = self._rules.wait_secs + self._longest_delay_secs + _DECIDE_SECS
            if quiet_secs > patience:
                text = f"{standing.ready[0]} does not decide"
                return self._own_end(FaultKind.PEER_LOST, text)
            return None
        number = 0 if newest is None else newest.number
        if self._decided != number or math.isinf(self._propose_at):
            self._decide_for_all(newest, standing, downs)
            self._decided = number
        if self._clock() < self._propose_at:
            return None
        proposal = council.next_generation(
            newest,
            standing.ready,
            sights,
            survives=standing.survives,
            num_configured=self._rules.num_configured,
            committed_step=self._committed_step,
            cache=self._next_cache,
            coordinator=self._find_address(),
            reason=self._next_reason,
            time_secs=time.time(),
        )
        self._generations.propose(proposal)
        self._propose_at = math.inf
        return None

    def _decide_for_all(
        self,
        newest: Generation | None,
        standing: council.Standing,
        downs: dict[str, Down],
    ) -> None:
        """What follows `newest`: when and how the next one begins, or the end."""
        self._propose_at = self._clock()
        self._next_cache, self._next_reason = CacheMode.KEEP, "the start"
        if newest is None or not standing.survives:
            return
        ended, member = council.first_cause(newest, downs)
        returned = self._generations.returned(newest.number)
        if returned and ended.kind is FaultKind.STOPPED:
            self._next_reason = f"{', '.join(returned)} came back"
            return
        self._history = council.history(self._generations, newest)
        committed_step = max(worker.committed_step for worker in self._history)
        self._committed_step = max(
            self._committed_step, newest.committed_step, committed_step
        )
        for down in downs.values():
            self._stop_reason = self._stop_reason or down.stop_reason
        action = self._decide()
        self._next_cache = action.cache
        self._next_reason = action.reason[:MAX_REASON_CHARS]
        if action.kind is ActionKind.RESTART:
            self._tell_of_restart(action)
            self._propose_at = self._clock() + action.delay_secs
            return
        self._propose_at = math.inf
        end = End(
            exit_code=int(action.exit_code),
            cause=action.cause,
            reason=action.reason,
            verdict=action.verdict,
            step=ended.last_step,
            evidence=ended.evidence,
            member=member,
            time_secs=time.time(),
        )
        self._generations.write_end(newest.number, end)

    def _live(
        self, generation: Generation, selector: selectors.BaseSelector, pipe: SignalPipe
    ) -> None:
        """This member's part of one generation."""
        self.generation = generation
        self._attempt = generation.attempt
        self._committed_step = max(self._committed_step, generation.committed_step)
        self._place = JobPlace(
            process_index=generation.rank(self._seat),
            num_processes=len(generation.members),
            coordinator=generation.coordinator,
            generation=generation.number,
        )
        self._call_off, self._kill_at = None, math.inf
        self._propose_at = math.inf
        if self._stop_reason:
            self._stop(self._stop_reason)
        self._emit(
            "generation",
            number=generation.number,
            members=[seat.name for seat in generation.members],
            num_configured=generation.num_configured,
            coordinator=generation.coordinator,
            attempt=generation.attempt,
            reason=generation.reason,
        )
        self._lookout = council.Lookout(
            self._generations, self._members, generation, clock=self._clock
        )
        ended = self._run_worker(selector, pipe, cache=generation.cache)
        self._lookout = None
        self._write_down(generation, ended)

    def _write_down(self, generation: Generation, ended: WorkerExit) -> None:
        call_off = self._call_off
        called_off = call_off is not None and ended.kind is not None
        if called_off and ended.kind is FaultKind.KILLED:
            ended = dataclasses.replace(
                ended, kind=FaultKind.PEER_LOST, evidence=call_off.reason
            )
        self._history.append(ended)
        # Where the job stops for who came back, nobody has asked it to end.
        down = Down(
            member=self._seat.name,
            ended=ended,
            called_off=called_off,
            stop_reason=self._stop_reason,
            preflight_done=self._preflight_done,
            time_secs=time.time(),
        )
        deadline = self._clock() + self._rules.lost_secs
        while self._clock() < deadline:
            try:
                self._generations.write_down(generation.number, down)
                return
            except OSError as error:
                self._tell(f"the end of the worker cannot be told: {error}")
                self._members.beat()
                time.sleep(1.0)

    def _end_in_time(self, worker: WorkerProcess) -> None:
        """Also where another member's worker is down, or a member has come back."""
        super()._end_in_time(worker)
        self._members.beat()
        if self._lookout is None:
            return
        with contextlib.suppress(OSError):
            call_off = self._lookout.look(worker.heard.last_step)
            if call_off is not None:
                self._take_call_off(call_off, worker)
            elif self._place.is_primary and worker.heard.reached_first_step:
                self._regroup(worker)

    def _take_call_off(self, call_off: council.CallOff, worker: WorkerProcess) -> None:
        if not call_off.at_once:
            self._kill_at = min(self._kill_at, self._clock() + self._grace_secs)
            return
        if self._call_off is None:
            self._call_off = call_off
            self._emit(
                "call_off",
                number=self._place.generation,
                member=call_off.member,
                reason=call_off.reason,
            )
        worker.kill()

    def _regroup(self, worker: WorkerProcess) -> None:
        """Stops the generation at a common step where somebody could be in the next."""
        number = self._place.generation
        assert self._lookout is not None
        returned = self._lookout.returned()
        if not returned or self._stop_reason or not self._signals:
            return
        if self._generations.ask_to_regroup(number, returned=returned):
            self._emit("regroup", number=number, returned=returned)
            self._kill_at = self._clock() + self._grace_secs
            worker.send_signal(self._signals[0])

    def _stop(self, reason: str) -> None:
        generation = self.generation
        if self._lookout is not None and generation is not None:
            with contextlib.suppress(OSError):
                # Its worker says that somebody has asked it; that was a member.
                if self._generations.returned(generation.number):
                    self._kill_at = min(self._kill_at, self._clock() + self._grace_secs)
                    return
        super()._stop(reason)

    def _stop_between(
        self, number: int, standing: council.Standing, *, is_in_it: bool
    ) -> End | None:
        """Somebody wants this member to stop while it has no worker."""
        if not is_in_it:
            return self._stopped()
        if not standing.busy:
            # Its own worker's end says so already where the request came before it.
            self._generations.write_end(number, self._stopped())
        return None

    def _stopped(self) -> End:
        return self._own_end(FaultKind.STOPPED, f"stopped by {self._stop_reason}")

    def _own_end(self, kind: FaultKind, text: str) -> End:
        """How the job ends for this member, whatever the others make of it."""
        return End(
            exit_code=int(EXIT_CODES[kind]),
            cause=str(kind),
            reason=text,
            evidence=text,
            member=self._seat.name,
            time_secs=time.time(),
        )

    def _tell_of_wait(self, names: Sequence[str]) -> None:
        if self._clock() < self._tell_at:
            return
        self._tell_at = self._clock() + _TELL_SECS
        others = [name for name in names if name != self._seat.name]
        self._emit("member_wait", absent=others)
        who = ", ".join(others) or "the job"
        self._tell(f"waiting for {who}, in {self._members.folder}")

    def _leave(self, end: End) -> Outcome:
        self.end = end
        last_step = max((worker.last_step for worker in self._history), default=-1)
        self._emit(
            "supervisor_end",
            exit_code=end.exit_code,
            reason=end.reason[:MAX_REASON_CHARS],
        )
        fault = None
        if end.cause != "finished":
            fault = Fault(
                kind=FaultKind(end.cause),
                step=end.step,
                evidence=end.evidence or end.reason,
            )
        return Outcome(
            exit_code=ExitCode(end.exit_code),
            reason=end.reason,
            verdict=end.verdict,
            step=max(last_step, end.step),
            committed_step=self._committed_step,
            num_restarts=self._attempt,
            lost_secs=self._lost_secs,
            preflight_done=self._preflight_done,
            fault=fault,
        )


def make_job_supervisor(
    make_argv: Callable[[Launch], Sequence[str]],
    elastic: ElasticConfig,
    *,
    launcher: Launcher,
    adapt: Callable[[int], object],
    lock: WorkdirLock,
    **more: Any,
) -> JobSupervisor:
    """The supervisor of the process that `launcher` says this is.

    Args:
        make_argv: command line of a worker for a `Launch`.
        elastic: how long to wait for whom.
        launcher: who this is.
        adapt: raises `ConfigError` where so many processes cannot run.
        lock: this member's.
        more: as for `Supervisor`.
    """

    def refuse(num_processes: int) -> str:
        try:
            adapt(num_processes)
        except ConfigError as error:
            return str(error)
        return ""

    name = council.member_name(launcher.process_index)
    return JobSupervisor(
        make_argv,
        seat=Seat(name=name, incarnation=uuid.uuid4().hex[:12]),
        workdir=lock.workdir,
        rules=JobRules(
            num_configured=launcher.num_processes,
            lost_secs=elastic.host_lost_secs,
            wait_secs=elastic.wait_secs,
            min_processes=elastic.min_processes,
        ),
        find_address=lambda: free_address(launcher.coordinator),
        refuse=refuse,
        lock=lock,
        **more,
    )
