"""The host's rule on guarded steps; the guard itself is traced, in `train/step`.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/faults/spikes.py` beside it and `jaxft/faults/rollback.py`, which decides where
the run goes on, after it.
"""

from __future__ import annotations

import dataclasses

from jaxft.records import Fault, FaultError, FaultKind


class BadStepsError(FaultError):
    """Steps in a row that a run must not go on from.

    Attributes:
        fault: what was seen.
        first_step: the first of them, as the count of finished attempts.
        last_step: the last of them.
    """

    def __init__(self, fault: Fault, *, first_step: int):
        super().__init__(fault)
        self.first_step = first_step
        self.last_step = fault.step


@dataclasses.dataclass(kw_only=True)
class NonfiniteRule:
    """Says when a run no longer learns.

    Args:
        max_in_a_row: so many non-finite steps one after the other are too many.
        guarded: whether such a step is not applied (`train.guard`).

    Attributes:
        in_a_row: non-finite steps since the last finite one.
    """

    max_in_a_row: int
    guarded: bool = True
    in_a_row: int = 0

    def observe(self, step: int, *, finite: bool) -> None:
        """One step is finished; `step` counts it.

        Raises:
            BadStepsError: of kind NONFINITE.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if self.in_a_row >= self.max_in_a_row:
            first = step - self.in_a_row + 1
            applied = "none of them was applied" if self.guarded else "all were applied"
            fault = Fault(
                kind=FaultKind.NONFINITE,
                step=step,
                evidence=f"loss or gradient not finite in steps {first} to {step}; "
                + applied,
            )
            raise BadStepsError(fault, first_step=first)
