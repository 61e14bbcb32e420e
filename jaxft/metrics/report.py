"""The closing summary of a run, made from its events while they happen.

World: host-only. Floor: a peer of `data` and `checkpoint`, above `events`. Whoever
outlives the worker prints it: the supervisor, or the worker itself when it runs alone.

Nothing is read back from disk: a run of months has gigabytes of history, and a clock
that is set back cannot confuse what is taken in the order of its happening.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxft.events import Event, parse_line

# Characters of a reason in one row.
_MAX_REASON = 240
# What reading an event raises whose fields are there but are not what they should be.
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Summary:
    """What one command did; takes in one event after the other, in a fixed space.

    Attributes:
        step: finished step attempts at the end; -1 when none is known.
        num_steps: where the run ends; -1 when it is not known.
        metrics: of the last step that told them.
        evaluation: of the last evaluation, empty for none.
        first_evaluation: of the first one in these events.
        num_restarts: workers started after the first.
        lost_secs: seconds from each death until the steps done before it were passed
            again.
        num_rollbacks: how often bad steps were undone.
        last_checkpoint: label of the newest committed step, -1 for none.
        num_failed_saves: how often a save failed.
        save_problem: step and cause of the last that did; empty for none.
        quarantined: paths of steps that were moved aside.
        has_mirror: whether there is a second place for all steps.
        mirrored: label of the newest step that is known to be there, -1 for none.
        mirror_problem: why the last copy failed; empty when it did not.
    """

    def __init__(self) -> None:
        self.step = -1
        self.num_steps = -1
        self.metrics: dict[str, float] = {}
        self._metrics_step = -1
        self.evaluation: dict[str, float] = {}
        self.first_evaluation: dict[str, float] = {}
        self.num_restarts = 0
        self.lost_secs = 0.0
        self.num_rollbacks = 0
        self.last_checkpoint = -1
        self.num_failed_saves = 0
        self.save_problem = ""
        self.quarantined: list[str] = []
        self.has_mirror = False
        self.mirrored = -1
        self.mirror_problem = ""
        self._saved, self._restored = -1, -1
        self._items: tuple[str, float] | None = None
        # A worker's first record holds what is done once: it counts only if it is all
        # that there is.
        self._first_pace = _Pace()
        self._pace = _Pace()
        self._is_first = True
        self._top_step, self._top_secs = -1, math.nan
        self._dead_since: float | None = None

    def take(self, event: Event) -> None:
        """Takes in one event; one that is not made as it should be says nothing."""
        taker = getattr(self, f"_take_{event['kind']}", None)
        if taker is not None:
            with contextlib.suppress(*_MALFORMED):
                taker(event)

    def take_line(self, line: str) -> None:
        """Takes in an event as `EventLog` hands it to its `tee`."""
        if (event := parse_line(line)) is not None:
            self.take(event)

    @property
    def steps_per_sec(self) -> float:
        """Median over the step events; 0 for none."""
        return self._known_pace().median()

    @property
    def input_share(self) -> float:
        """Share of the steps' time that the loop waited for input."""
        pace = self._known_pace()
        return pace.data_secs / pace.secs if pace.secs > 0 else 0.0

    def text(
        self,
        *,
        workdir: pathlib.Path,
        reason: str,
        history: str = "",
        goodput: str = "",
    ) -> str:
        """What a person reads at the end: a few lines, `name  value`.

        Args:
            workdir: the run's folder.
            reason: how the run ended, in a few words.
            history: what is missing from the events; empty for nothing.
            goodput: what part of the time went into steps; empty for no such row.
        """
        rows = [("run", reason)]
        if self.step >= 0:
            of = f" of {self.num_steps}" if self.num_steps >= 0 else ""
            rows.append(("step", f"{self.step}{of}"))
        # An older loss would read as that of this step.
        if "loss" in self.metrics and self._metrics_step == self.step:
            rows.append(("loss", f"{self.metrics['loss']:.4f}"))
        rows += [
            (f"held-out {name}", _from_to(self.first_evaluation.get(name), value))
            for name, value in self.evaluation.items()
        ]
        if (rate := self.steps_per_sec) and self._items is not None:
            unit, per_step = self._items
            items = f"{rate * per_step:,.0f} {unit}/s"
            waiting = f"{100 * self.input_share:.1f} % waiting for input"
            rows.append(("throughput", f"{rate:.2f} steps/s, {items}, {waiting}"))
        if goodput:
            rows.append(("goodput", goodput))
        lost = f"{self.num_restarts}, {self.lost_secs:.1f} s lost to them"
        rows.append(("restarts", lost))
        if self.num_rollbacks:
            rows.append(("rollbacks", str(self.num_rollbacks)))
        where = os.path.normpath(workdir / "checkpoints")
        newest = self.last_checkpoint
        known = f"{where}, newest {newest}" if newest >= 0 else f"none yet in {where}"
        rows.append(("checkpoints", known))
        if self.num_failed_saves:
            failed = f"{self.num_failed_saves} (last: {self.save_problem})"
            rows.append(("failed saves", failed))
        if known := self._mirror_words():
            rows.append(("mirror", known))
        rows += [("moved aside", os.path.normpath(path)) for path in self.quarantined]
        if history:
            rows.append(("history", f"incomplete: {history}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _mirror_words(self) -> str:
        """What the mirror has of the steps; empty where nobody can tell."""
        problem = f": {self.mirror_problem}" if self.mirror_problem else ""
        newest = max(self._saved, self._restored)
        if self.mirrored >= 0:
            missing = f"; step {newest} is not there yet{problem}"
            if newest <= self.mirrored:
                missing = problem and f"; not all went well{problem}"
            return f"step {self.mirrored} is its newest{missing}"
        if self._saved < 0:
            return f"nothing new{problem}" if problem else ""
        if problem:
            none = (
                "none of the new steps" if self._restored >= 0 else "none of the steps"
            )
            return f"{none}{problem}"
        return f"step {self._saved} is not there yet" if self.has_mirror else ""

    def _known_pace(self) -> _Pace:
        return self._pace if self._pace.secs > 0 else self._first_pace

    def _take_launch(self, event: Event) -> None:
        self._is_first = True
        self.num_restarts = max(self.num_restarts, int(event["attempt"]))

    def _take_run(self, event: Event) -> None:
        self._is_first = True
        self.num_steps = int(event["num_steps"])
        self._items = str(event["unit"]), float(event["per_step"])

    def _take_step(self, event: Event) -> None:
        step, num_steps = int(event["step"]), event["step"] - event["first_step"] + 1
        secs, data_secs = float(event["secs"]), float(event["data_secs"])
        metrics = _numbers(event["metrics"])
        pace = self._first_pace if self._is_first else self._pace
        pace.add(num_steps, secs=secs, data_secs=data_secs)
        self._is_first = False
        self.metrics, self._metrics_step = metrics, step
        self.step = step  # Less than before after a restart.
        if step > self._top_step:
            if self._dead_since is not None:
                self.lost_secs += max(0.0, event["time"] - secs - self._dead_since)
                self._dead_since = None
            self._top_step, self._top_secs = step, event["time"]

    def _take_evaluation(self, event: Event) -> None:
        self.evaluation = _numbers(event["metrics"])
        self.first_evaluation = self.first_evaluation or self.evaluation

    def _take_save_commit(self, event: Event) -> None:
        step = int(event["step"])
        self.last_checkpoint = max(self.last_checkpoint, step)
        self._saved = max(self._saved, step)
        # Committed while the steps after it ran already.
        self.step = max(self.step, step)

    def _take_rollback(self, event: Event) -> None:
        step = int(event["step"])
        self.num_rollbacks += 1
        self.last_checkpoint, self._saved = step, min(step, self._saved)

    def _take_found(self, event: Event) -> None:
        self.last_checkpoint = max(self.last_checkpoint, int(event["step"]))

    def _take_save_failed(self, event: Event) -> None:
        # What to do about it follows the first semicolon.
        reason = " ".join(str(event["reason"]).split()).partition("; ")[0]
        self.num_failed_saves += 1
        self.save_problem = reason.removeprefix("save of ")[:_MAX_REASON]

    def _take_restore(self, event: Event) -> None:
        step = int(event["step"])
        self.last_checkpoint = max(self.last_checkpoint, step)
        self._restored = max(self._restored, step)
        self.step = step

    def _take_end(self, event: Event) -> None:
        if (step := int(event["step"])) >= 0:  # It left before it had one.
            self.step = step
        if event["reason"] == "finished" and self.has_mirror:
            # Whoever finishes waits for the copies, or says why not.
            known = -1 if self.mirror_problem else self.last_checkpoint
            self.mirrored = max(self.mirrored, known)

    def _take_mirror_target(self, event: Event) -> None:
        self.has_mirror = bool(event["target"])

    def _take_mirror_commit(self, event: Event) -> None:
        self.mirrored = max(self.mirrored, int(event["step"]))
        self.mirror_problem = ""

    def _take_mirror_fetch(self, event: Event) -> None:
        self.mirrored = max(self.mirrored, int(event["step"]))

    def _take_mirror_failed(self, event: Event) -> None:
        self.mirror_problem = str(event["reason"])

    def _take_quarantine(self, event: Event) -> None:
        self.quarantined.append(str(event["path"]))

    def _take_worker_exit(self, event: Event) -> None:
        if event["status"] != 0 and self._dead_since is None:
            # What it did after its last report is lost too.
            since = event["time"]
            known = not math.isnan(self._top_secs)
            self._dead_since = min(since, self._top_secs) if known else since


class _Pace:
    """Rates of step events, without keeping each of them."""

    def __init__(self) -> None:
        self.secs = 0.0
        self.data_secs = 0.0
        # Rates that differ by less than a hundredth are one: its newest, and how many.
        self._rates: dict[int, tuple[float, int]] = {}

    def add(self, num_steps: int, *, secs: float, data_secs: float) -> None:
        """One event of `num_steps` steps in `secs`."""
        if secs > 0 and num_steps > 0:
            self.secs += secs
            self.data_secs += data_secs
            rate = num_steps / secs
            key = round(100 * math.log(rate))
            self._rates[key] = rate, self._rates.get(key, (rate, 0))[1] + 1

    def median(self) -> float:
        """In steps a second; 0 without events."""
        left = sum(count for _, count in self._rates.values()) // 2
        for _, (rate, count) in sorted(self._rates.items()):
            left -= count
            if left < 0:
                return rate
        return 0.0


def summarize(events: Iterable[Event]) -> Summary:
    """Takes in one command's events, in the order of their happening."""
    summary = Summary()
    for event in events:
        summary.take(event)
    return summary


def _numbers(metrics: Any) -> dict[str, float]:
    # Those that JSON does not have are text, see `jaxft/events.py`.
    return {str(name): float(value) for name, value in metrics.items()}


def _from_to(first: float | None, last: float) -> str:
    if first is None or first == last:
        return f"{last:.4f}"
    return f"{first:.4f} -> {last:.4f}"
