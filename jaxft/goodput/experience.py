"""What the history of a workdir teaches about failures, restarts and saves.

World: host-only. Floor: goodput. Read `jaxft/events.py` and `jaxft/save_costs.py`
before; `jaxft/build.py` gives it to the saves, `jaxft/cli/simulate.py` to the
simulator.

It is read once at a start, so it is bounded: the newest files, and of a long one its
two ends. What is torn, missing or of another make teaches nothing and stops nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Sequence

from jaxft.events import Event, parse_line
from jaxft.intervals import Experience, SaveCost
from jaxft.records import FaultKind
from jaxft.save_costs import SaveCosts

_MAX_FILES = 200
_MAX_WORKERS_TIMED = 20
_EDGE_BYTES = 128 * 1024
_SUPERVISE, _WORK, _NOTEBOOK = "supervise", "work", "notebook"
# Ends of a worker that are not for the frequency of saves to answer.
_NO_FAILURE = frozenset(
    {
        "finished",
        FaultKind.STOPPED,
        FaultKind.CONFIG,
        FaultKind.WORKDIR_IN_USE,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.NO_CHECKPOINT,
        FaultKind.NONFINITE,
        FaultKind.SPIKE,
    }
)
# Of all others it is asked whether any step was lost: code that never ran is no luck.
_ALWAYS_FAILURE = frozenset({FaultKind.KILLED, FaultKind.HANG})

_RECKONED = {
    "launch": ("worker_pid",),
    "worker_exit": ("step",),
    "start": ("attempt",),
    "step": ("step", "first_step", "secs"),
    "save_start": ("blocking_secs",),
    "save_commit": ("secs",),
    "interval": ("blocking_secs", "write_secs", "slowdown"),
    "fault": ("step",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a history says.

    Attributes:
        experience: failures, restarts and the cost of a save.
        step_secs: of one step beside no save; 0.0 for unknown.
        num_restarts: that the time of a restart is the mean of.
    """

    experience: Experience
    step_secs: float = 0.0
    num_restarts: int = 0


def read_experience(
    folder: str | os.PathLike[str],
    *,
    expected_hours: float,
    now_secs: float,
    own_pid: int = -1,
    is_running: bool = False,
) -> Measured:
    """Reads the `events` folder of a workdir; an empty or missing one is fine.

    Args:
        folder: it.
        expected_hours: between failures, as somebody guessed.
        now_secs: since the epoch.
        own_pid: of the worker that asks: what has not ended there is no failure.
        is_running: neither is it in the newest file, as the command runs now.
    """
    files = _files(pathlib.Path(folder))
    num_failures, seen_secs, exits = 0, 0.0, []
    for path in files[_SUPERVISE]:
        events = _read(path)
        exits += [event["time"] for event in events if event["kind"] == "worker_exit"]
        pids = [event["worker_pid"] for event in events if event["kind"] == "launch"]
        is_alive = own_pid in pids[-1:]
        is_alive |= is_running and path == files[_SUPERVISE][0]
        num, secs = _life_of_supervisor(
            events, workers=files[_WORK], now_secs=now_secs, is_alive=is_alive
        )
        num_failures, seen_secs = num_failures + num, seen_secs + secs
    for path in files[_NOTEBOOK]:
        num, secs = _life_of_notebook(_read(path), own_pid=own_pid)
        num_failures, seen_secs = num_failures + num, seen_secs + secs
    workers = sorted([*files[_WORK], *files[_NOTEBOOK]], key=_mtime, reverse=True)
    lives = [_read(path) for path in workers[:_MAX_WORKERS_TIMED]]
    cost, step_secs = _newest_cost(lives)
    restarts = [
        secs for life in lives if (secs := _restart_secs(life, exits, step_secs)) > 0
    ]
    return Measured(
        experience=Experience(
            expected_hours=expected_hours,
            num_failures=num_failures,
            secs=seen_secs,
            restart_secs=statistics.fmean(restarts) if restarts else 0.0,
            cost=cost,
        ),
        step_secs=step_secs,
        num_restarts=len(restarts),
    )


# --- files --------------------------------------------------------------------


