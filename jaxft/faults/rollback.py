"""Where a run goes on after bad steps, and without which batches: a pure decision.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/faults/nonfinite.py` and `jaxft/faults/spikes.py`, which see the bad steps,
before this file and `jaxft/rollbacks.py`, which acts on the decision, after it.

The batches around the first bad one are left out for good: trained on once more, the
same state would meet the same end. Where that did not help, twice as many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Window = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A committed step that a run could go on from.

    Attributes:
        step: its label: finished step attempts.
        next_batch: number of the first batch that it has not been trained on.
    """

    step: int
    next_batch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackQuestion:
    """What is known when steps were bad.

    Attributes:
        first_step: the first bad step.
        first_batch: the batch that it was trained on.
        margin_steps: how far before it the state must be good.
        points: committed steps, ascending.
        earlier: windows of batches that earlier rollbacks of this kind left out, in
            order.
    """

    first_step: int
    first_batch: int
    margin_steps: int = 0
    points: Sequence[ResumePoint]
    earlier: Sequence[Window] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackAnswer:
    """What to do.

    Attributes:
        to: the step to go on from; None: give up.
        skip: half-open window of batches to leave out from now on.
        reason: one line.
    """

    to: int | None
    skip: Window = (0, 0)
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollbackPolicy:
    """Goes back and leaves out a window, a bounded number of times.

    Attributes:
        max_rollbacks: so many near each other, then the run ends.
        near_batches: how far apart they are near.
        skip_before: batches left out before the first bad one.
        skip_after: batches left out after it.
    """

    max_rollbacks: int
    near_batches: int
    skip_before: int
    skip_after: int

    def decide(self, question: RollbackQuestion) -> RollbackAnswer:
        """Where to go on.

        The newest step that has trained on no batch of the window; where there is
        none, the oldest one, and the window begins with its next batch.
        """
        bad = question.first_batch
        near = [
            one for one in question.earlier if abs(bad - one[1]) < self.near_batches
        ]
        if len(near) >= self.max_rollbacks:
            times = "once" if len(near) == 1 else f"{len(near)} times"
            what = f"rolled back {times} within {self.near_batches} batches already"
            return RollbackAnswer(to=None, reason=what if near else "rollbacks are off")
        scale = 2 ** _num_in_vain(bad, question.earlier)
        start = max(0, bad - scale * self.skip_before)
        stop = bad + scale * self.skip_after + 1
        good = [one for one in question.points if one.step < question.first_step]
        if not good:
            problem = f"no checkpoint from before step {question.first_step}"
            return RollbackAnswer(to=None, reason=problem)
        latest = question.first_step - 1 - question.margin_steps
        fitting = [p for p in good if p.step <= latest and p.next_batch <= start]
        point = fitting[-1] if fitting else good[0]
        skip = max(start, point.next_batch), stop
        reason = f"back to step {point.step}, without batches {skip[0]} to {stop - 1}"
        return RollbackAnswer(to=point.step, skip=skip, reason=reason)


def _num_in_vain(bad: int, earlier: Sequence[Window]) -> int:
    """How many rollbacks in a row, up to now, were at this place."""
    count = 0
    for start, stop in reversed(earlier):
        width = stop - start
        if not start - width <= bad <= stop + width:
            break
        count += 1
        bad = start
    return count
