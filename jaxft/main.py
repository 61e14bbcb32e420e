"""The command: `python -m jaxft.main --config=... --workdir=...`.

World: host-only until a role needs more. Floor: the top. Read `configs/tiny_lm.py`
before and `jaxft/worker.py` or `jaxft/recovery/supervisor.py` after this file.

`--role=supervise` (the default) never imports jax: it starts a worker, this command
with `--role=work`, and outlives it. Exit codes are those of `jaxft.records.ExitCode`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import pickle
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

if __name__ == "__main__":
    # Where one is closed, the next file that is opened would take its place.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)

    def _leave_at_once(number: int, _: object) -> NoReturn:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            os.write(2, f"jaxft: stopped by {name} before it began\n".encode())
        os._exit(75)  # ExitCode.STOPPED, which is not imported yet.

    # The imports take moments, too, and a stop there is no error of theirs. Where a
    # supervisor started us it is blocked until somebody listens; where it is ignored
    # (a job in the background) it stays ignored.
    for early in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(early) is not signal.SIG_IGN:
            signal.signal(early, _leave_at_once)

from jaxft import compile_only, settings
from jaxft import config as configs
from jaxft.checkpoint.host_memory import available_bytes
from jaxft.choices import Spare
from jaxft.command import USAGE, Command, parse
from jaxft.config import Config, ConfigError
from jaxft.endings import ending_of, evidence_of, refusal, stop_fault
from jaxft.events import Event, EventLog, parse_line
from jaxft.faults.exceptions import fault_of
from jaxft.faults.preemption import StopRequests, interrupt, parse_signals
from jaxft.faults.watchdog import PhaseBoard, Tell, Watchdog
from jaxft.goodput.account import Account
from jaxft.limits import LearntTimes, TimeLimits, read_learnt, write_learnt
from jaxft.metrics import writers
from jaxft.metrics.report import Summary
from jaxft.records import ALONE, ExitCode, Fault, FaultError, FaultKind, JobPlace
from jaxft.recovery.council import member_name
from jaxft.recovery.elastic import adapt, shape
from jaxft.recovery.job_lock import JobLock
from jaxft.recovery.job_supervisor import make_job_supervisor
from jaxft.recovery.launchers import Launcher, find_launcher, is_local_job
from jaxft.recovery.local_job import run_members
from jaxft.recovery.spare import SpareWorker, Waiting
from jaxft.recovery.supervisor import Launch, Supervisor
from jaxft.recovery.workdir import WorkdirLock, absolute, give_back_all
from jaxft.recovery.worker_link import SupervisorLink

# A supervisor's last word to its worker: the descriptor that it finds the rest in.
_HANDED_OVER = "--handed_over="
# To one in waiting: the socket that it waits at.
_STAND_BY = "--stand_by="
# What the host must have left for one in waiting, which takes a tenth of it.
_SPARE_ROOM_BYTES = 2 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    if any(word in ("--help", "-h", "--helpfull") for word in argv[1:]):
        writers.say(USAGE.rstrip("\n"), stream=sys.stdout)
        return ExitCode.FINISHED
    try:
        if (fd := argv[-1].removeprefix(_HANDED_OVER)).isdigit():
            return _work_for_supervisor(int(fd))
        if (fd := argv[-1].removeprefix(_STAND_BY)).isdigit():
            return _stand_by(int(fd))
        _find_factories_here()
        command = parse(argv)
        settings.lock(configs.resolve(command.config))
        parse_signals(command.config.preemption.signals)
        TimeLimits.of(command.config)
        if command.role == "supervise" and is_local_job(os.environ, **_flags(command)):
            return run_members(
                command.argv[1:],
                num_processes=command.num_processes or 1,
                config=command.config,
                signals=parse_signals(command.config.preemption.signals),
                write=_say_of_member,
            )
        if command.role == "compile":
            return compile_for(command)
        launcher = find_launcher(os.environ, **_flags(command))
        if command.role == "work":
            return work(command, launcher=launcher)
        return supervise(command, launcher=launcher)
    except ConfigError as error:
        return _refuse(str(error), ExitCode.CONFIG)
    except FaultError as error:
        return _refuse(str(error), error.fault.exit_code)
    except KeyboardInterrupt as error:
        # Outside of what listens: while it parses, waits for the lock, or at the end.
        give_back_all()
        return _refuse(f"stopped by {error or 'SIGINT'}", ExitCode.STOPPED)


def _find_factories_here() -> None:
    """Factories of the user's own are looked up from where the command was given."""
    try:
        folder = os.getcwd()
    except OSError as error:
        problem = f"the current folder is gone ({error.strerror}): cd to another one"
        raise ConfigError("", problem) from error
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _flags(command: Command) -> dict[str, Any]:
    """What the command line says of which process this is."""
    return {
        "num_processes": command.num_processes,
        "process_index": command.process_index,
        "coordinator": command.coordinator,
    }


