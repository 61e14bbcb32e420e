"""The command: `python -m jaxft.main --config=... --workdir=...`.

World: host-only until a role needs more. Floor: the top. Read `configs/tiny_lm.py`
before and `jaxft/worker.py` or `jaxft/recovery/supervisor.py` after this file.

`--role=supervise` (the default) never imports jax: it starts a worker, this same
command with `--role=work`, and outlives it. `--role=work` by hand runs without a
supervisor. Exit codes are those of `jaxft.records.ExitCode`.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from jaxft import config as configs
from jaxft.command import USAGE, Command, parse
from jaxft.config import ConfigError
from jaxft.events import EventLog, read_events
from jaxft.faults.preemption import StopRequests, parse_signals
from jaxft.metrics.report import closing_summary
from jaxft.records import ExitCode, FaultError
from jaxft.recovery.supervisor import Launch, Outcome, Supervisor
from jaxft.recovery.workdir import WorkdirLock
from jaxft.recovery.worker_link import SupervisorLink


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    if any(word in ("--help", "-h", "--helpfull") for word in argv[1:]):
        sys.stdout.write(USAGE)
        return ExitCode.FINISHED
    # Factories of the user's own are looked up from where the command was given.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        command = parse(argv)
        configs.lock(configs.resolve(command.config))
        parse_signals(command.config.preemption.signals)
        return work(command) if command.role == "work" else supervise(command)
    except ConfigError as error:
        return _refuse(str(error), ExitCode.CONFIG)
    except FaultError as error:
        return _refuse(str(error), error.fault.exit_code)


def supervise(command: Command) -> int:
    """Starts the worker and restarts it; prints the summary."""
    if "jax" in sys.modules:
        _say("warning: the config file imports jax; the supervisor should not need it")
    started = time.time()
    config = command.config
    with WorkdirLock.acquire(command.workdir) as lock:
        folder = lock.workdir / "events"

        def make_argv(launch: Launch) -> list[str]:
            return [
                *(sys.executable, "-m", "jaxft.main", *command.argv[1:], "--role=work"),
                f"--attempt={launch.attempt}",
                f"--event_fd={launch.event_fd}",
                f"--parent_fd={launch.parent_fd}",
                f"--lock_fd={launch.lock_fd}",
                f"--compile_cache={launch.cache}",
                f"--start_secs={started}",
            ]

        log = EventLog(folder, role="supervise")
        outcome = Supervisor(
            make_argv,
            config=config.supervisor,
            signals=parse_signals(config.preemption.signals),
            grace_secs=config.preemption.grace_secs,
            emit=log,
            lock_fd=lock.fileno(),
        ).run()
        if not outcome.preflight_done:
            lock.release(undo=True)
            return _refuse(_first_line(outcome), outcome.exit_code)
        if outcome.fault is not None and outcome.exit_code != ExitCode.STOPPED:
            _say(_evidence(outcome))
        _summarize(lock.workdir, since=started, reason=_ending(outcome))
    return outcome.exit_code


def work(command: Command) -> int:
    """One worker, under a supervisor or alone."""
    link = None
    if command.event_fd >= 0:
        link = SupervisorLink(
            command.event_fd, command.parent_fd, lock_fd=command.lock_fd
        )
    if link is None:
        with WorkdirLock.acquire(command.workdir) as lock:
            started = time.time()
            code, entered = _live(command, lock.workdir, link=None)
            if not entered:
                lock.release(undo=True)
            else:
                _summarize(lock.workdir, since=started, reason=code.name.lower())
        return code
    workdir = pathlib.Path(command.workdir).expanduser().absolute()
    code, _ = _live(command, workdir, link=link)
    link.close()
    return code


def _live(
    command: Command, workdir: pathlib.Path, *, link: SupervisorLink | None
) -> tuple[ExitCode, bool]:
    """Runs a worker; its exit code, and whether it wrote to the workdir."""
    log = EventLog(workdir / "events", role="work", tee=link.send if link else None)

    def leave(reason: str) -> NoReturn:
        """Nothing is worth saving here: the newest committed step stands."""
        log("end", step=-1, reason=f"stopped by {reason}")
        if link is not None:
            link.close()
        os._exit(ExitCode.STOPPED)

    stops = StopRequests(
        command.config.preemption,
        emit=log,
        start_secs=command.start_secs or None,
        leave=leave,
    )
    with stops:
        with stops.may_leave():
            # The imports take seconds; a request must not wait for them.
            from jaxft.loop import Ending
            from jaxft.worker import Worker
        worker = Worker(
            command.config,
            workdir=workdir,
            log=log,
            stops=stops,
            attempt=command.attempt,
            cache=command.compile_cache,
        )
        try:
            _, ending = worker.live()
        except ConfigError as error:
            code = ExitCode.CONFIG
            if link is None:
                _say(str(error))
        except FaultError as error:
            code = error.fault.exit_code
            if link is None:
                _say(str(error))
        else:
            stopped = ending is Ending.STOPPED
            code = ExitCode.STOPPED if stopped else ExitCode.FINISHED
    return code, worker.entered


def _refuse(problem: str, code: int) -> int:
    _say(problem)
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"jaxft: {text}\n")


def _first_line(outcome: Outcome) -> str:
    return outcome.reason.splitlines()[0] if outcome.reason else "stopped"


def _evidence(outcome: Outcome) -> str:
    fault = outcome.fault
    return fault.evidence.rstrip() if fault is not None else ""


def _ending(outcome: Outcome) -> str:
    if outcome.exit_code == ExitCode.FINISHED:
        return "finished"
    code = f"exit {int(outcome.exit_code)}"
    if outcome.exit_code == ExitCode.STOPPED:
        return f"{outcome.reason}; the same command goes on from here ({code})"
    return f"{outcome.reason} ({code})"


def _summarize(workdir: pathlib.Path, *, since: float, reason: str) -> None:
    events = read_events(workdir / "events")
    events = [event for event in events if event["time"] >= since]
    sys.stdout.write(closing_summary(events, workdir=workdir, reason=reason) + "\n")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a background thread that still sits in C++ code (storage that never
    # answers) would abort the interpreter's end, and so change the exit code.
    os._exit(status)
