"""The door to JAX's processes: how they find each other, wait, end and part.

World: device. Floor: below the eight rooms. Read `JobPlace` in `jaxft/records.py`
before this file and `jaxft/worker.py`, which opens the door, after it.

Outside of steps the processes of a job agree here, by notes that process 0 keeps: no
program of the devices, so that whoever waits can say for whom, and has a deadline.
Who ends by a fault of its own leaves a note first. JAX itself would tell the others
only by ending them, without a word.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

# The client of JAX's key-value store, through which processes talk outside of steps,
# has no public name; tests/parallel/test_distributed.py fails when it moves.
from jax._src import distributed as jax_distributed  # noqa: TID251

from jaxft.config import ConfigError, DistributedConfig
from jaxft.parallel import roll_call
from jaxft.records import (
    Emit,
    Fault,
    FaultError,
    FaultKind,
    JobPlace,
    fault_error,
    first_line,
    ignore_event,
)

# All processes end by these, at one border; whoever sees it first may be faster.
OF_ALL = (FaultKind.NONFINITE, FaultKind.SPIKE, FaultKind.SAVE_FAILED)

_FOLDER = "jaxft"
_POLL_SECS = 0.02
_LISTEN_SECS = 0.2
# Where somebody is dead it passes in vain, within the 3 s in which all must be down.
_LINGER_SECS = 2.0
_MAX_POLL_SECS = 0.5
# How long a wait is before it is told of, and then twice as long, and so on.
_TELL_SECS = 5.0
# What collectives raise when somebody is gone. JAX has no type of its own for it.
_RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
_OF_PEERS = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|broken pipe|coordination service|"
    r"timed out waiting|heartbeat|peer",
    re.IGNORECASE,
)
# Of these no storage speaks.
_OF_COLLECTIVES = re.compile(r"gloo|nccl|coordination service", re.IGNORECASE)


# The job of this process, once it has joined one.
_joined: list[Job] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerEnd:
    """What a process that ends by itself leaves for the others.

    Attributes:
        process: its index.
        kind: of its fault.
        text: one line.
        step: finished step attempts; -1 for none.
    """

    process: int
    kind: str
    text: str
    step: int = -1


class Job:
    """This process's connection to the others; alone, it waits for nobody.

    Args:
        place: which process of the job this is.
        emit: told of waits that are long.
        clock: seconds, never backwards.
        sleep: waits, in seconds.
    """

    def __init__(
        self,
        place: JobPlace,
        *,
        emit: Emit = ignore_event,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.place = place
        self._emit = emit
        self._clock = clock
        self._sleep = sleep
        self._is_joined = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_meetings: collections.Counter[str] = collections.Counter()

    def meet(self, what: str, *, deadline_secs: float) -> None:
        """Returns in all processes when the last one has called it.

        Args:
            what: it is for: `the first step`.
            deadline_secs: how long after this process the last one may come.

        Raises:
            FaultError: kind PEER_LOST: somebody has ended, or has not come in time;
                it names who.
        """
        if not self._is_joined:
            return
        number = self._num_meetings[what] = self._num_meetings[what] + 1
        folder = f"{_FOLDER}/meet/{what}/{number}/"
        began, told_secs = self._clock(), _TELL_SECS
        poll_secs = _POLL_SECS
        self._set(f"{folder}{self.place.process_index}", "here")
        while absent := self._absent(folder):
            if (end := self.first_end()) is not None:
                raise FaultError(lost_by(end, self.place))
            waited_secs = self._clock() - began
            if waited_secs >= deadline_secs:
                text = (
                    f"waited {waited_secs:.1f} s for all processes at {what}: "
                    f"{roll_call.words(absent)} did not come"
                )
                raise FaultError(
                    Fault(
                        kind=FaultKind.PEER_LOST,
                        process=self.place.process_index,
                        evidence=text,
                    )
                )
            if waited_secs >= told_secs:
                told_secs *= 2
                self._emit("peer_wait", what=what, absent=absent, secs=waited_secs)
            self._sleep(poll_secs)
            poll_secs = min(_MAX_POLL_SECS, poll_secs * 1.5)

    def tell_end(self, fault: Fault) -> None:
        """Leaves word for the others that this process ends; never fails.

        Whoever process 0 is would pull the others down before they have read it: it
        waits until they have left word, too.
        """
        if not self._is_joined:
            return
        lines = fault.evidence.strip().splitlines() or [str(fault.kind)]
        note = PeerEnd(
            process=self.place.process_index,
            kind=str(fault.kind),
            text=lines[-1].strip()[:300],
            step=fault.step,
        )
        # Where that fails process 0 is gone, and with it all that could be told.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key = f"{_FOLDER}/end/{self.place.process_index}"
            self._set(key, json.dumps(dataclasses.asdict(note)))
            deadline = self._clock() + _LINGER_SECS
            while self.place.is_primary and self._clock() < deadline:
                if len(self._get(f"{_FOLDER}/end/")) == self.place.num_processes:
                    break
                self._sleep(_POLL_SECS)

    def first_end(self) -> PeerEnd | None:
        """The process of lowest index, other than this one, that left word."""
        mine = f"{_FOLDER}/end/{self.place.process_index}"
        if not self._is_joined:
            return None
        for key, text in sorted(self._get(f"{_FOLDER}/end/")):
            if key != mine:
                return PeerEnd(**json.loads(text))
        return None

    def leave(self, deadline_secs: float) -> bool:
        """Parts from the others when all are at their end; False: one is not.

        Where process 0 leaves earlier it pulls the rest down with it.
        """
        if not self._is_joined:
            return True
        try:
            self.meet("the end", deadline_secs=deadline_secs)
        except (FaultError, jax.errors.JaxRuntimeError):
            return False
        self.stop_listening()
        jax.distributed.shutdown()
        return True

    def listen(self, on_end: Callable[[PeerEnd], None]) -> None:
        """From now on a thread calls `on_end` when another process leaves word."""
        if not self._is_joined:
            return

        def watch() -> None:
            while not self._over.wait(_LISTEN_SECS):
                try:
                    end = self.first_end()
                except jax.errors.JaxRuntimeError:
                    continue  # Process 0 is gone; or it is slow.
                if end is not None and not self._over.is_set():
                    on_end(end)
                    return

        self._thread = threading.Thread(target=watch, name="jaxft-peers", daemon=True)
        self._thread.start()

    def stop_listening(self) -> None:
        """Ends the thread."""
        self._over.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def explain(self, error: BaseException) -> Fault | None:
        """What an error is that another process is to blame for; None: it is not."""
        if not self._is_joined or isinstance(error, FaultError | ConfigError):
            return None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if (end := self.first_end()) is not None:
                return lost_by(end, self.place)
        text = first_line(error)
        if isinstance(error, _RUNTIME_ERRORS) and _OF_PEERS.search(str(error)):
            text = f"{self.place}: another process is gone, or late: {text}"
            return Fault(
                kind=FaultKind.PEER_LOST,
                process=self.place.process_index,
                evidence=text,
            )
        return None

    def _absent(self, folder: str) -> list[int]:
        here = {int(key.rpartition("/")[2]) for key, _ in self._get(folder)}
        return [i for i in range(self.place.num_processes) if i not in here]

    def _set(self, key: str, value: str) -> None:
        _client().key_value_set(key, value, allow_overwrite=True)

    def _get(self, folder: str) -> list[tuple[str, str]]:
        return _client().key_value_dir_get(folder)


def is_of_peers(error: BaseException) -> bool:
    """Whether a collective has failed, and no storage: somebody is gone, or late."""
    is_runtime = isinstance(error, _RUNTIME_ERRORS)
    return is_runtime and _OF_COLLECTIVES.search(str(error)) is not None


def lost_by(end: PeerEnd, place: JobPlace) -> Fault:
    """What the end of another process is for this one.

    A stop, the same fault where it is one of all of them, else a lost peer.
    """
    text = f"process {end.process} has ended ({end.kind}): {end.text}"
    process, kind = place.process_index, FaultKind.PEER_LOST
    if end.kind == FaultKind.STOPPED:
        kind = FaultKind.STOPPED
    elif end.kind in OF_ALL:
        process, kind, text = end.process, FaultKind(end.kind), end.text
    return Fault(kind=kind, step=end.step, process=process, evidence=text)


def connect(
    place: JobPlace,
    config: DistributedConfig | None = None,
    *,
    collective_secs: float,
    emit: Emit = ignore_event,
) -> Job:
    """Joins the job; before any device is touched. Alone, nothing happens.

    Args:
        place: which process of which job this is.
        config: how long to wait.
        collective_secs: on CPU a collective that takes longer fails; it must exceed
            any delay between processes that is no fault.
        emit: told of waits that are long.

    Raises:
        ConfigError: see `roll_call.hold`.
        FaultError: kind PEER_LOST: the others were not there in time.
    """
    config = config or DistributedConfig()
    job = Job(place, emit=emit)
    if place.num_processes == 1:
        return job

    began, tell_secs = time.monotonic(), _TELL_SECS

    def told(absent: list[int]) -> None:
        nonlocal tell_secs
        if (secs := time.monotonic() - began) >= tell_secs:
            tell_secs *= 2
            emit("peer_wait", what="the start", absent=absent, secs=secs)

    roll_call.hold(place, timeout_secs=config.start_secs, told=told)
    _bound_collectives(collective_secs)
    # It would take SIGTERM for itself; our stop requests go by the control word.
    jax.config.update("jax_enable_preemption_service", False)
    host, port = roll_call.address(place.coordinator)
    bind = f"127.0.0.1:{port}" if host.startswith(roll_call.LOOPBACK) else None
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_index,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(config.start_secs),
            heartbeat_timeout_seconds=math.ceil(config.heartbeat_secs),
            shutdown_timeout_seconds=math.ceil(config.leave_secs),
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:
        text = f"{place} could not join at {place.coordinator}: {first_line(error)}"
        raise fault_error(FaultKind.PEER_LOST, text) from error
    job._is_joined = True
    _joined.append(job)
    return job


def tell_wait(what: str, *, absent: list[int], secs: float) -> None:
    """Tells the history of a wait for others that is not one of a `Job`'s own."""
    for job in _joined[-1:]:
        job._emit("peer_wait", what=what, absent=absent, secs=secs)


def _bound_collectives(secs: float) -> None:
    """No survivor of a lost process waits for ever in a collective of the CPU.

    Other platforms have their own ways, and may not know the flag.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "collective_timeout" in flags or not _runs_on_cpu():
        return
    flag = f"--xla_cpu_collective_timeout_seconds={math.ceil(secs)}"
    os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _runs_on_cpu() -> bool:
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms:
        return platforms.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None


def _client() -> Any:
    client = jax_distributed.global_state.client
    if client is None:
        raise RuntimeError("this process has not joined its job, or has left it")
    return client