def supervise(command: Command, *, launcher: Launcher) -> int:
    """Starts the worker and restarts it; prints the summary."""
    if "jax" in sys.modules:
        _say(
            "warning: the config file imports jax: what it sets there reaches no worker"
        )
    started = time.time()
    config = command.config
    summary, account = Summary(), Account()

    def hear(event: Event) -> None:
        summary.take(event)
        account.hear(event)

    def adapted(num_processes: int) -> Config:
        """The config where so many of the job's processes are there."""
        full = launcher.num_processes
        return adapt(config, num_processes=num_processes, num_configured=full)

    def hear_own(line: str) -> None:
        if (event := parse_line(line)) is not None:
            hear(event)

    with (
        _lock(command, launcher) as lock,
        os.fdopen(os.memfd_create("jaxft-worker"), "wb", buffering=0) as memory,
    ):

        def make_argv(launch: Launch) -> list[str]:
            memory.truncate(0)
            here = launch.place.num_processes
            fitting = adapted(here)
            told = dataclasses.replace(command, config=fitting, process_index=index)
            if here < launcher.num_processes:
                log("elastic", **shape(fitting, here, of=launcher.num_processes))
            state = pickle.dumps((sys.path, told, launch, started))
            os.pwrite(memory.fileno(), state, 0)
            # The words from before are for who reads a list of processes.
            words = [*command.argv[1:], "--role=work", f"--attempt={launch.attempt}"]
            handed_over = f"{_HANDED_OVER}{memory.fileno()}"
            return [sys.executable, "-m", "jaxft.main", *words, handed_over]

        index, folder = launcher.index_of_several, lock.workdir / "events"
        log = EventLog(folder, role="supervise", process_index=index, tee=hear_own)
        log("launcher", **launcher.event())
        signals = parse_signals(config.preemption.signals)
        options: dict[str, Any] = {
            "config": config.supervisor,
            "signals": signals,
            "grace_secs": config.preemption.grace_secs,
            "emit": log,
            "lock": lock,
            "more_fds": [memory.fileno()],
            "hear": hear,
            "tell": _say,
            "limits": TimeLimits.of(config) if config.hang.enabled else None,
            "spare": _make_spare(command, signals=signals, emit=log),
        }
        if launcher.num_processes > 1:
            supervisor = make_job_supervisor(
                make_argv, config.elastic, launcher=launcher, adapt=adapted, **options
            )
        else:
            supervisor = Supervisor(make_argv, **options)
        outcome = supervisor.run()
        if not supervisor.speaks:
            lock.release(undo=not outcome.preflight_done)
            return outcome.exit_code
        if not outcome.preflight_done:
            lock.release(undo=True)
            return _refuse(refusal(outcome), outcome.exit_code)
        _tell_evidence(outcome.fault)
        ending = ending_of(
            outcome.fault, reason=outcome.reason, verdict=outcome.verdict
        )
        _conclude(
            summary, log=log, workdir=lock.workdir, ending=ending, account=account
        )
    return outcome.exit_code


def _lock(command: Command, launcher: Launcher) -> WorkdirLock:
    """The right to write into the workdir, alone or with the others of the job."""
    if launcher.num_processes == 1:
        return WorkdirLock.acquire(command.workdir)
    member = member_name(launcher.process_index)
    return JobLock.join(command.workdir, job=launcher.identity, member=member)


