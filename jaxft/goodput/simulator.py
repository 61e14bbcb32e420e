"""What a run makes of its time under failures: a simulation by events.

World: host-only. Floor: goodput, above `failure_times`. Read `jaxft/intervals.py` and
`jaxft/goodput/failure_times.py` before and `jaxft/cli/simulate.py` after.

The events are failures, ends of restarts, begins and commits of saves. A save begins at
a step's border, blocks the loop, then is written while the steps go on more slowly; one
that has not committed at a failure is lost, and the step before counts. A restart takes
its time, and a failure in it begins it anew. Between events everything is known, so
many histories go on side by side, each by one event at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxft import intervals
from jaxft.intervals import SaveCost

# A plan that differs by less is kept, as in a run; see `auto_interval`.
_MIN_CHANGE = 0.1
# How much longer a history is than when it was looked at last.
_MIN_GROWTH = 0.05
# Steps that a sum of floats may be short of a border.
_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take in a run.

    Attributes:
        step_secs: one step beside no save.
        save: one save.
        restart_secs: from a failure until the work goes on: noticing, starting,
            restoring, compiling. The first start takes as long.
    """

    step_secs: float
    save: SaveCost
    restart_secs: float


class SavePlan(Protocol):
    """When the next save begins. Arrays have one entry for each history."""

    @property
    def is_fixed(self) -> bool:
        """Whether it never changes its mind."""
        ...

    def secs(self, num_failures: np.ndarray, now_secs: np.ndarray) -> np.ndarray:
        """Seconds after the last save at which one is due; 0 for any time."""
        ...

    def steps(self) -> int:
        """Multiple of steps at which one is due; 0 for none."""
        ...


@dataclasses.dataclass(frozen=True)
class EverySecs:
    """A save when the last one is so long ago."""

    every_secs: float
    is_fixed = True

    def secs(self, num_failures: np.ndarray, now_secs: np.ndarray) -> np.ndarray:
        """Always the same."""
        del num_failures
        return np.full(now_secs.shape, self.every_secs)

    def steps(self) -> int:
        """None."""
        return 0


@dataclasses.dataclass(frozen=True)
class EverySteps:
    """A save at multiples of a number of steps."""

    num_steps: int
    is_fixed = True

    def secs(self, num_failures: np.ndarray, now_secs: np.ndarray) -> np.ndarray:
        """Never by time."""
        del num_failures
        return np.full(now_secs.shape, np.inf)

    def steps(self) -> int:
        """The number."""
        return self.num_steps


@dataclasses.dataclass(frozen=True)
class AutoSecs:
    """What `auto` does in a run that has measured a save.

    Attributes:
        expected_secs: between failures, as somebody guessed.
        cost: of a save.
    """

    expected_secs: float
    cost: SaveCost
    is_fixed = False

    def secs(self, num_failures: np.ndarray, now_secs: np.ndarray) -> np.ndarray:
        """The plan for the failures so far."""
        rate = intervals.failure_rate(
            self.expected_secs, num_failures=num_failures, secs=now_secs
        )
        return intervals.plan_secs(self.cost, 1 / rate)

    def steps(self) -> int:
        """None."""
        return 0


