"""Bad data on purpose: two more fields of a batch, by which the step multiplies.

World: host-only. Floor: faults. Read `jaxft/faults/plan.py` before and
`jaxft/train/injected.py`, the traced side, after this file.

A batch keeps its poison, as real bad data would: whenever its number is drawn, after
a restart too, it is bad again, and only skipping it helps. Integer tokens have no
NaN; so the batch gets a factor of its loss and one of its gradient for each row, 1
where all is well. A run without such faults has neither the fields nor their factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxft.faults.plan import Injected, PlannedFault

LOSS_FIELD = "jaxft_loss_factor"
GRADIENT_FIELD = "jaxft_gradient_factor"

HostBatch = Mapping[str, np.ndarray]


class Batches(Protocol):
    """What can be poisoned: the stream that a data iterator reads."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content and the order of the stream."""
        ...

    def probe(self) -> str:
        """A hash of the order as it really is."""
        ...

    def read(self, batch_number: int, /) -> dict[str, np.ndarray]:
        """One batch; a pure function of its number."""
        ...


class PoisonedBatches:
    """A stream of batches, some of which are bad.

    Args:
        batches: the stream.
        faults: those of the plan that are bad data.
    """

    def __init__(self, batches: Batches, faults: Sequence[PlannedFault]):
        self._batches = batches
        self._faults = faults

    @property
    def fingerprint(self) -> str:
        """That of the stream: the poison comes and goes with the plan."""
        return self._batches.fingerprint

    def probe(self) -> str:
        """As the stream says."""
        return self._batches.probe()

    def read(self, batch_number: int, /) -> dict[str, np.ndarray]:
        """One batch with its two factors, float32 [rows] each."""
        return with_factors(
            self._batches.read(batch_number), *factors(self._faults, batch_number)
        )


def factors(faults: Sequence[PlannedFault], batch_number: int) -> tuple[float, float]:
    """What the loss and the gradient of a batch are multiplied by."""
    loss = gradient = 1.0
    for fault in faults:
        if not fault.first <= batch_number <= fault.last:
            continue
        match fault.kind:
            case Injected.NAN_GRAD:
                gradient = math.nan
            case Injected.BAD_BATCH:
                loss = gradient = math.nan
            case Injected.SPIKE:
                loss, gradient = loss * fault.value, gradient * fault.value
    return loss, gradient


def with_factors(
    batch: HostBatch, loss: float = 1.0, gradient: float = 1.0
) -> dict[str, np.ndarray]:
    """The batch and its two factors."""
    rows = len(next(iter(batch.values())))
    values = {LOSS_FIELD: loss, GRADIENT_FIELD: gradient}
    fields = {name: np.full(rows, x, np.float32) for name, x in values.items()}
    return dict(batch) | fields