def _files(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The newest files by role, `<host>-<role>-<start>-<pid>.jsonl`."""
    found: dict[str, list[pathlib.Path]]
    found = {_SUPERVISE: [], _WORK: [], _NOTEBOOK: []}
    try:
        paths = sorted(folder.glob("*.jsonl"), key=_mtime, reverse=True)
    except OSError:
        return found
    for path in paths:
        parts = path.stem.rsplit("-", 3)
        same = found.get(parts[1]) if len(parts) == 4 else None
        if same is not None and len(same) < _MAX_FILES:
            same.append(path)
    return found


def _mtime(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: pathlib.Path) -> list[Event]:
    """Events of one process in their order; of a long file both ends."""
    try:
        with path.open("rb") as file:
            data = file.read(_EDGE_BYTES)
            size = file.seek(0, os.SEEK_END)
            if size > _EDGE_BYTES:
                file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
                # A line that is cut in the middle is torn, and passed over.
                data += b"\n" * (size > 2 * _EDGE_BYTES) + file.read(_EDGE_BYTES)
    except OSError:
        return []
    events = map(parse_line, data.decode(errors="replace").splitlines())
    return [event for event in events if event is not None and _is_whole(event)]


def _is_whole(event: Event) -> bool:
    """Whether what is reckoned with are numbers: they may be text, as "nan" is."""
    return all(
        isinstance(value := event[name], int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (value >= 0 or name == "step")
        for name in _RECKONED.get(event["kind"], ())
    )


# --- failures -----------------------------------------------------------------


def _life_of_supervisor(
    events: Sequence[Event],
    *,
    workers: Sequence[pathlib.Path],
    now_secs: float,
    is_alive: bool,
) -> tuple[int, float]:
    """Failures and seconds of one start of the command."""
    launches = [event for event in events if event["kind"] == "launch"]
    if not launches:
        return 0, 0.0
    num_failures, step = 0, -1
    for event in events:
        if event["kind"] == "worker_exit":
            step = event["step"]
        elif event["kind"] == "decision":
            num_failures += _is_failure(event["cause"], step=step)
    until = events[-1]["time"]
    if not any(event["kind"] == "supervisor_end" for event in events):
        if is_alive:
            until = now_secs
        else:
            # It went down with its host: its worker wrote until then.
            num_failures += 1
            last = launches[-1]["worker_pid"]
            names = [path for path in workers if path.stem.endswith(f"-{last}")]
            until = max([until, *(_mtime(path) for path in names)])
    return num_failures, max(0.0, until - launches[0]["time"])


def _life_of_notebook(events: Sequence[Event], *, own_pid: int) -> tuple[int, float]:
    """Failures and seconds of one call of `jaxft.run`."""
    if not events:
        return 0, 0.0
    num_failures = 0
    if faults := [event for event in events if event["kind"] == "fault"]:
        num_failures = _is_failure(faults[-1]["fault"], step=faults[-1]["step"])
    elif events[-1]["kind"] != "end" and events[-1].get("pid") != own_pid:
        num_failures = 1
    return num_failures, max(0.0, events[-1]["time"] - events[0]["time"])


def _is_failure(cause: str, *, step: int) -> bool:
    if cause in _ALWAYS_FAILURE:
        return True
    return cause not in _NO_FAILURE and step >= 0


# --- times --------------------------------------------------------------------


def _newest_cost(lives: Sequence[Sequence[Event]]) -> tuple[SaveCost | None, float]:
    """What a save and a step take, by the newest worker that knows.

    Args:
        lives: events of workers, the newest first.
    """
    known = [_measure(events) for events in lives]
    step_secs = next((secs for _, _, secs in known if secs > 0), 0.0)
    costs = [(cost, num) for cost, num, _ in known if cost is not None]
    # The only save of a worker is its first, which takes longer.
    cost = next(
        (cost for cost, num in costs if num > 1), costs[0][0] if costs else None
    )
    return cost, step_secs


def _measure(events: Sequence[Event]) -> tuple[SaveCost | None, float, float]:
    """Cost of a save, the number of saves that say so, and time of a step."""
    costs = SaveCosts()
    planned = None
    for event in events:
        _observe(costs, event)
        if event["kind"] == "interval":
            planned = SaveCost(
                blocking_secs=event["blocking_secs"],
                write_secs=event["write_secs"],
                slowdown=event["slowdown"],
            )
    if planned is not None:
        # Measured at each border, and so better than between lines of the history.
        return planned, math.inf, costs.step_secs
    return costs.cost(), costs.num_known, costs.step_secs


def _observe(costs: SaveCosts, event: Event) -> None:
    if event["kind"] == "step":
        num_steps = event["step"] - event["first_step"] + 1
        if num_steps > 0 and event["secs"] > 0:
            costs.stretch(event["secs"], num_steps=num_steps)
    elif event["kind"] == "save_start":
        costs.begin(event["blocking_secs"])
    elif event["kind"] == "save_commit":
        costs.commit(event["secs"])
    elif event["kind"] in ("save_failed", "save_unhealthy"):
        costs.give_up()


def _restart_secs(
    events: Sequence[Event], exits: Sequence[float], step_secs: float
) -> float:
    """From the death before to the first step of this worker; 0.0 for no restart."""
    start = next((e for e in events if e["kind"] == "start"), None)
    first = next((e for e in events if e["kind"] == "step"), None)
    if start is None or first is None or not start["attempt"]:
        return 0.0
    deaths = [secs for secs in exits if secs <= start["time"]]
    if not deaths:
        return 0.0
    # The step itself is work.
    return first["time"] - min(step_secs, first["secs"]) - max(deaths)
