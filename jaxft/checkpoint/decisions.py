"""What was decided about a root and must outlive the one who decided: rollbacks, pins.

World: host-only. Floor: above `run_record`. Read `jaxft/checkpoint/run_record.py`
before and `jaxft/checkpoint/restore.py` after.

    <root>/decisions/<n>.json                 write-once, durable before it is acted on

They lie inside the root, so that a root is complete by itself. A rollback to a step
begins a new timeline: from then on the steps of older timelines above it do not
exist for us, whatever their names; only then are they renamed aside, and the next
start finishes what a kill left. (timeline, step) is what a step is; the timeline is
in its run record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxft import durable, records
from jaxft.checkpoint import layout, run_record

FOLDER = "decisions"
FORMAT_NAME = "jaxft-decision"
FORMAT_VERSION = 1

_NAME = re.compile(r"([1-9]\d*)\.json")
# How much is kept of what was read of each step: all are asked in turn, so that what
# holds less than all of them holds nothing.
MANY_STEPS = 2**17
# The timeline of a step whose record is damaged.
_UNKNOWN = 2**63


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
    """Back to an earlier step, for good.

    Attributes:
        timeline: the one that begins with it.
        origin: the newest step that was there; -1 for none.
        to: the step to go on from.
        skip: half-open window of batch numbers that are not trained on any more.
        reason: one line.
        time_secs: when, in seconds since the epoch.
        cause: the `FaultKind` that a run met; empty for a decision by hand.
    """

    timeline: int
    origin: int
    to: int
    skip: tuple[int, int] | None
    reason: str
    time_secs: float
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pin:
    """A step that retention never deletes.

    Attributes:
        step: its label.
        reason: one line.
        time_secs: when, in seconds since the epoch.
    """

    step: int
    reason: str
    time_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """All that was decided about a root.

    Attributes:
        rollbacks: in order.
        pins: in order.
    """

    rollbacks: tuple[Rollback, ...] = ()
    pins: tuple[Pin, ...] = ()

    @property
    def timeline(self) -> int:
        """The timeline of now; 0 before the first rollback."""
        return max((one.timeline for one in self.rollbacks), default=0)

    @property
    def pinned(self) -> frozenset[int]:
        """Labels of the pinned steps."""
        return frozenset(pin.step for pin in self.pins)

    def is_abandoned(self, step: int, *, timeline: int) -> bool:
        """Whether a later rollback went behind this step."""
        return any(one.timeline > timeline and step > one.to for one in self.rollbacks)

    def skips_since(self, timeline: int) -> list[tuple[int, int]]:
        """Windows of batches that rollbacks after `timeline` took out."""
        return [
            one.skip for one in self.rollbacks if one.timeline > timeline and one.skip
        ]


def read(root: str | os.PathLike[str]) -> Decisions:
    """Reads all decisions about `root`; none when there is no such folder.

    Raises:
        FaultError: kind CONFIG: one cannot be read or understood; to pass over it
            could bring back what was rolled back.
    """
    return parse(texts(root), folder=os.path.join(root, FOLDER))


def texts(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """File name -> content of all decisions about `root`, in order.

    Raises:
        FaultError: kind CONFIG: one cannot be read.
    """
    found = {}
    for path in _files(root):
        try:
            found[path.name] = path.read_bytes()
        except OSError as error:
            raise layout.unreadable(path, str(error.strerror)) from error
    return found


def parse(copies: Mapping[str, bytes], *, folder: str) -> Decisions:
    """What `texts` gave, understood.

    Args:
        copies: file name -> content.
        folder: where the files are, for errors.

    Raises:
        FaultError: see `read`.
    """
    rollbacks, pins = [], []
    for name, text in sorted(copies.items(), key=lambda item: _number(item[0])):
        path = os.path.join(folder, name)
        body = _decode(text, path=path)
        try:
            if body["kind"] == "pin":
                pins.append(_pin(body))
            else:
                rollbacks.append(_rollback(body))
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(path, f"not a decision that is known here: {error}") from (
                error
            )
    return Decisions(rollbacks=tuple(rollbacks), pins=tuple(pins))


def discover(root: str | os.PathLike[str]) -> layout.Discovery:
    """`layout.discover`, with what rollbacks took out apart, as `abandoned`.

    Raises:
        FaultError: see `layout.discover` and `read`.
        OSError: see `layout.discover`.
    """
    found = layout.discover(root)
    decided = read(root)
    if not decided.rollbacks:
        return found
    committed, abandoned = [], []
    for info in found.committed:
        is_gone = any(info.step > one.to for one in decided.rollbacks) and (
            decided.is_abandoned(info.step, timeline=timeline_of(info.path))
        )
        (abandoned if is_gone else committed).append(info)
    return dataclasses.replace(
        found, committed=tuple(committed), abandoned=tuple(abandoned)
    )


def timeline_of(path: str) -> int:
    """The timeline of a step; the highest there is when its record is damaged.

    Such a step is nobody's to pass over: the restore finds it damaged and says so.
    """
    try:
        stat = os.stat(os.path.join(path, layout.RUN_ITEM, run_record.RECORD_FILE))
        return _timeline(path, stat.st_ino, stat.st_mtime_ns)
    except (OSError, run_record.RecordError):
        return _UNKNOWN


@functools.lru_cache(maxsize=MANY_STEPS)
def _timeline(path: str, inode: int, changed_ns: int) -> int:
    del inode, changed_ns  # another file under the same name is read anew
    return run_record.read_record(path)["timeline"]


def roll_back(
    root: str | os.PathLike[str],
    *,
    to: int,
    reason: str,
    skip: tuple[int, int] | None = None,
    cause: str = "",
    emit: records.Emit = records.ignore_event,
) -> Rollback:
    """Makes `to` the newest step of `root`, durably; the caller owns the root.

    Args:
        root: the checkpoint root.
        to: a committed step.
        reason: one line, for people.
        skip: half-open window of batch numbers to leave out from now on.
        cause: the `FaultKind` that a run met; empty for a decision by hand.
        emit: told of the rollback and of each step that is renamed aside.

    Raises:
        FaultError: kind NO_CHECKPOINT: `to` is not there.
        ValueError: `skip` is no window.
        OSError: it could not be written: nothing has changed; or a step could not be
            renamed: the next start does it. The text says which.
    """
    root = layout.absolute_root(root)
    if skip is not None and not 0 <= skip[0] < skip[1]:
        raise ValueError(f"skip {skip} is no window of batch numbers")
    found, decided = discover(root), read(root)
    if to not in found.steps:
        raise _not_there(root, to, found.steps)
    # Above every timeline that is there, also where older decisions were lost.
    seen = [timeline_of(info.path) for info in found.committed]
    known = max([decided.timeline, *(one for one in seen if one < _UNKNOWN)])
    rollback = Rollback(
        timeline=known + 1,
        origin=max(found.steps, default=-1),
        to=to,
        skip=skip,
        reason=reason,
        time_secs=time.time(),
        cause=cause,
    )
    body = dataclasses.asdict(rollback)
    body["from"], body["time"] = body.pop("origin"), body.pop("time_secs")
    _write(root, {"kind": "rollback"} | body)
    emit(
        "rollback",
        step=to,
        origin=rollback.origin,
        timeline=rollback.timeline,
        reason=reason,
        skip=skip,
    )
    with _says("it is rolled back; the next start renames what is left"):
        finish(root, emit=emit)
    return rollback


def pin(root: str | os.PathLike[str], step: int, *, reason: str) -> Pin:
    """Keeps a committed step for ever.

    Raises:
        FaultError: kind NO_CHECKPOINT: it is not there.
        OSError: it could not be written.
    """
    root = layout.absolute_root(root)
    steps = discover(root).steps
    if step not in steps:
        raise _not_there(root, step, steps)
    one = Pin(step=step, reason=reason, time_secs=time.time())
    _write(root, {"kind": "pin", "step": step, "reason": reason, "time": one.time_secs})
    return one


def adopt(root: str | os.PathLike[str], copies: Mapping[str, bytes]) -> None:
    """Brings back, durably, decisions that a copy of this very root has kept.

    Args:
        root: the checkpoint root.
        copies: file name -> content; see `texts`.

    Raises:
        FaultError: kind CONFIG: something else was decided here, or one of them is
            damaged.
        OSError: one could not be written.
    """
    folder = os.path.join(layout.absolute_root(root), FOLDER)
    parse(copies, folder=folder)
    there = texts(root)
    for name, text in copies.items():
        path = os.path.join(folder, name)
        if name not in there:
            write_once(path, text)
        elif there[name] != text:
            raise _unusable(path, "its copy says something else")


def finish(
    root: str | os.PathLike[str], *, emit: records.Emit = records.ignore_event
) -> None:
    """Renames aside what rollbacks took out; the rest of an interrupted one.

    Raises:
        OSError: a step could not be renamed; it stays ineligible all the same.
    """
    for info in discover(root).abandoned:
        timeline = timeline_of(info.path)
        try:
            aside = layout.abandon(info.path, timeline=timeline)
        except FileNotFoundError:
            continue
        emit("abandoned", step=info.step, path=aside, timeline=timeline)


# --- files --------------------------------------------------------------------


def _files(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Paths of the decisions, in order."""
    folder = pathlib.Path(root, FOLDER)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise layout.unreadable(folder, str(error.strerror)) from error
    numbers = sorted(filter(None, map(_number, names)))
    return [folder / f"{number}.json" for number in numbers]


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _decode(text: bytes, *, path: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"damaged: {error}") from error
    form = body.get("format") if isinstance(body, dict) else None
    if not isinstance(form, dict) or form.get("name") != FORMAT_NAME:
        raise _unusable(path, "damaged: not a decision")
    if form.get("version") != FORMAT_VERSION:
        raise _unusable(
            path,
            f"it is written as {FORMAT_NAME} {form.get('version')}, this jaxft reads "
            f"{FORMAT_NAME} {FORMAT_VERSION}",
        )
    if body.pop("sha256", None) != _digest(body):
        raise _unusable(path, "damaged: its digest is another")
    return body


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _write(root: str, body: dict[str, Any]) -> None:
    """Adds one decision: whole or not at all, and never over another one."""
    body = {"format": {"name": FORMAT_NAME, "version": FORMAT_VERSION}} | body
    # Through JSON once, so that the digest is of what a reader gets.
    body = json.loads(json.dumps(body))
    text = json.dumps(body | {"sha256": _digest(body)}, indent=1) + "\n"
    taken = [int(path.stem) for path in _files(root)]
    name = f"{max(taken, default=0) + 1}.json"
    final = os.path.join(root, FOLDER, name)
    with _says("nothing was changed", path=final):
        write_once(final, text.encode())