def compile_for(command: Command) -> int:
    """Compiles the run for a target, keeps its plan in the workdir; runs nothing."""
    with WorkdirLock.acquire(command.workdir) as lock:
        found = compile_only.compile_run(command.config, command.target, lock.workdir)
    writers.say(found, stream=sys.stdout)
    return ExitCode.FINISHED


def _make_spare(command: Command, **options: Any) -> SpareWorker | None:
    """What waits to be the next worker, if the config wants one."""
    when = command.config.supervisor.spare
    if when is Spare.NEVER or not command.config.supervisor.max_restarts:
        return None

    def make_argv(fd: int) -> list[str]:
        # The zeros leave room for the longer words of a worker.
        words = [*command.argv[1:], "--role=spare", f"{_STAND_BY}{fd:024d}"]
        return [sys.executable, "-m", "jaxft.main", *words]

    def has_room() -> bool:
        free = available_bytes()
        return when is Spare.ALWAYS or free is None or free >= _SPARE_ROOM_BYTES

    return SpareWorker(make_argv, has_room=has_room, **options)


def _stand_by(fd: int) -> int:
    """A worker that has its imports done before it is launched."""
    waiting = Waiting(fd)
    import jaxft.worker  # noqa: F401

    argv, fds = waiting.launch()
    sys.argv[1:] = argv[3:]
    return _work_for_supervisor(int(argv[-1].removeprefix(_HANDED_OVER)), fds=fds)


def _work_for_supervisor(fd: int, *, fds: Mapping[int, int] | None = None) -> int:
    """One worker; its config is its supervisor's, whatever became of the file.

    `fds` has the numbers of descriptors here where the supervisor knows them by others.
    """
    fd = fds[fd] if fds else fd
    with os.fdopen(fd, "rb") as memory:
        # By its place: the offset is shared with whoever read it before.
        state = os.pread(fd, os.fstat(memory.fileno()).st_size, 0)
    sys.path[:], command, launch, started = pickle.loads(state)
    launch = launch.renumbered(fds) if fds else launch
    link = SupervisorLink(
        launch.event_fd,
        launch.parent_fd,
        lock_fds=launch.lock_fds,
        stacks_fd=launch.stacks_fd,
    )
    learnt = LearntTimes.from_json(launch.learnt)
    learnt.alarms.update(launch.alarms)
    log = EventLog(
        absolute(command.workdir) / "events",
        role="work",
        process_index=command.process_index,
        tee=link.send,
    )

    def close(*_: object) -> None:
        if log.problem:  # The supervisor's own history may be whole.
            _say(f"history incomplete: {log.problem}")
        link.close()

    return _live(
        command,
        log,
        attempt=launch.attempt,
        cache=launch.cache,
        committed_step=launch.committed_step,
        start_secs=started,
        close=close,
        learnt=learnt,
        keep=link.tell_learnt,
        tell=link.beat,
        place=launch.place,
    )


def work(command: Command, *, launcher: Launcher) -> int:
    """One worker without a supervisor; prints the summary.

    Of several the primary one has the workdir's lock, and the summary.
    """
    summary, place = Summary(), launcher.place
    with contextlib.ExitStack() as stack:
        workdir, lock = absolute(command.workdir), None
        if place.is_primary:
            lock = stack.enter_context(WorkdirLock.acquire(command.workdir))
        log = EventLog(
            workdir / "events",
            role="work",
            process_index=launcher.index_of_several,
            tee=summary.take_line,
        )
        log("launcher", **launcher.event())

        def close(fault: Fault | None, entered: bool) -> None:
            if lock is not None and not entered:
                lock.release(undo=True)
            if not entered:
                _say(evidence_of(fault))
                return
            _tell_evidence(fault)
            ending = ending_of(fault, reason=evidence_of(fault))
            if place.is_primary:
                _conclude(summary, log=log, workdir=workdir, ending=ending)

        return _live(
            command,
            log,
            close=close,
            learnt=read_learnt(workdir),
            keep=lambda learnt: write_learnt(workdir, learnt) if lock else None,
            place=place,
        )


