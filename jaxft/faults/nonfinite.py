"""The host's rule on guarded steps; the guard itself is traced, in `train/step`.

World: host-only. Floor: a peer of `train` and `checkpoint`.
"""

from __future__ import annotations

import dataclasses

from jaxft.records import Fault, FaultError, FaultKind


@dataclasses.dataclass(kw_only=True)
class NonfiniteRule:
    """Stops a run that no longer learns.

    Args:
        max_in_a_row: this many non-finite steps one after the other end the run.
        guarded: whether such a step is not applied (`train.guard`).
    """

    max_in_a_row: int
    guarded: bool = True
    _in_a_row: int = 0

    def observe(self, step: int, *, finite: bool) -> None:
        """One step is finished; `step` counts it.

        Raises:
            FaultError: of kind NONFINITE.
        """
        self._in_a_row = 0 if finite else self._in_a_row + 1
        if self._in_a_row >= self.max_in_a_row:
            first = step - self._in_a_row + 1
            applied = "none of them was applied" if self.guarded else "all were applied"
            raise FaultError(
                Fault(
                    kind=FaultKind.NONFINITE,
                    step=step,
                    evidence=f"loss or gradient not finite in steps {first} to {step}; "
                    + applied,
                )
            )
