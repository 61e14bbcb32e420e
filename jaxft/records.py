"""Plain values that cross the house: faults, exit codes, checkpoint facts.

World: host-only. Floor: the lowest, beside `config`. Read `jaxft/events.py` next.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import Any, Protocol

from absl import logging

# A list in brackets that does not end where its line does.
_CUT_OFF = re.compile(r"(?<=\S)\s*\[[^\]]*\Z")


class ExitCode(enum.IntEnum):
    """Final exit codes of the command; after `STOPPED` the same command goes on."""

    FINISHED = 0
    NONFINITE = 65
    NO_CHECKPOINT = 66
    PEER_LOST = 69
    CRASHED = 70
    HUNG = 71
    WORKDIR_IN_USE = 73
    SAVE_FAILED = 74
    STOPPED = 75
    OUT_OF_MEMORY = 77
    CONFIG = 78


class FaultKind(enum.StrEnum):
    """What was detected. The value is the name used in events and reports."""

    CONFIG = "config"
    WORKDIR_IN_USE = "workdir_in_use"
    STOPPED = "stopped"
    KILLED = "killed"
    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out_of_memory"
    NONFINITE = "nonfinite"
    SPIKE = "spike"
    HANG = "hang"
    PEER_LOST = "peer_lost"
    NO_CHECKPOINT = "no_checkpoint"
    SAVE_FAILED = "save_failed"


EXIT_CODES = {
    FaultKind.CONFIG: ExitCode.CONFIG,
    FaultKind.WORKDIR_IN_USE: ExitCode.WORKDIR_IN_USE,
    FaultKind.STOPPED: ExitCode.STOPPED,
    FaultKind.KILLED: ExitCode.CRASHED,
    FaultKind.EXCEPTION: ExitCode.CRASHED,
    FaultKind.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    FaultKind.NONFINITE: ExitCode.NONFINITE,
    FaultKind.SPIKE: ExitCode.NONFINITE,
    FaultKind.HANG: ExitCode.HUNG,
    FaultKind.PEER_LOST: ExitCode.PEER_LOST,
    FaultKind.NO_CHECKPOINT: ExitCode.NO_CHECKPOINT,
    FaultKind.SAVE_FAILED: ExitCode.SAVE_FAILED,
}

MAX_EVIDENCE_BYTES = 4096


class Phase(enum.StrEnum):
    """What a worker is at; it says so before it begins. Names in events and limits."""

    START = "start"
    INIT = "init"
    RESTORE = "restore"
    COMPILE = "compile"
    FIRST_STEP = "first_step"
    STEP = "step"
    DATA = "data"
    EVALUATE = "evaluate"
    SAVE = "save"
    MIRROR = "mirror"
    PEERS = "peers"


class Control(enum.IntFlag):
    """What a process tells all others with a step; see `jaxft/loop.py`."""

    NOTHING = 0
    STOP = 1
    SAVE = 2
    ABORT = 4
    ERROR = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlace:
    """Which process of its job a worker is, and where they meet; alone by default.

    Attributes:
        process_index: from 0; process 0 coordinates, decides and writes for all.
        num_processes: of the whole job.
        coordinator: `host:port` where process 0 listens; empty for a job of one.
        generation: which launch of the job's workers this is, from 0.
    """

    process_index: int = 0
    num_processes: int = 1
    coordinator: str = ""
    generation: int = 0

    @property
    def is_primary(self) -> bool:
        """Whether it decides and writes for all."""
        return self.process_index == 0

    def __str__(self) -> str:
        return f"process {self.process_index} of {self.num_processes}"


ALONE = JobPlace()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One detected failure.

    Attributes:
        kind: what it is.
        step: finished step attempts when it was seen; -1 before the first is known.
        process: index of the process it was seen on.
        evidence: at most 4 kB of text; longer text keeps its end.
        files: paths that hold more.
    """

    kind: FaultKind
    step: int = -1
    process: int = 0
    evidence: str = ""
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        data = self.evidence.encode()
        if len(data) > MAX_EVIDENCE_BYTES:
            kept = data[-MAX_EVIDENCE_BYTES:].decode(errors="ignore")
            object.__setattr__(self, "evidence", kept)

    @property
    def exit_code(self) -> ExitCode:
        """The command's exit code if this fault ends it."""
        return EXIT_CODES[self.kind]

    def event(self) -> dict[str, Any]:
        """The fields of its event `fault`."""
        return {
            "fault": self.kind,
            "step": self.step,
            "process": self.process,
            "evidence": self.evidence,
            "exit_code": int(self.exit_code),
        }


class FaultError(Exception):
    """A failure on its way to an exit code.

    Attributes:
        fault: what happened.
    """

    def __init__(self, fault: Fault):
        super().__init__(fault.evidence or str(fault.kind))
        self.fault = fault


def fault_error(kind: FaultKind, text: str) -> FaultError:
    """A failure that is told by one line, before or between the steps."""
    return FaultError(Fault(kind=kind, evidence=text))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters."""
    text = str(error).strip() or type(error).__name__
    # In C++ errors such a list goes on in lines that are not shown.
    line = _CUT_OFF.sub("", text.splitlines()[0])
    return line if len(line) <= 300 else f"{line[:297]}..."


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A committed step as discovery found it.

    Attributes:
        step: its label: finished step attempts.
        path: its folder, absolute.
        commit_secs: when it was committed, in seconds since the epoch.
        num_bytes: size of its files.
        metrics: evaluation results stored with it; filled in for who asks for them.
        healthy: whether it may be a resume point, as far as was asked.
    """

    step: int
    path: str
    commit_secs: float
    num_bytes: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    healthy: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveQuestion:
    """What a save policy may look at.

    Attributes:
        step: finished step attempts now.
        now_secs: seconds of a clock that never goes back.
        last_step: label of the last save that was started or found; -1 for none.
        last_secs: when that was on the same clock, or when the run started.
    """

    step: int
    now_secs: float
    last_step: int
    last_secs: float


class SavePolicy(Protocol):
    """Decides whether to save at a step border. No I/O, no clock of its own."""

    def should_save(self, question: SaveQuestion) -> bool:
        """Whether a save is due."""
        ...


class KeepPolicy(Protocol):
    """Decides which committed steps stay. No I/O."""

    def should_keep(self, checkpoints: Sequence[CheckpointInfo]) -> list[bool]:
        """One answer for each of `checkpoints`, which are sorted by step."""
        ...


class Emit(Protocol):
    """Appends one event to the run's history; see `jaxft.events.KINDS`."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Writes the event `kind` with its fields."""
        ...


def ignore_event(kind: str, /, **fields: Any) -> None:
    """An `Emit` that keeps nothing, for library use without a history."""
    del kind, fields


# What nothing is raised about, and somebody must know all the same.
_NEWS = frozenset(
    {
        "corrupt",
        "unreadable",
        "unhealthy",
        "unverified",
        "quarantine",
        "quarantine_failed",
        "not_a_checkpoint",
        "save_unhealthy",
        "delete_failed",
        "mirror_fetch",
        "mirror_failed",
        "metric_missing",
        "interval_costly",
        "rollback",
        "abandoned",
        "hang",
    }
)


def log_event(kind: str, /, **fields: Any) -> None:
    """An `Emit` for library use: what a person must know goes to the log."""
    if kind in _NEWS:
        told = ", ".join(f"{name} {value}" for name, value in fields.items())
        logging.warning("jaxft: %s: %s", kind.replace("_", " "), told)