@contextlib.contextmanager
def _says(outcome: str, *, path: str = "") -> Iterator[None]:
    """Adds to an error of the disk what it left, and where it was if it is silent."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        where = error.filename or path or None
        raise OSError(error.errno, f"{error.strerror}; {outcome}", where) from error


def write_once(final: str, text: bytes) -> None:
    """Writes a decision that was made elsewhere, durably.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it could not be written.
    """
    folder = os.path.dirname(final)
    durable.make_folders(folder)
    for leftover in pathlib.Path(folder).glob(f"{durable.UNFINISHED}*"):
        leftover.unlink(missing_ok=True)
    try:
        durable.write_once(final, text)
    except FileExistsError as error:
        problem = f"{final} is there: somebody else decides here, too"
        raise FileExistsError(problem) from error


def _rollback(body: dict[str, Any]) -> Rollback:
    if body["kind"] != "rollback":
        raise ValueError(f"kind {body['kind']!r}")
    skip = body["skip"]
    return Rollback(
        timeline=int(body["timeline"]),
        origin=int(body["from"]),
        to=int(body["to"]),
        skip=None if skip is None else (int(skip[0]), int(skip[1])),
        reason=str(body["reason"]),
        time_secs=float(body["time"]),
        cause=str(body.get("cause", "")),  # Older ones do not say.
    )


def _pin(body: dict[str, Any]) -> Pin:
    return Pin(
        step=int(body["step"]),
        reason=str(body["reason"]),
        time_secs=float(body["time"]),
    )


def _not_there(root: str, step: int, steps: list[int]) -> records.FaultError:
    there = ", ".join(map(str, steps)) or "none"
    text = f"step {step} is not in {root}; there: {there}"
    return records.fault_error(records.FaultKind.NO_CHECKPOINT, text)


def _unusable(path: str | os.PathLike[str], reason: str) -> records.FaultError:
    text = (
        f"{os.fspath(path)} cannot be used: {reason}; put it back from a copy, or move "
        "it away if nothing was rolled back; nothing was changed"
    )
    return records.fault_error(records.FaultKind.CONFIG, text)
