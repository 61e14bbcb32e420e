"""An exception that left the loop -> the fault it is.

World: host-only. Floor: a peer of `train` and `checkpoint`. Read
`jaxft/recovery/policy.py`, which decides what to do about it, next.
"""

from __future__ import annotations

import traceback

from jaxft.config import ConfigError
from jaxft.records import MAX_EVIDENCE_BYTES, Fault, FaultError, FaultKind

# XLA's status code for an allocation that does not fit; the message of the
# exception starts with it on every backend.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# JAX adds this note to every exception that passes through it. It says nothing about
# the failure, and would stand where a reader looks for the exception.
_JAX_NOTE = "JAX has removed its internal frames"
_HEADER = "Traceback (most recent call last):\n"


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
    return Fault(kind=FaultKind.EXCEPTION, step=step, evidence=_evidence(error))


def _evidence(error: BaseException) -> str:
    """The traceback without JAX's notes; both ends of the exception are kept.

    What does not fit is cut from the middle of a long message and from the outermost
    frames, and the text still reads as a traceback.
    """
    report = traceback.TracebackException.from_exception(error)
    _drop_notes(report)
    exception = "".join(report.format_exception_only())
    text = "".join(report.format())
    if len(text.encode()) <= MAX_EVIDENCE_BYTES:
        return text
    frames = text.removesuffix(exception)
    exception = _without_middle(exception, MAX_EVIDENCE_BYTES // 2)
    room = MAX_EVIDENCE_BYTES - len((_HEADER + exception).encode()) - 16
    kept = frames.encode()[-room:].decode(errors="ignore").partition("\n")[2]
    return f"{_HEADER}  ...\n{kept}{exception}"


def _drop_notes(report: traceback.TracebackException) -> None:
    """From the exception, what it came from, and the parts of a group."""
    if isinstance(notes := report.__notes__, list):
        report.__notes__ = [note for note in notes if _JAX_NOTE not in repr(note)]
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _drop_notes(other)


def _without_middle(text: str, max_bytes: int) -> str:
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    half = max_bytes // 2 - 8
    head, tail = data[:half], data[-half:]
    return f"{head.decode(errors='ignore')} [...] {tail.decode(errors='ignore')}"
