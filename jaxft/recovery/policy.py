"""What to do after a worker's death: a pure decision over the history of deaths.

World: host-only. Floor: recovery, above `events`. Read `jaxft/records.py` before this
file and `jaxft/recovery/supervisor.py`, which acts on the decisions, after it.

The budget belongs to one start of the command and is not written down: a supervisor
that is started again begins with a full one.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
from collections.abc import Sequence

from jaxft.records import EXIT_CODES, ExitCode, FaultKind

# A new attempt would meet the same end: the cause is outside of the run's luck.
NEVER_RESTARTED = frozenset(
    {
        FaultKind.CONFIG,
        FaultKind.WORKDIR_IN_USE,
        FaultKind.STOPPED,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.NONFINITE,
        FaultKind.SPIKE,
        FaultKind.NO_CHECKPOINT,
    }
)
# Where a traceback begins, with the margin that the parts of a group have.
_TRACEBACK = re.compile(
    r"^([ +|]*)(?:Exception Group )?Traceback \(most recent call last\):$", re.MULTILINE
)


class CacheMode(enum.StrEnum):
    """How a worker uses the persistent compile cache."""

    KEEP = "keep"
    OFF = "off"
    FRESH = "fresh"


class ActionKind(enum.StrEnum):
    """What the supervisor does next."""

    RESTART = "restart"
    STOP = "stop"
    FINISH = "finish"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        kind: what ended it; None when the run is finished.
        status: exit status; -n for signal n.
        first_step: first step it finished; -1 for none.
        last_step: last step it is known to have finished or to have failed at; -1
            for none.
        committed_step: newest step it is known to have found or committed; -1 for none.
        reached_first_step: it finished a step.
        evidence: text of the fault, for an exception its traceback.
        cache: how it used the compile cache.
    """

    kind: FaultKind | None
    status: int
    first_step: int = -1
    last_step: int = -1
    committed_step: int = -1
    reached_first_step: bool = False
    evidence: str = ""
    cache: CacheMode = CacheMode.KEEP

    @property
    def summary(self) -> str:
        """One line: of a traceback the exception itself, else the last line."""
        text = self.evidence
        if found := list(_TRACEBACK.finditer(text)):
            margin = len(found[-1][1])
            for line in text[found[-1].end() :].splitlines():
                if (rest := line[margin:]) and not rest[0].isspace():  # No frame.
                    return rest.strip()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else str(self.kind or "finished")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """What to do, and why.

    Attributes:
        kind: restart, stop or finish.
        cause: a `FaultKind`, or "finished".
        reason: one line.
        verdict: of that, why it is not restarted once more; empty where the kind of
            failure says so.
        exit_code: of the command, if this ends it.
        delay_secs: wait before a restart.
        cache: how the next worker uses the compile cache.
        budget_left: restarts left after this one.
    """

    kind: ActionKind
    cause: str
    reason: str
    exit_code: ExitCode
    verdict: str = ""
    delay_secs: float = 0.0
    cache: CacheMode = CacheMode.KEEP
    budget_left: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Restarts within a budget, and stops a loop that gets nowhere.

    Progress is a new highest step. A restart costs one, or two after a worker that
    made no progress; a start is allowed while anything is left, so that
    `max_restarts=1` is one restart whatever came before it.

    Attributes:
        max_restarts: size of the budget.
        refill_steps: new steps that give one restart back, never above the size.
        backoff_secs: wait before the second restart in a row without progress;
            it doubles from there on.
        backoff_max_secs: longest wait.
    """

    max_restarts: int
    refill_steps: int
    backoff_secs: float
    backoff_max_secs: float

    def decide(self, history: Sequence[WorkerExit]) -> Action:
        """What to do after the last of `history`, which was restarted until then."""
        last = history[-1]
        gains = _new_steps(history)
        budget = self._budget(gains[:-1])
        if last.kind is None:
            return Action(
                kind=ActionKind.FINISH,
                cause="finished",
                reason="finished",
                exit_code=ExitCode.FINISHED,
                budget_left=budget,
            )
        if last.kind in NEVER_RESTARTED:
            return _stop(last, budget_left=budget)
        if _happened_before(history):
            return _stop(last, verdict="the same error again", budget_left=budget)
        if _no_save_works(history):
            return _stop(last, verdict="saving failed again", budget_left=budget)
        before = min(self.max_restarts, budget + self._refills(gains))
        if before <= 0:
            return _give_up(history, gains)
        cache = _next_cache(history)
        left = self._budget(gains)
        note = f", compile cache {cache}" if cache is not CacheMode.KEEP else ""
        return Action(
            kind=ActionKind.RESTART,
            cause=str(last.kind),
            reason=last.summary + note,
            exit_code=EXIT_CODES[last.kind],
            delay_secs=self._delay(gains),
            cache=cache,
            budget_left=left,
        )

    def _refills(self, gains: Sequence[int]) -> int:
        """Restarts given back by the last of `gains`."""
        earlier = sum(gains[:-1])
        return (earlier + gains[-1]) // self.refill_steps - earlier // self.refill_steps

    def _budget(self, gains: Sequence[int]) -> int:
        """What is left after a restart for each of `gains`."""
        left = self.max_restarts
        for end in range(1, len(gains) + 1):
            left = min(self.max_restarts, left + self._refills(gains[:end]))
            left = max(0, left - (1 if gains[end - 1] > 0 else 2))
        return left

    def _delay(self, gains: Sequence[int]) -> float:
        num_vain = 0
        for gain in reversed(gains):
            if gain > 0:
                break
            num_vain += 1
        if num_vain <= 1:
            return 0.0
        # The exponent is bounded because a float is.
        doubled = self.backoff_secs * 2.0 ** min(num_vain - 2, 60)
        return min(doubled, self.backoff_max_secs)


def _stop(last: WorkerExit, *, verdict: str = "", budget_left: int) -> Action:
    kind = last.kind or FaultKind.KILLED
    reason = last.summary
    if verdict:
        reason = f"{verdict} at step {last.last_step}: {reason}"
    return Action(
        kind=ActionKind.STOP,
        cause=str(kind),
        reason=reason,
        verdict=verdict,
        exit_code=EXIT_CODES[kind],
        budget_left=budget_left,
    )


def _give_up(history: Sequence[WorkerExit], gains: Sequence[int]) -> Action:
    verdict = (
        f"no restart left: {len(history)} workers died, "
        f"{sum(gain == 0 for gain in gains)} of them without progress"
    )
    texts = {_without_secs(worker.summary): worker.summary for worker in history}
    counts = collections.Counter(_without_secs(worker.summary) for worker in history)
    cause, count = counts.most_common(1)[0]
    reason = (
        f"{verdict}, the last at step {history[-1].last_step}; "
        f"the cause {count} times: {texts[cause]}"
    )
    stop = _stop(history[-1], verdict=verdict, budget_left=0)
    return dataclasses.replace(stop, reason=reason)


def _new_steps(history: Sequence[WorkerExit]) -> list[int]:
    """For each worker, the steps it finished beyond all earlier ones."""
    gains = []
    highest = -1
    for worker in history:
        gain = 0
        if worker.reached_first_step:
            gain = max(0, worker.last_step - max(highest, worker.first_step - 1, 0))
        gains.append(gain)
        highest = max(highest, worker.last_step)
    return gains


def _happened_before(history: Sequence[WorkerExit]) -> bool:
    """Whether the last exception was raised before, at the same step and place."""
    last = history[-1]
    if last.kind is not FaultKind.EXCEPTION or not last.evidence:
        return False
    return any(
        worker.kind is FaultKind.EXCEPTION
        and worker.last_step == last.last_step
        and _without_addresses(worker.evidence) == _without_addresses(last.evidence)
        for worker in history[:-1]
    )


def _no_save_works(history: Sequence[WorkerExit]) -> bool:
    """Whether saving failed twice in a row and nothing was committed in between."""
    if [worker.kind for worker in history[-2:]] != [FaultKind.SAVE_FAILED] * 2:
        return False
    before = max(worker.committed_step for worker in history[:-1])
    return history[-1].committed_step <= before


def _without_secs(text: str) -> str:
    """Two hangs at one place are one cause, however long each of them took."""
    return re.sub(r"\d+\.\d+ s\b", "s", text)


def _without_addresses(text: str) -> str:
    """Object addresses differ from process to process; the error is the same."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)


def _next_cache(history: Sequence[WorkerExit]) -> CacheMode:
    """Takes the compile cache out of the suspects after two deaths before a step."""
    if history[-1].cache is CacheMode.OFF:
        return CacheMode.FRESH
    streak = []
    for worker in reversed(history):
        if worker.reached_first_step:
            break
        streak.append(worker.cache)
    if len(streak) >= 2 and CacheMode.OFF not in streak:
        return CacheMode.OFF
    return CacheMode.KEEP