def _live(
    command: Command,
    log: EventLog,
    *,
    attempt: int = 0,
    cache: str = "keep",
    committed_step: int = -1,
    start_secs: float | None = None,
    close: Callable[[Fault | None, bool], None],
    learnt: LearntTimes,
    keep: Callable[[dict[str, Any]], None],
    tell: Tell | None = None,
    place: JobPlace = ALONE,
) -> ExitCode:
    """Runs a worker; `close` is told how it ended and whether it wrote anything."""
    entered, tell_end, board = lambda: False, lambda _: None, PhaseBoard()
    watchdog = contextlib.nullcontext()
    if command.config.hang.enabled:
        watchdog = Watchdog(
            log.path.parent,
            limits=TimeLimits.of(command.config),
            learnt=learnt,
            board=board,
            emit=log,
            tell=tell,
            keep=lambda learnt: keep(learnt) if entered() else None,
            on_end=lambda fault: close(fault, entered()),
        )

    def leave(reason: str) -> NoReturn:
        """Nothing is worth saving here: the newest committed step stands."""
        log("end", step=-1, reason=f"stopped by {reason}")
        fault = stop_fault(reason)
        tell_end(fault)
        end(fault)

    def end(fault: Fault) -> NoReturn:
        close(fault, entered())
        _flush()
        os._exit(fault.exit_code)

    stops = StopRequests(
        command.config.preemption,
        emit=log,
        start_secs=start_secs,
        leave=leave,
    )
    fault = None
    with stops:
        try:
            with watchdog:
                with stops.may_leave():
                    # The imports take seconds; a request must not wait for them.
                    from jaxft.loop import Ending
                    from jaxft.worker import Worker
                worker = Worker(
                    command.config,
                    workdir=log.path.parent.parent,
                    log=log,
                    stops=stops,
                    attempt=attempt,
                    cache=cache,
                    committed_step=committed_step,
                    board=board,
                    place=place,
                    end=end,
                )
                entered, tell_end = lambda: worker.entered, worker.team.tell_end
                _, ending = worker.live()
            if ending is Ending.STOPPED:
                fault = stop_fault(str(stops.poll()))
        except (ConfigError, FaultError) as error:
            fault = fault_of(error)  # The worker has said so already.
        except KeyboardInterrupt as error:  # It is none of the signals that save.
            fault = stop_fault(str(error) or "SIGINT")
        except BaseException as error:  # What ends a process ends the run as a fault.
            fault = fault_of(error)
            log("fault", **fault.event())
        close(fault, entered())
    return ExitCode.FINISHED if fault is None else fault.exit_code


def _tell_evidence(fault: Fault | None) -> None:
    if fault is not None and fault.kind is not FaultKind.STOPPED:
        _say(evidence_of(fault))


def _conclude(
    summary: Summary,
    *,
    log: EventLog,
    workdir: pathlib.Path,
    ending: str,
    account: Account | None = None,
) -> None:
    """Prints the summary; whatever happens here, the run has ended as it has."""
    try:
        text = summary.text(
            workdir=workdir,
            reason=ending,
            history=log.problem,
            goodput=_goodput(account, workdir) if account else "",
        )
        writers.say(text, stream=sys.stdout)
    except (Exception, KeyboardInterrupt) as error:
        _say(f"{ending}; no summary: {error!r}")


def _goodput(account: Account, workdir: pathlib.Path) -> str:
    """What part of this command's time went into steps, and who knows the rest."""
    share, secs = account.ledger.goodput, account.ledger.wall_secs
    where = shlex.quote(str(workdir))
    return f"{100 * share:.1f} % of {secs:.0f} s; python -m jaxft.cli report {where}"


def _refuse(problem: str, code: int) -> int:
    _say(problem)
    return code


def _say(text: str) -> None:
    writers.say(f"jaxft: {text}", stream=sys.stderr)


def _say_of_member(index: int, line: str, is_error: bool) -> None:
    writers.say(f"[{index}] {line}", stream=sys.stderr if is_error else sys.stdout)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads it any more, or nobody ever did.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _on_early_signals(handler: Any) -> None:
    """For all that happens outside of what listens to `preemption.signals`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


if __name__ == "__main__":
    writers.tolerate_lost_output()
    _on_early_signals(interrupt)
    status = main()
    _on_early_signals(signal.SIG_IGN)
    _flush()
    # Not sys.exit: a background thread that still sits in C++ code (storage that never
    # answers) would abort the interpreter's end, and so change the exit code.
    os._exit(status)
