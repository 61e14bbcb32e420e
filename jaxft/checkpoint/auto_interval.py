"""The interval of `auto`: measured at every border, planned anew after every save.

World: host-only. Floor: checkpoint, above `policies`. Read `jaxft/intervals.py` and
`jaxft/save_costs.py` before, and `jaxft/checkpoint/manager.py`, its one user, after.

Until a save was measured, by this process or an earlier one, the first one comes soon:
it shows what a save costs. Resumes do not depend on when saves happen.
"""

from __future__ import annotations

import math
import threading
from typing import Any

from jaxft import intervals, records
from jaxft.checkpoint import policies
from jaxft.intervals import Experience, SaveCost
from jaxft.save_costs import SaveCosts

# When the first save comes, while nobody knows what one costs.
FIRST_SECS = 10.0
# A plan that differs by less is no news.
_MIN_CHANGE = 0.1


class AutoInterval:
    """Says at each border how long after the last save the next one is due.

    Args:
        emit: the events of the run; those of saves pass through `observe`.
        known: from before this process.
    """

    def __init__(self, emit: records.Emit, *, known: Experience):
        self._emit = emit
        self._known = known
        self._costs = SaveCosts()
        if known.cost is not None:
            self._costs.remember(known.cost)
        self._step_in_flight = -1
        self._planned_for = -1
        self._num_plans = 0
        self._secs = FIRST_SECS
        self._is_costly = False
        self._begun_secs: float | None = None
        self._last: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def observe(self, kind: str, /, **fields: Any) -> None:
        """An `Emit` that listens and passes on; from any thread."""
        with self._lock:
            if kind == "save_start":
                self._step_in_flight = fields["step"]
                self._costs.begin(fields["blocking_secs"])
            elif fields.get("step") == self._step_in_flight:
                if kind == "save_commit":
                    self._costs.commit(fields["secs"])
                elif kind in ("save_failed", "save_unhealthy"):
                    self._costs.give_up()
        self._emit(kind, **fields)

    def secs(self, question: records.SaveQuestion) -> float:
        """The interval at this border; infinite while a save is in flight."""
        with self._lock:
            news = self._take_border(question)
        for kind, fields in news:
            self._emit(kind, **fields)
        with self._lock:
            if self._costs.is_writing or self._begun_secs is None:
                return math.inf
            # Before the first border there was nothing to lose: it compiled.
            return self._secs + max(0.0, self._begun_secs - question.last_secs)

    def _take_border(
        self, question: records.SaveQuestion
    ) -> list[tuple[str, dict[str, Any]]]:
        step, now_secs = question.step, question.now_secs
        if self._begun_secs is None:
            self._begun_secs = now_secs
        if self._last is not None and step > self._last[0]:
            self._costs.stretch(
                now_secs - self._last[1], num_steps=step - self._last[0]
            )
        self._last = step, now_secs
        if self._planned_for == self._costs.num_known:
            return []
        self._planned_for = self._costs.num_known
        return self._plan(self._known.secs + now_secs - self._begun_secs)

    def _plan(self, seen_secs: float) -> list[tuple[str, dict[str, Any]]]:
        """Sets the interval; the events that tell of it."""
        if (cost := self._costs.cost()) is None:
            return []
        rate = intervals.failure_rate(
            self._known.expected_hours * 3600,
            num_failures=self._known.num_failures,
            secs=seen_secs,
        )
        mtbf_secs = 1 / float(rate)
        secs = float(intervals.plan_secs(cost, mtbf_secs))
        # What was there before the first plan is none.
        earlier = self._secs if self._num_plans else 0.0
        if earlier and abs(secs / earlier - 1) < _MIN_CHANGE:
            return []
        self._num_plans += 1
        self._secs = secs
        return self._news(cost, mtbf_secs, earlier=earlier, seen_secs=seen_secs)

    def _news(
        self, cost: SaveCost, mtbf_secs: float, *, earlier: float, seen_secs: float
    ) -> list[tuple[str, dict[str, Any]]]:
        known, secs = self._known, self._secs
        # Where a save costs nothing there is no period either.
        overhead = cost.lost_secs / max(secs + cost.blocking_secs, 1e-9)
        goodput = intervals.goodput(
            secs - cost.slow_secs,
            cost_secs=cost.lost_secs,
            mtbf_secs=mtbf_secs,
            restart_secs=known.restart_secs,
        )
        fields = {
            "secs": secs,
            "earlier_secs": earlier,
            "blocking_secs": cost.blocking_secs,
            "write_secs": cost.write_secs,
            "slowdown": cost.slowdown,
            "num_saves": self._costs.num_known,
            "failure_hours": mtbf_secs / 3600,
            "num_failures": known.num_failures,
            "hours": seen_secs / 3600,
            "restart_secs": known.restart_secs,
            "overhead": overhead,
            "goodput": float(goodput),
        }
        news: list[tuple[str, dict[str, Any]]] = [("interval", fields)]
        was_costly = self._is_costly
        self._is_costly = overhead > intervals.COSTLY_OVERHEAD
        if self._is_costly and not was_costly:
            reason = (
                f"a save takes {cost.lost_secs:.3g} s from the work, and a failure is "
                f"expected every {mtbf_secs / 3600:.3g} h: rarer saves would lose more"
            )
            told = {"secs": secs, "overhead": overhead, "reason": reason}
            news.append(("interval_costly", told))
        return news


def make_policy(
    text: str,
    *,
    emit: records.Emit,
    known: Experience | None = None,
    num_processes: int = 1,
) -> tuple[records.SavePolicy, records.Emit]:
    """Reads a save policy, `auto` among others.

    Args:
        text: the policy.
        emit: where events go.
        known: what `auto` goes by besides its own measurements.
        num_processes: that are to agree on its answers.

    Returns:
        The policy, and where events are to go from now on.

    Raises:
        ConfigError: see `policies.parse_save`.
    """
    known = known or Experience()
    auto = AutoInterval(emit, known=known)
    policy = policies.parse_save(text, num_processes=num_processes, interval=auto.secs)
    return policy, auto.observe if policies.names_auto(text) else emit
