"""The closing summary of a run, read from its events alone.

World: host-only. Floor: a peer of `data` and `checkpoint`. Whoever outlives the
worker prints it: the supervisor, or the worker itself when it runs alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What one command did.

    Attributes:
        step: finished step attempts at the end; -1 when none is known.
        metrics: of the last step seen.
        evaluation: of the last evaluation, empty for none.
        first_evaluation: of the first one in these events.
        steps_per_sec: median over the step events.
        input_share: share of the steps' time that the loop waited for input.
        num_restarts: workers started after the first.
        lost_secs: time from a death until its step number was passed again.
        last_checkpoint: label of the newest committed step, -1 for none.
        quarantined: paths of steps that were moved aside.
    """

    step: int
    metrics: dict[str, float]
    evaluation: dict[str, float]
    first_evaluation: dict[str, float]
    steps_per_sec: float
    input_share: float
    num_restarts: int
    lost_secs: float
    last_checkpoint: int
    quarantined: tuple[str, ...]


def summarize(events: Iterable[Event]) -> Summary:
    """Reads one command's events, in time order."""
    by_kind: dict[str, list[Event]] = {}
    ordered = list(events)
    for event in ordered:
        by_kind.setdefault(event["kind"], []).append(event)
    steps = by_kind.get("step", [])
    evaluations = by_kind.get("evaluation", [])
    rates = sorted(
        (e["step"] - e["first_step"] + 1) / e["secs"] for e in steps if e["secs"] > 0
    )
    saved = [e["step"] for e in by_kind.get("save_commit", [])]
    saved += [e["step"] for e in by_kind.get("restore", [])]
    reached = [e["step"] for e in steps] + [e["step"] for e in by_kind.get("end", [])]
    return Summary(
        step=max(reached, default=-1),
        metrics=dict(steps[-1]["metrics"]) if steps else {},
        evaluation=dict(evaluations[-1]["metrics"]) if evaluations else {},
        first_evaluation=dict(evaluations[0]["metrics"]) if evaluations else {},
        steps_per_sec=rates[len(rates) // 2] if rates else 0.0,
        input_share=sum(e["data_secs"] for e in steps)
        / max(sum(e["secs"] for e in steps), 1e-9),
        num_restarts=max((e["attempt"] for e in by_kind.get("launch", [])), default=0),
        lost_secs=lost_secs(ordered),
        last_checkpoint=max(saved, default=-1),
        quarantined=tuple(e["path"] for e in by_kind.get("quarantine", [])),
    )


def lost_secs(events: Iterable[Event]) -> float:
    """Seconds from each death until the steps done before it were passed again."""
    lost = 0.0
    top, top_time = -1, None
    dead_since: float | None = None
    for event in events:
        kind, time = event["kind"], event["time"]
        if kind == "step":
            if event["step"] > top:
                if dead_since is not None:
                    lost += max(0.0, time - event["secs"] - dead_since)
                    dead_since = None
                top, top_time = event["step"], time
        elif kind == "worker_exit" and event["status"] != 0 and dead_since is None:
            dead_since = time if top_time is None else min(time, top_time)
    return lost


def closing_summary(
    events: Sequence[Event], *, workdir: pathlib.Path, reason: str
) -> str:
    """What a person reads at the end: a few lines, `name  value`.

    Args:
        events: those of this command, in time order.
        workdir: the run's folder.
        reason: how the run ended, in a few words.
    """
    summary = summarize(events)
    rows = [("run", reason)]
    if "loss" in summary.metrics:
        rows.append(("loss", f"{summary.metrics['loss']:.4f} at step {summary.step}"))
    rows += [
        (f"held-out {name}", _from_to(summary.first_evaluation.get(name), value))
        for name, value in summary.evaluation.items()
    ]
    run = next((event for event in events if event["kind"] == "run"), None)
    if summary.steps_per_sec and run is not None:
        rate = summary.steps_per_sec
        items = f"{rate * run['per_step']:,.0f} {run['unit']}/s"
        waiting = f"{100 * summary.input_share:.1f} % waiting for input"
        rows.append(("throughput", f"{rate:.2f} steps/s, {items}, {waiting}"))
    rows.append(
        ("restarts", f"{summary.num_restarts}, {summary.lost_secs:.1f} s lost to them")
    )
    newest = summary.last_checkpoint
    where = str(workdir / "checkpoints")
    rows.append(("checkpoints", where if newest < 0 else f"{where}, newest {newest}"))
    rows += [("moved aside", path) for path in summary.quarantined]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _from_to(first: float | None, last: float) -> str:
    if first is None or first == last:
        return f"{last:.4f}"
    return f"{first:.4f} -> {last:.4f}"
