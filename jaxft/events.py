"""The run's append-only history: one JSON line an event, one file a process.

World: host-only. Floor: above `records` and `config`. Goodput, reports, the
supervisor and people read the same lines. A process that dies leaves at most one
torn line at the end of its own file; the reader skips it.

Every line has `kind`, `time` (seconds since the epoch), `mono` (seconds of a clock
that is never set back, the same for all processes of a host from one boot to the
next), `boot` (which one), `host`, `role` and `pid`, of one of several processes also
`process_index`, and the fields that `KINDS` lists for its kind. A reader must ignore
what it does not know. Numbers that JSON does not have are text: "nan", "inf", "-inf".
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Clock = Callable[[], float]
Event = Mapping[str, Any]

# kind -> the fields it always has, and what they mean.
KINDS: dict[str, dict[str, str]] = {
    # the supervisor, or a worker without one
    "launcher": {
        "name": "what started the command: alone, flags, slurm, jobset, indexed_job",
        "process_index": "of this process",
        "num_processes": "of the whole job",
        "coordinator": "where they meet; empty for one",
        "job": "as the scheduler calls it; empty for none",
        "num_requeues": "how often the scheduler started it anew",
    },
    # the supervisor
    "launch": {"worker_pid": "process id", "attempt": "0 for the first worker"},
    "spare": {
        "spare_pid": "a process in waiting, which has its imports done",
        "secs": "since its start",
        "memory_bytes": "that it holds",
    },
    "worker_exit": {
        "worker_pid": "process id",
        "status": "exit status; -n for signal n",
        "step": "last step it reported; -1 for none",
    },
    "decision": {
        "action": "restart, stop or finish",
        "cause": "a FaultKind, or finished",
        "reason": "one line",
        "delay_secs": "wait before a restart",
        "budget_left": "restarts left",
    },
    # a process of several
    "peer_wait": {
        "what": "it waits for",
        "absent": "indices of the processes that are not there",
        "secs": "so far",
    },
    # the supervisor
    # the supervisor of one of several
    "generation": {
        "number": "which launch of the job's workers",
        "members": "names, by the index of their workers",
        "num_configured": "processes that the job is meant to have",
        "coordinator": "where they meet",
        "attempt": "restarts before it",
        "reason": "why it began",
    },
    "call_off": {
        "number": "of the generation",
        "member": "whose end it is; empty for none",
        "reason": "why this worker is taken down",
    },
    "regroup": {"number": "of the generation", "returned": "who came back"},
    "member_wait": {"absent": "names of those that are waited for"},
    "elastic": {
        "num_processes": "that go on",
        "num_configured": "that the job is meant to have",
        "num_microbatches": "parts that a batch is computed in",
    },
    "suspended": {"secs": "that the run stood still by Ctrl-Z"},
    "supervisor_end": {"exit_code": "of the command", "reason": "one line"},
    # the worker
    "start": {"attempt": "as in launch", "argv": "command line"},
    "facts": {"facts": "what can change numbers: versions, devices, flags, mesh"},
    "preflight_done": {},
    "run": {
        "num_steps": "where it ends",
        "unit": "tokens or rows",
        "per_step": "how many of them a step takes",
        "num_params": "elements of the parameters",
    },
    "phase": {"name": "init, compile, restore, train, evaluate, save, mirror"},
    "compile": {"secs": "wall time", "cached": "whether the cache served it"},
    "remat_plan": {
        "plan": "what remat.plan=auto came to",
        "reused": "whether an earlier start decided it",
        "budget_bytes": "of a device",
        "peak_bytes": "of a device, as the compiler said",
        "recompute_percent": "of the layers' forward pass",
        "compiles": "it took",
    },
    "remat_replan": {"changes": "setting -> [when it was decided, now]"},
    "memory": {
        "compiled_bytes": "peak of a device, as the compiler said",
        "real_bytes": "peak of a device, as the backend saw it",
        "off": "real over compiled, minus one",
    },
    "memory_differs": {
        "compiled_bytes": "peak of a device, as the compiler said",
        "real_bytes": "peak of a device, more than a tenth from it",
        "off": "real over compiled, minus one",
    },
    "cache_unusable": {"path": "its folder", "reason": "one line"},
    "fresh_start": {"reason": "one line"},
    "restore": {
        "step": "its label",
        "secs": "wall time",
        "num_bytes": "read",
        "verify": "full, sample, off, or none for a step without manifest",
        "num_proven": "leaves whose values are proven to be those that were saved",
        "verify_secs": "of the wall time, for the proof",
    },
    "found": {"step": "the newest on a disk that takes no more"},
    "unfinished": {"path": "what an interrupted save left", "step": "its label"},
    "unverified": {"step": "its label", "reason": "why nothing could be proven"},
    "corrupt": {
        "step": "its label",
        "path": "the file or leaf that is to blame, below the step's folder",
        "reason": "what is wrong with it",
    },
    "unreadable": {"step": "its label", "reason": "why it may not be read now"},
    "unhealthy": {"step": "its label", "leaves": "paths of those not finite"},
    "quarantine": {"step": "its label", "path": "where it is now", "reason": "why"},
    "quarantine_failed": {"step": "its label", "path": "its folder", "reason": "why"},
    "bad_steps": {
        "fault": "nonfinite or spike",
        "step": "the last of them",
        "first_step": "the first of them",
        "first_batch": "that it was trained on",
        "evidence": "one line",
    },
    "rollback": {
        "step": "to go on from",
        "origin": "the newest step before it",
        "timeline": "that begins",
        "reason": "one line",
    },
    "abandoned": {
        "step": "its label",
        "path": "where it is now",
        "timeline": "it was of",
    },
    "metric_missing": {
        "step": "its label",
        "metric": "that checkpoint.keep goes by",
        "known": "those that the step has",
    },
    "mirror_target": {"target": "where a second copy of all steps goes"},
    "mirror_commit": {
        "step": "its label",
        "target": "the mirror",
        "secs": "wall time",
        "num_bytes": "that were sent",
        "num_shared_bytes": "that the mirror had",
    },
    "mirror_failed": {"step": "or -1", "target": "the mirror", "reason": "one line"},
    "mirror_deleted": {"step": "its label", "target": "the mirror"},
    "mirror_fetch": {
        "step": "its label",
        "path": "where it is now",
        "secs": "wall time",
        "num_bytes": "read",
    },
    "load": {
        "path": "the checkpoint",
        "num_leaves": "that were read",
        "num_bytes": "of them",
        "cast": "path -> [stored dtype, wanted dtype]",
        "missing": "paths that kept their defaults",
        "unexpected": "paths that nobody wanted",
    },
    "not_a_checkpoint": {"path": "a folder named like a step", "reason": "why"},
    "resume_changed": {"changes": "setting or fact -> [saved, now]"},
    "step": {
        "step": "finished step attempts",
        "first_step": "the first that this event speaks of",
        "secs": "wall time of all of them",
        "data_secs": "of that, waiting for input",
        "metrics": "means over one step, the last of them",
        "num_skipped": "guarded steps among them",
    },
    "evaluation": {"step": "at its border", "metrics": "means", "secs": "wall time"},
    "checkpoint_layout": {
        "layout": "of the arrays on disk: files or ocdbt",
        "codec": "of their chunks",
        "reason": "why this one",
    },
    "save_start": {
        "step": "its label",
        "blocking_secs": "the loop waited",
        "planning_secs": "of that, for digests of leaves that might be linked",
    },
    "save_commit": {
        "step": "its label",
        "secs": "from the start",
        "num_bytes": "of its files",
        "num_linked": "leaves that were linked",
        "linked_bytes": "of those, in bytes on disk",
    },
    "save_skipped": {"step": "its label", "reason": "one line"},
    "save_unhealthy": {
        "step": "its label; it was not committed",
        "leaves": "paths of those that are not finite",
    },
    "save_failed": {"step": "its label", "reason": "one line"},
    "interval": {
        "secs": "from the end of a save's call to the next save, from now on",
        "earlier_secs": "so far; 0 for the first one",
        "blocking_secs": "of that measurement: a save's call takes from the work",
        "write_secs": "from there to its commit",
        "slowdown": "how much longer steps take meanwhile, as a share",
        "num_saves": "measured by this worker; 0: by an earlier one",
        "failure_hours": "expected between failures, from prior and history",
        "num_failures": "in the history",
        "hours": "of the history and this worker",
        "restart_secs": "from a failure until the work goes on; 0 for unknown",
        "overhead": "share of the time that saves take",
        "goodput": "predicted share of the time that is lasting work",
    },
    "interval_costly": {
        "secs": "from the end of a save's call to the next save",
        "overhead": "share of the time that saves take",
        "reason": "one line: what it is the price of",
    },
    "deleted": {"step": "its label", "path": "its folder"},
    "delete_failed": {"path": "what stayed", "reason": "one line"},
    "hang": {
        "phase": "a Phase; in it nothing moved any more",
        "step": "finished step attempts; -1 before the first is known",
        "silent_secs": "since the last progress",
        "limit_secs": "of that phase, then",
        "seen_by": "watchdog or supervisor",
        "stacks": "of all threads, the end of it: at most 4 kB",
        "file": "that holds all of it; empty for none",
    },
    "stop_request": {"reason": "signal name, time limit or notebook"},
    "stop_plan": {
        "step": "of the border where the run stops",
        "left_secs": "of the grace time, for work",
        "save_secs": "how long each of the last saves took",
        "in_flight": "the step that is being saved; -1 for none",
        "committed": "the newest committed step; -1 for none",
        "action": "save, wait for the one in flight, or leave",
    },
    "injected": {
        "number": "of the fault in its plan, from 1",
        "fault": "kill, hang, ...: see jaxft/faults/plan.py",
        "plan": "the fault as the plan has it",
        "step": "at its border; for bad data the step that trains on it",
        "process": "where it happens, right after this",
    },
    "fault": {
        "fault": "a FaultKind",
        "step": "when it was seen",
        "process": "where it was seen",
        "evidence": "at most 4 kB",
        "exit_code": "of this worker",
    },
    "end": {"step": "finished step attempts", "reason": "finished or stopped"},
}


class EventLog:
    """Appends events to `<folder>/<host>-<role>-<start>.jsonl`; an `Emit`.

    Args:
        folder: the run's `events` folder; made when the first event is written.
        role: `supervise`, `work` or `notebook`.
        process_index: of several; then every line says so.
        tee: also called with each finished line (the worker's pipe).
        clock: seconds since the epoch.
        uptime: seconds that are never set back, the same for all of a host.

    A history that cannot be written never stops a run: each event is tried anew, is
    lost alone, and is handed to `tee` in any case.

    Attributes:
        path: its file.
        num_lost: events that are not in it, or only in part.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        role: str,
        process_index: int | None = None,
        tee: Callable[[str], None] | None = None,
        clock: Clock = time.time,
        uptime: Clock = time.monotonic,
    ):
        self._host = socket.gethostname()
        self._boot = boot_id()
        start = f"{clock():.3f}".replace(".", "")
        name = f"{self._host}-{role}-{start}-{os.getpid()}.jsonl"
        self.path = pathlib.Path(folder) / name
        self.num_lost = 0
        self._problem = ""
        self._is_torn = False
        self._role = role
        self._process = {}
        if process_index is not None:
            self._process["process_index"] = process_index
        self._tee = tee
        self._clock = clock
        self._uptime = uptime
        self._lock = threading.Lock()
        self._held: list[str] | None = []
        self._fd = -1

    def open(self) -> None:
        """Writes what was emitted so far and goes on to the file from here on.

        Until then nothing touches the disk: before the preflight is over a run
        leaves the workdir as it found it.
        """
        with self._lock:
            held, self._held = self._held or [], None
            for line in held:
                self._write(line)

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Appends one event.

        Raises:
            ValueError: `kind` is unknown or a field that it must have is missing.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}")
        if missing := KINDS[kind].keys() - fields.keys():
            raise ValueError(f"event {kind!r} lacks {sorted(missing)}")
        record = {
            "kind": kind,
            "time": self._clock(),
            "mono": self._uptime(),
            "boot": self._boot,
            "host": self._host,
            "role": self._role,
            "pid": os.getpid(),
            **self._process,
        }
        line = _encode(record | fields)
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            else:
                self._write(line)
        if self._tee is not None:
            self._tee(line)

    @property
    def problem(self) -> str:
        """Why events are missing, and how many; empty when none is."""
        if not self.num_lost:
            return ""
        noun = "event" if self.num_lost == 1 else "events"
        return f"{self.num_lost} {noun} lost from {self.path}: {self._problem}"

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        # Else what is whole would continue what is not.
        rest = b"\n" + data if self._is_torn else data
        num_bytes = len(rest)
        try:
            if self._fd < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o644)
            while rest:  # A full disk takes a part first and says why only then.
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.num_lost += 1
            self._problem = error.strerror or str(error)
            self._is_torn = self._is_torn or len(rest) < num_bytes
        else:
            self._is_torn = False

    def close(self) -> None:
        """Closes the file; later events open it again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def boot_id() -> str:
    """Names this boot of this host, in eight letters; empty where nobody knows."""
    try:
        path = pathlib.Path("/proc/sys/kernel/random/boot_id")
        return path.read_text("ascii").strip()[:8]
    except (OSError, ValueError):
        return ""


def write_beside(folder: str | os.PathLike[str], text: str, *, name: str) -> str:
    """Writes what is too long for an event into a file of its own in `folder`.

    Returns:
        Its path; empty where it cannot be written.
    """
    file = f"{socket.gethostname()}-{name}-{time.time_ns() // 10**6}-{os.getpid()}.txt"
    path = pathlib.Path(folder) / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    except OSError:
        return ""
    return str(path)


def _encode(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, default=str, allow_nan=False)
    except ValueError:  # Rare, so the common case does not pay for the search.
        return json.dumps(_spell_out(record), default=str)


def _spell_out(value: Any) -> Any:
    """Non-finite numbers as text: other readers of JSON refuse a bare NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: _spell_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(item) for item in value]
    return value


def parse_line(line: str) -> dict[str, Any] | None:
    """One event; None for a line that is torn, foreign or lacks its kind's fields."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    time_secs = event.get("time")
    if isinstance(time_secs, bool) or not isinstance(time_secs, int | float):
        return None
    if not -1e18 < time_secs < 1e18:  # Nor is a number beyond any clock a time.
        return None
    return None if KINDS.get(event["kind"], {}).keys() - event else event


def read_events(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events under `folder`, by time; torn lines and a missing folder are fine."""
    return sorted(_scan(pathlib.Path(folder)), key=lambda event: event["time"])


def _scan(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (event := parse_line(line)) is not None:
                    yield event
