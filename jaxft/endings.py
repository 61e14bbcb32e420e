"""How a command's end is told: one line for people, from what is known of it.

World: host-only. Floor: below `main`, which tells it. Read `jaxft/records.py`, whose
faults these are, before this file.
"""

from __future__ import annotations

from jaxft.records import Fault, FaultKind
from jaxft.recovery.supervisor import Outcome

_WORDS = {
    FaultKind.KILLED: "crashed",
    FaultKind.EXCEPTION: "crashed",
    FaultKind.CONFIG: "refused",
    FaultKind.NONFINITE: "not finite",
    FaultKind.HANG: "hung",
    FaultKind.PEER_LOST: "lost another process",
    FaultKind.NO_CHECKPOINT: "no usable checkpoint",
}


def stop_fault(reason: str) -> Fault:
    """Somebody or something asked the run to stop."""
    return Fault(kind=FaultKind.STOPPED, evidence=f"stopped by {reason}")


def refusal(outcome: Outcome) -> str:
    """What ended the run before it wrote anything."""
    fault = outcome.fault
    if fault is None or fault.kind is FaultKind.STOPPED:
        return f"{outcome.reason} before the first step"
    return evidence_of(fault)


def ending_of(fault: Fault | None, *, reason: str, verdict: str = "") -> str:
    """The summary's first row: short, the evidence is told above it."""
    if fault is None:
        return "finished"
    code = f"(exit {int(fault.exit_code)})"
    if fault.kind is FaultKind.STOPPED:
        return f"{reason}; the same command goes on from here {code}"
    what = _WORDS.get(fault.kind, fault.kind.replace("_", " "))
    where = f" at step {fault.step}" if fault.step >= 0 else ""
    why = f": {verdict}" if verdict else ""
    return f"{what}{where}{why} {code}"


def evidence_of(fault: Fault | None) -> str:
    """What was seen of a fault; empty for none."""
    return "" if fault is None else fault.evidence.rstrip() or str(fault.kind)
