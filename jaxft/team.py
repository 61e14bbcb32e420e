"""One worker among those of its job: joins, meets, hears of their end, leaves.

World: device. Floor: beside `loop`, below `worker`, its one user. Read
`jaxft/parallel/distributed.py` before this file and `jaxft/worker.py` after it.

Within steps the control word says what all do. Everywhere else one process can end
alone: by a fault of its own, or by a stop before there is anything to save. It leaves
word first, and the others then end as well, soon and with its name: what they wait for
will not come. A process that was killed leaves none, and is noticed by the next
collective; whoever watches from outside is faster.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from jaxft.config import Config
from jaxft.faults.exceptions import fault_of
from jaxft.faults.preemption import StopRequests
from jaxft.faults.watchdog import PhaseBoard
from jaxft.limits import LearntTimes, TimeLimits
from jaxft.parallel import distributed
from jaxft.records import Emit, Fault, FaultKind, JobPlace, Phase

# What a process has to end by itself when another one has.
REACT_SECS = 1.0


class Team:
    """The processes of one job, as one of them sees them; alone it does nothing.

    Args:
        place: which of them this is.
        config: of the run.
        stops: requests to stop.
        emit: the run's history.
        board: where a watchdog sees what the main thread is at.
        end: ends this process with a fault, from any thread.
    """

    def __init__(
        self,
        place: JobPlace,
        config: Config,
        *,
        stops: StopRequests,
        emit: Emit,
        board: PhaseBoard,
        end: Callable[[Fault], NoReturn] | None,
    ):
        self._place = place
        self._config = config
        self._stops = stops
        self._emit = emit
        self._board = board
        self._end = end
        self._job = distributed.Job(place)
        self._ends_once = threading.Lock()

    def join(self) -> None:
        """Joins the job, before any device is touched.

        Raises:
            ConfigError: they cannot meet at that address.
            FaultError: kind PEER_LOST: somebody was not there in time.
        """
        limits = TimeLimits.of(self._config)
        self._job = distributed.connect(
            self._place,
            self._config.distributed,
            collective_secs=limits.collective_secs,
            emit=self._emit,
        )
        self._job.listen(self._hear_end)

    def meet(self) -> None:
        """Nobody steps before all can: a first collective waits for 30 s at most.

        Raises:
            FaultError: kind PEER_LOST: somebody did not come.
        """
        limit_secs = TimeLimits.of(self._config).first_secs
        with self._board.waiting(for_peers=True):
            self._job.meet("the first step", deadline_secs=limit_secs)

    def fault_of(self, error: BaseException, *, step: int) -> Fault:
        """What `error` is; where another process is to blame, that."""
        fault = self._job.explain(error) or fault_of(error, step=step)
        if fault.kind is FaultKind.PEER_LOST:
            return dataclasses.replace(fault, step=step)
        if fault.process or fault.kind is FaultKind.SAVE_FAILED:
            return fault
        return dataclasses.replace(fault, process=self._place.process_index)

    def ends_alone(self, fault: Fault) -> bool:
        """Whether the others may not end at the same border by themselves."""
        return self._place.num_processes > 1 and fault.kind not in distributed.OF_ALL

    def begin_end(self) -> None:
        """From here on the main thread ends the process, and nobody else does."""
        self._ends_once.acquire()

    def tell_end(self, fault: Fault) -> None:
        """Leaves word for the others, when all else is written."""
        self._job.tell_end(fault)

    def leave(self) -> None:
        """Parts from the others, at a good end."""
        if self._stops.urgent:
            # Not agreed with anybody: the others learn of it by this.
            text = f"stopped by {self._stops.poll()}, at once"
            self.tell_end(Fault(kind=FaultKind.STOPPED, evidence=text))
            return
        secs = self._config.distributed.leave_secs
        if self._config.checkpoint.mirror:
            limits = TimeLimits.of(self._config)
            secs = max(secs, limits.limit_secs(Phase.MIRROR, LearntTimes()))
        with self._board.waiting(for_peers=True):
            self._job.leave(secs)

    def _hear_end(self, end: distributed.PeerEnd) -> None:
        """In a thread: another process has ended."""
        fault = distributed.lost_by(end, self._place)
        if fault.kind is FaultKind.STOPPED:
            self._stops.request(f"the end of process {end.process}")
        time.sleep(REACT_SECS)  # The main thread may have noticed.
        if self._end is None or not self._ends_once.acquire(blocking=False):
            return
        self._emit("fault", **fault.event())
        self._job.tell_end(fault)
        self._end(fault)
