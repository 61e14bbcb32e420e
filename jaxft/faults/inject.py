"""Makes the faults of a plan happen, for real, each once over all restarts.

World: host-only. Floor: faults. Read `jaxft/faults/plan.py` before this file,
`jaxft/faults/disk.py` beside it and `jaxft/loop.py`, which comes here at every step
border, after it.

A marker `<workdir>/faults/<n>.json` is on the disk, and the event `injected` is
written, before anything happens: a step that is repeated after a restart does not
meet the same fault again. Bad data is another matter, see `jaxft/faults/poison.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxft import durable
from jaxft.config import ConfigError
from jaxft.faults import disk
from jaxft.faults.plan import OF_BATCHES, PATH, Injected, PlannedFault
from jaxft.records import Emit, ignore_event

_LONG_SECS = 10**6
# Kinds with a moment of their own; all others happen at a border.
_ELSEWHERE = OF_BATCHES | {Injected.KILL_IN_SAVE, Injected.SLOW_DISK}


class InjectedError(RuntimeError):
    """What `raise` of a plan raises."""


class Injector:
    """The faults of one process of a run.

    Args:
        plan: see `jaxft.faults.plan.parse_plan`.
        workdir: the run's folder; markers go to `faults/` in it.
        root: the checkpoint root.
        committed: tells the committed steps, ascending, when no save is under way.
        acts: what needs a device: `flip_bit(state, leaf=, seed=)`, which gives the
            new state and what was changed, and `exhaust_memory()`.
        emit: told of each fault before it happens.
        process: index of this process.

    Raises:
        ConfigError: a fault of the plan has no place on this machine, or the workdir
            knows another plan.
    """

    def __init__(
        self,
        plan: Sequence[PlannedFault],
        *,
        workdir: str | os.PathLike[str],
        root: str,
        committed: Callable[[], Sequence[int]],
        acts: Mapping[str, Callable[..., Any]],
        emit: Emit = ignore_event,
        process: int = 0,
    ):
        self._folder = pathlib.Path(workdir, "faults")
        # Bad data is bad for all, and told by one: the first.
        self._plan = [f for f in plan if f.process == process]
        self._root = root
        self._committed = committed
        self._acts = acts
        self._emit = emit
        self._process = process
        self._doomed: PlannedFault | None = None
        self._is_full = False
        self._late: list[tuple[PlannedFault, int, int]] = []
        self._late_lock = threading.Lock()
        if any(f.kind is Injected.ENOSPC for f in plan):
            disk.check_scratch(self._folder, root)
        self._filler = self._folder / "filler"
        self._num_fired = {f.number: self._count_markers(f) for f in plan}
        self.free_disk()

    # --- where the loop comes by ----------------------------------------------

    def at_border(self, step: int, state: Any) -> Any:
        """All that is due after `step` finished attempts; the state to go on with.

        Raises:
            InjectedError: `raise` was due.
            Exception: what the device says when its memory is exhausted.
        """
        for fault in self._plan:
            if fault.kind not in _ELSEWHERE and self._is_due(fault, step):
                state = self._act(fault, step, state)
        return state

    def at_draw(self, step: int, batch_number: int) -> None:
        """A batch goes to the device for step `step`: tells if it is a bad one."""
        for fault in self._plan:
            if fault.kind in OF_BATCHES and fault.first <= batch_number <= fault.last:
                with self._late_lock:
                    self._late.append((fault, step, batch_number))
        self.tell_late()

    def tell_late(self) -> None:
        """Tells of bad batches, as soon as the disk takes it; from any thread."""
        with self._late_lock:
            while self._late and not self._is_full:
                fault, step, batch_number = self._late.pop(0)
                self._tell(fault, step, batch=batch_number)
                if not self._num_fired[fault.number]:
                    self._mark(fault, step)

    def before_save(self, step: int) -> None:
        """A save of `step` is about to begin."""
        for fault in self._plan:
            if fault.kind is Injected.KILL_IN_SAVE and self._is_due(fault, step):
                self._mark(fault, step)
                self._tell(fault, step)
                self._doomed = fault
                return

    def in_save(self) -> None:
        """The save is under way, in the background."""
        if self._doomed is not None:
            _kill()

    def write_rate(self, step: int) -> float:
        """Bytes a second that a save of `step` may write at most; 0 for no limit.

        Where no save falls into the range of a fault, the next one is slow.
        """
        for fault in self._plan:
            is_first = not self._num_fired[fault.number]
            is_due = fault.first <= step and (step <= fault.last or is_first)
            is_due = is_due and not self._is_full
            if fault.kind is Injected.SLOW_DISK and is_due:
                if is_first:
                    self._mark(fault, step)
                self._tell(fault, step)
                return fault.value
        return 0.0

    def hear(self, kind: str) -> None:
        """Hears each event of the run: the full disk is one until a save failed."""
        if kind == "save_failed":
            self.free_disk()

    def free_disk(self) -> None:
        """Gives back what `enospc` has taken."""
        with contextlib.suppress(OSError):
            self._filler.unlink(missing_ok=True)
            self._is_full = False

    # --- markers --------------------------------------------------------------

    def _is_due(self, fault: PlannedFault, step: int) -> bool:
        if step < fault.first or self._num_fired[fault.number] >= fault.times:
            return False
        if self._is_full:  # No marker could be written: first that has to be over.
            return False
        # With fewer there would be nothing to go on from, which is another test.
        needs_two = fault.kind is Injected.CORRUPT_NEWEST
        return not needs_two or len(self._committed()) >= 2

    def _marker(self, fault: PlannedFault, count: int) -> pathlib.Path:
        again = f"-{count + 1}" if count else ""
        return self._folder / f"{fault.number}{again}.json"

    def _count_markers(self, fault: PlannedFault) -> int:
        count = 0
        while True:
            path = self._marker(fault, count)
            try:
                said = json.loads(path.read_text())["fault"]
            except FileNotFoundError:
                return count
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(PATH, f"{path} cannot be read: {error}") from error
            if said != str(fault):
                problem = f"{path} says that fault {fault.number} was {said!r}, now it "
                raise ConfigError(
                    PATH, f"{problem}is {fault!s}: take the old plan or a new workdir"
                )
            count += 1

    def _mark(self, fault: PlannedFault, step: int) -> None:
        """Writes the marker, durably; it is there whole or not at all."""
        path = self._marker(fault, self._num_fired[fault.number])
        body = {"fault": str(fault), "number": fault.number, "step": step}
        body |= {"process": self._process, "time": time.time()}
        durable.make_folders(self._folder)
        durable.write_once(path, json.dumps(body).encode() + b"\n")
        self._num_fired[fault.number] += 1

    def _tell(self, fault: PlannedFault, step: int, **more: Any) -> None:
        self._emit(
            "injected",
            number=fault.number,
            fault=str(fault.kind),
            plan=str(fault),
            step=step,
            process=self._process,
            **more,
        )

    # --- acts -----------------------------------------------------------------

    def _act(self, fault: PlannedFault, step: int, state: Any) -> Any:
        self._mark(fault, step)
        match fault.kind:
            case Injected.BITFLIP:
                seed = f"{fault.number} {step}"
                state, where = self._acts["flip_bit"](state, leaf=fault.leaf, seed=seed)
                self._tell(fault, step, where=where)
            case Injected.CORRUPT_NEWEST:
                newest = self._committed()[-1]
                folder = pathlib.Path(self._root, str(newest))
                path, offset = disk.choose_byte(folder, seed=fault.number)
                self._tell(fault, step, path=str(path), offset=offset)
                disk.flip_byte(path, offset)
                _kill()
            case kind:
                self._tell(fault, step)
                self._harm(kind, fault)
        return state

    def _harm(self, kind: Injected, fault: PlannedFault) -> None:
        match kind:
            case Injected.KILL:
                _kill()
            case Injected.HANG:
                hang()
            case Injected.HANG_GIL:
                hang_with_interpreter_lock()
            case Injected.SIGTERM:
                _ask_to_stop(fault.grace_secs)
            case Injected.ENOSPC:
                self._is_full = True
                disk.fill(self._filler)
            case Injected.OOM:
                self._acts["exhaust_memory"]()
            case Injected.RAISE:
                raise InjectedError(f"{PATH}: {fault!s}")


def hang() -> NoReturn:
    """Sleeps in this thread for ever; others go on."""
    while True:
        time.sleep(_LONG_SECS)


def hang_with_interpreter_lock() -> NoReturn:
    """Sleeps for ever in C, with the interpreter's lock held: no thread goes on."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(_LONG_SECS)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _ask_to_stop(grace_secs: float) -> None:
    """As a scheduler does: SIGTERM, and when the time is over SIGKILL."""
    if grace_secs > 0:
        timer = threading.Timer(grace_secs, _kill)
        timer.daemon = True
        timer.start()
    os.kill(os.getpid(), signal.SIGTERM)
