"""An exception that left the loop -> the fault it is.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/recovery/policy.py`, which decides what to do about it, next.
"""

from __future__ import annotations

import traceback

from jaxft.config import ConfigError
from jaxft.records import Fault, FaultError, FaultKind

# XLA's status code for an allocation that does not fit; the message of the
# exception starts with it on every backend.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def fault_of(error: BaseException, *, step: int = -1) -> Fault:
    """Says what `error` is: a fault of its own, bad config, no memory, or a bug."""
    if isinstance(error, FaultError):
        return error.fault
    if isinstance(error, ConfigError):
        return Fault(kind=FaultKind.CONFIG, step=step, evidence=str(error))
    first_line = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY in first_line:
        return Fault(
            kind=FaultKind.OUT_OF_MEMORY,
            step=step,
            evidence=f"{first_line}\nlower data.global_batch, raise "
            "train.num_microbatches or mesh.fsdp, or choose a remat.plan",
        )
    text = "".join(traceback.format_exception(error))
    return Fault(kind=FaultKind.EXCEPTION, step=step, evidence=text)
