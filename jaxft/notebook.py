"""A run inside a notebook, or any other process that is not the run's own.

World: device. Floor: beside `main`, above `worker`, whose life is lived here. Read
`jaxft/worker.py` before this file.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from typing import Any

from jaxft import config as configs
from jaxft import settings
from jaxft.config import Config
from jaxft.events import EventLog
from jaxft.faults.preemption import StopRequests
from jaxft.faults.watchdog import Answer, PhaseBoard, Watchdog
from jaxft.limits import TimeLimits, read_learnt, write_learnt
from jaxft.metrics.report import Summary
from jaxft.metrics.writers import say
from jaxft.recovery.workdir import WorkdirLock
from jaxft.types import TrainState
from jaxft.worker import Worker


def run(config: Config, *, workdir: str | os.PathLike[str]) -> TrainState:
    """Trains in this process, as in a notebook, and returns the last state.

    The same call goes on where an earlier one stopped. An interrupt (the notebook's
    stop button) saves and returns the state of that moment.

    Args:
        config: the run; a copy of it is resolved and locked.
        workdir: where checkpoints and events go.

    Raises:
        ConfigError: something cannot work; nothing was written.
        FaultError: the workdir is in use, or the run could not go on.
    """
    config = settings.lock(configs.resolve(copy.deepcopy(config)))
    TimeLimits.of(config)
    board = PhaseBoard()
    with WorkdirLock.acquire(workdir) as lock:
        summary = Summary()
        log = EventLog(lock.workdir / "events", role="notebook", tee=summary.take_line)
        with StopRequests(config.preemption, emit=log) as stops:
            worker = Worker(
                config, workdir=lock.workdir, log=log, stops=stops, board=board
            )
            try:
                with _watched(worker, config, log=log, board=board):
                    state, ending = worker.live()
            finally:
                if not worker.entered:
                    lock.release(undo=True)
        text = summary.text(workdir=lock.workdir, reason=ending, history=log.problem)
        say(text, stream=sys.stdout)
    return state


def _watched(
    worker: Worker, config: Config, *, log: EventLog, board: PhaseBoard
) -> contextlib.AbstractContextManager[object]:
    """A watchdog that tells of a hang, and ends the process only if it shall."""
    if not config.hang.enabled:
        return contextlib.nullcontext()
    workdir = log.path.parent.parent

    def keep(learnt: dict[str, Any]) -> None:
        if worker.entered:
            write_learnt(workdir, learnt)

    return Watchdog(
        log.path.parent,
        limits=TimeLimits.of(config),
        learnt=read_learnt(workdir),
        answer=Answer.EXIT if config.hang.end_notebook else Answer.REPORT,
        board=board,
        emit=worker.tell,
        keep=keep,
    )