@dataclasses.dataclass(frozen=True)
class Earliest:
    """Saves by whichever of `plans` comes first.

    Multiples of steps are counted from the save before, which a save by time in
    between moves: a little too late.
    """

    plans: tuple[SavePlan, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether all of them are."""
        return all(plan.is_fixed for plan in self.plans)

    def secs(self, num_failures: np.ndarray, now_secs: np.ndarray) -> np.ndarray:
        """The shortest."""
        times = [plan.secs(num_failures, now_secs) for plan in self.plans]
        return np.min(times, axis=0)

    def steps(self) -> int:
        """The smallest."""
        return min((num for plan in self.plans if (num := plan.steps())), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where the time of each history went; the four kinds of seconds are all of it.

    Attributes:
        horizon_secs: how long each history is.
        work_secs: [histories] steps that stayed, at the pace of steps beside no save.
        lost_secs: [histories] steps that a failure took back.
        save_secs: [histories] blocking and slow-down of saves.
        restart_secs: [histories] starts and restarts.
        num_failures: [histories] int64.
        num_saves: [histories] int64, that began.
        every_secs: [histories] work between two saves at the end.
    """

    horizon_secs: float
    work_secs: np.ndarray
    lost_secs: np.ndarray
    save_secs: np.ndarray
    restart_secs: np.ndarray
    num_failures: np.ndarray
    num_saves: np.ndarray
    every_secs: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """[histories] share of the time that is work that stayed."""
        return self.work_secs / self.horizon_secs

    def quantiles(self, shares: Sequence[float] = (0.05, 0.5, 0.95)) -> list[float]:
        """Of the goodput."""
        return np.quantile(self.goodput, shares).tolist()


def simulate(
    plan: SavePlan, costs: Costs, *, failures: np.ndarray, horizon_secs: float
) -> Outcome:
    """Runs all histories to their end.

    Args:
        plan: when saves begin.
        costs: what things take.
        failures: from `draw_failures`.
        horizon_secs: end of each history; what is done by then stays.
    """
    runs = _Runs(plan, costs, failures=failures, horizon_secs=horizon_secs)
    while (active := np.flatnonzero(runs.now < horizon_secs)).size:
        active = runs.restart(active)
        runs.go_on(active)
    return Outcome(
        horizon_secs=horizon_secs,
        work_secs=runs.work,
        lost_secs=runs.lost,
        save_secs=runs.saving,
        restart_secs=runs.restarting,
        num_failures=runs.num_failures,
        num_saves=runs.num_saves,
        every_secs=runs.num_steps * costs.step_secs,
    )


class _Runs:
    """The state of all histories."""

    def __init__(
        self,
        plan: SavePlan,
        costs: Costs,
        *,
        failures: np.ndarray,
        horizon_secs: float,
    ):
        num = len(failures)
        self._plan, self._costs = plan, costs
        self._failures, self._horizon = failures, horizon_secs
        self.now = np.zeros(num)
        self.work, self.lost = np.zeros(num), np.zeros(num)
        self.saving, self.restarting = np.zeros(num), np.zeros(num)
        self.num_failures = np.zeros(num, np.int64)
        self.num_saves = np.zeros(num, np.int64)
        self.num_steps = np.zeros(num, np.int64)  # between two saves
        self._every = np.zeros(num)
        self._is_down = np.ones(num, bool)
        # Work of the save in flight, which a failure before its commit loses.
        self._pending = np.zeros(num)

    def restart(self, active: np.ndarray) -> np.ndarray:
        """Brings up those that are down; the ones that are up."""
        down = active[self._is_down[active]]
        ready = self.now[down] + self._costs.restart_secs
        until = np.minimum(np.minimum(ready, self._next_failure(down)), self._horizon)
        self.restarting[down] += until - self.now[down]
        self.now[down] = until
        came_up = (ready <= until) & (until < self._horizon)
        failed = ~came_up & (until < self._horizon)
        self.num_failures[down[failed]] += 1
        self._is_down[down[came_up]] = False
        self._pending[down[came_up]] = 0.0
        self._plan_anew(down[came_up], is_fresh=True)
        fresh = down[came_up]
        self._advance(fresh, np.ones(len(fresh), np.int64), is_writing=False)
        return active[~np.isin(active, down)]

    def go_on(self, up: np.ndarray) -> None:
        """Work from the begin of one save on, for as long as the plan stays."""
        if not up.size:
            return
        left = self._horizon - self.now[up]
        if not self._plan.is_fixed:
            self._plan_anew(up, is_fresh=False)
            left = np.minimum(left, _MIN_GROWTH * self.now[up])
        num = np.ceil(left / self._period(up, is_writing=True)).astype(np.int64)
        self._advance(up, np.maximum(num, 1), is_writing=True)

    def _next_failure(self, runs: np.ndarray) -> np.ndarray:
        return self._failures[runs, self.num_failures[runs]]

    def _plan_anew(self, runs: np.ndarray, *, is_fresh: bool) -> None:
        """Sets the steps between two saves."""
        secs = self._plan.secs(self.num_failures[runs], self.now[runs])
        if not is_fresh:
            before = self._every[runs]
            is_near = np.abs(secs - before) < _MIN_CHANGE * before
            secs = np.where(is_near, before, secs)
        self._every[runs] = secs
        self.num_steps[runs] = self._count_steps(secs)

    def _count_steps(self, secs: np.ndarray) -> np.ndarray:
        """Steps until the first border at which a save may begin and is due."""
        step, save = self._costs.step_secs, self._costs.save
        # The steps beside the write are slower, so fewer of them fit.
        slowed = np.minimum(secs / (1 + save.slowdown), secs - save.slow_secs)
        slowed = np.where(secs >= save.write_secs, secs - save.slow_secs, slowed)
        limit = self._plan.steps() or np.inf
        num = np.minimum(np.ceil(slowed / step - _EPSILON), limit)
        num = np.clip(num, 1, self._horizon / step + 1)
        # Until the one before has committed a save that is due is skipped.
        least = np.ceil((save.write_secs - save.slow_secs) / step - _EPSILON)
        skips = np.ceil(least / num - _EPSILON) if self._plan.is_fixed else 1
        return np.maximum(num * np.maximum(skips, 1), least).astype(np.int64)

    def _period(self, runs: np.ndarray, *, is_writing: bool) -> np.ndarray:
        """From the end of one save's blocking to that of the next."""
        save = self._costs.save
        slow_secs = save.slow_secs if is_writing else 0.0
        work_secs = self.num_steps[runs] * self._costs.step_secs
        return work_secs + slow_secs + save.blocking_secs

    def _advance(self, runs: np.ndarray, num: np.ndarray, *, is_writing: bool) -> None:
        """Goes on by `num` periods, or to the failure or end that comes before."""
        if not runs.size:
            return
        save = self._costs.save
        work_secs = self.num_steps[runs] * self._costs.step_secs
        period = self._period(runs, is_writing=is_writing)
        limit = np.minimum(self._next_failure(runs), self._horizon)
        is_cut = self.now[runs] + num * period > limit
        until = np.where(is_cut, limit, self.now[runs] + num * period)
        secs = until - self.now[runs]
        # Whole periods, and the part of the one that was cut.
        whole = np.where(is_cut, np.minimum(np.floor(secs / period), num - 1), num)
        rest = np.where(is_cut, np.maximum(secs - whole * period, 0.0), 0.0)
        writes = is_writing | (whole > 0)
        slowed = rest / (1 + save.slowdown)
        beyond = np.maximum(rest - save.slow_secs, 0.0)
        part = np.where(rest <= save.write_secs, slowed, beyond)
        part = np.minimum(np.where(writes, part, rest), work_secs)
        done = whole * work_secs + part
        # The newest save of this stretch, or that from before, may not be committed.
        newest = np.where(whole > 0, work_secs, self._pending[runs])
        is_lost = writes & (rest < save.write_secs)
        earlier = self._pending[runs] + whole * work_secs - newest
        kept = earlier + np.where(is_lost, 0.0, newest)
        ends = is_cut & (limit >= self._horizon)
        fails = is_cut & ~ends
        total = self._pending[runs] + done
        self.work[runs] += np.where(ends, total, np.where(fails, kept, earlier))
        self.lost[runs] += np.where(fails, total - kept, 0.0)
        self.saving[runs] += secs - done
        self._pending[runs] = np.where(is_cut, 0.0, newest)
        self.num_saves[runs] += whole.astype(np.int64)
        self.num_failures[runs] += fails
        self._is_down[runs] |= fails
        self.now[runs] = until
