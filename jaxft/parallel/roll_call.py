"""Before the processes of a job join it: is everybody there, and of the same job?

World: host-only. Floor: below the eight rooms. Read `JobPlace` in `jaxft/records.py`
before this file and `jaxft/parallel/distributed.py`, its one user, after it.

JAX's own way to join ends a process without a word when another one is absent, and
crashes where the port is taken. So all of them first meet here: process 0 listens
where JAX's service will, the others say who they are, and wait for its word. It tells
them every second who is still absent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from jaxft.config import ConfigError
from jaxft.records import Fault, FaultError, FaultKind, JobPlace

_TELL_SECS = 1.0
_RETRY_SECS = 0.05
_TALK_SECS = 2.0
LOOPBACK = ("127.", "localhost")

# Called with the indices of the absent processes, about once a second.
Told = Callable[[list[int]], None]


def hold(
    place: JobPlace,
    *,
    timeout_secs: float,
    told: Told = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns in all processes when the last one has come.

    Args:
        place: which process of which job this is.
        timeout_secs: how long after this process the last one may come.
        told: who is absent; process 0 knows, and the others as soon as they reach it.
        clock: seconds, never backwards.

    Raises:
        ConfigError: the address cannot be listened on, or somebody is no process of
            this job, or is there twice.
        FaultError: kind PEER_LOST: not all of them came in time; it names who.
    """
    call = _Call(place, deadline=clock() + timeout_secs, told=told, clock=clock)
    if place.is_primary:
        call.receive()
    else:
        call.report()


def address(coordinator: str) -> tuple[str, int]:
    """`host:port` in two parts.

    Raises:
        ConfigError: it is no such thing.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError("", f"--coordinator={coordinator} is not HOST:PORT")
    return host.strip("[]"), int(port)


class _Call:
    """One process's part of one roll call."""

    def __init__(
        self,
        place: JobPlace,
        *,
        deadline: float,
        told: Told,
        clock: Callable[[], float],
    ):
        self._place = place
        self._host, self._port = address(place.coordinator)
        self._deadline = deadline
        self._told = told
        self._clock = clock
        self._began = clock()
        self._told_at = self._began
        self._present: dict[int, socket.socket] = {}
        # Nobody but process 0 knows of the others, until it says so.
        self._absent = [0]

    def receive(self) -> None:
        """Process 0: waits for all others, then lets them go."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._listen())
            while self._count_absent():
                if self._is_late():
                    self._send(self._present, state="late", absent=self._absent)
                    raise self._lost()
                if select.select([server], [], [], 0.1)[0]:
                    connection, _ = server.accept()
                    self._greet(stack.enter_context(connection))
                if self._tell():
                    self._send(self._present, state="wait", absent=self._absent)
            self._send(self._present, state="go")
            for connection in self._present.values():
                # They close first: then nothing of this is left on the port.
                with contextlib.suppress(OSError):
                    connection.settimeout(_TALK_SECS)
                    connection.recv(1)

    def report(self) -> None:
        """Any other process: says who it is, and waits for process 0's word."""
        while True:
            try:
                if self._ask():
                    return
            except ConfigError:
                raise
            except (OSError, ValueError):
                pass
            self._absent = [0]  # It is not there yet, or not any more.
            if self._is_late():
                raise self._lost()
            self._tell()
            time.sleep(_RETRY_SECS)

    def _listen(self) -> socket.socket:
        where = "127.0.0.1" if self._host.startswith(LOOPBACK) else ""
        try:
            return socket.create_server((where, self._port), backlog=1024)
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                why = "somebody listens there already"
            text = f"--coordinator={self._place.coordinator} cannot be used: {why}"
            raise ConfigError("", text) from error

    def _greet(self, connection: socket.socket) -> None:
        """Takes in one that has come, or tells it why not."""
        connection.settimeout(_TALK_SECS)
        try:
            with connection.makefile("r") as lines:
                theirs = json.loads(lines.readline(4096))
            index = theirs.pop("process_index")
            mine = _job_of(self._place)
            why = ""
            if theirs != mine:
                told = ", ".join(f"{name} {value}" for name, value in mine.items())
                why = f"process 0 is of another job: {told}"
            elif index not in self._absent:
                why = f"process {index} is there already"
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return  # Nobody of ours.
        if why:
            self._send({index: connection}, state="refused", why=why)
        else:
            self._present[index] = connection

    def _ask(self) -> bool:
        """Whether process 0 said that all are there; False: it is to be asked again.

        Raises:
            ConfigError: it does not want this process.
            FaultError: not all have come in time.
            OSError: it is not there.
            ValueError: somebody else is.
        """
        timeout_secs = max(0.1, min(_TALK_SECS, self._deadline - self._clock()))
        target = (self._host, self._port)
        with socket.create_connection(target, timeout=timeout_secs) as connection:
            if connection.getsockname() == connection.getpeername():
                raise ConnectionError("it has met itself: nobody listens there")
            mine = _job_of(self._place) | {"process_index": self._place.process_index}
            connection.sendall(json.dumps(mine).encode() + b"\n")
            # It says something every second, as long as it is there.
            connection.settimeout(10.0 * _TELL_SECS)
            with connection.makefile("r") as lines:
                while line := lines.readline(1 << 20):
                    answer = json.loads(line)
                    if not isinstance(answer, dict) or "state" not in answer:
                        raise ValueError("somebody else listens there")
                    match answer["state"]:
                        case "go":
                            return True
                        case "refused":
                            raise ConfigError("", f"{self._place}: {answer['why']}")
                        case "late":
                            self._absent = answer["absent"]
                            raise self._lost()
                    self._absent = answer["absent"]
                    self._tell()
        return False

    def _count_absent(self) -> int:
        """Who has come and is still there, is not absent."""
        for index, connection in list(self._present.items()):
            readable, _, _ = select.select([connection], [], [], 0)
            if readable:  # It has nothing to say: it is gone.
                del self._present[index]
        others = range(1, self._place.num_processes)
        self._absent = [index for index in others if index not in self._present]
        return len(self._absent)

    def _is_late(self) -> bool:
        return self._clock() >= self._deadline

    def _tell(self) -> bool:
        """Tells who is absent, once a second; whether it was time."""
        if self._clock() < self._told_at + _TELL_SECS:
            return False
        self._told_at = self._clock()
        self._told(self._absent)
        return True

    def _lost(self) -> FaultError:
        secs = self._clock() - self._began
        text = (
            f"{self._place} waited {secs:.0f} s at {self._place.coordinator}: "
            f"{words(self._absent)} did not come"
        )
        kind, index = FaultKind.PEER_LOST, self._absent[0]
        return FaultError(Fault(kind=kind, process=index, evidence=text))

    @staticmethod
    def _send(to: dict[int, socket.socket], **answer: Any) -> None:
        for connection in to.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _job_of(place: JobPlace) -> dict[str, int]:
    return {"num_processes": place.num_processes, "generation": place.generation}


def words(processes: list[int]) -> str:
    """`process 1`, or `processes 1, 2`; of many the first ones."""
    noun = "process" if len(processes) == 1 else "processes"
    shown = ", ".join(map(str, processes[:20]))
    return f"{noun} {shown}{', ...' if len(processes) > 20 else ''}"
