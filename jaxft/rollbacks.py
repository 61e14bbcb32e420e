"""Bad steps in a running worker: decide, durably, to go on from an earlier step.

World: device. Floor: above `build`, beside `loop`. Read `jaxft/faults/rollback.py`,
the pure decision, and `jaxft/checkpoint/decisions.py`, which makes it last, before
this file and `jaxft/worker.py`, which restores and goes on, after it.

Whatever ends the process in between, the next start finds either no decision, and
meets the bad steps again, or the decision, and does what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxft.build import Parts
from jaxft.checkpoint import decisions, layout, run_record, together, verify
from jaxft.config import RollbackConfig
from jaxft.data.iterator import batch_index
from jaxft.faults.nonfinite import BadStepsError
from jaxft.faults.rollback import (
    ResumePoint,
    RollbackPolicy,
    RollbackQuestion,
    Window,
)
from jaxft.faults.spikes import SpikeRule
from jaxft.records import Emit, Fault, FaultError, FaultKind


def make_spike_rule(config: RollbackConfig) -> SpikeRule | None:
    """The rule that the settings ask for; None where it is off."""
    if not config.spike_factor:
        return None
    return SpikeRule(
        factor=config.spike_factor,
        window=config.spike_window,
        num_steps=config.spike_steps,
    )


def roll_back(parts: Parts, bad: BadStepsError, *, emit: Emit) -> None:
    """Decides where the run goes on, and makes it last.

    Args:
        parts: of the run; its iterator stands where the bad steps were.
        bad: what was seen.
        emit: told of the bad steps; of the rollback the manager's own `emit` is.

    Raises:
        FaultError: of the kind of the bad steps: there is nowhere to go on from, or
            that was tried often enough. It says what was seen. Of kind SAVE_FAILED:
            the disk does not take the decision.
    """
    first_batch = batch_index(bad.first_step - 1, parts.iterator.skipped)
    emit(
        "bad_steps",
        fault=bad.fault.kind,
        step=bad.last_step,
        first_step=bad.first_step,
        first_batch=first_batch,
        evidence=bad.fault.evidence,
    )
    parts.manager.finish()
    to, skip, why = _decide(parts, bad, first_batch=first_batch)
    try:
        reason = f"{bad.fault.evidence}: {why}"
        parts.manager.rollback(to, reason=reason, skip=skip, cause=str(bad.fault.kind))
    except OSError as error:
        # As for a save: the disk is to blame, and the next start does what is left.
        text = f"{bad.fault.evidence}; no rollback: {error}"
        fault = Fault(kind=FaultKind.SAVE_FAILED, step=bad.last_step, evidence=text)
        raise FaultError(fault) from error


def _decide(
    parts: Parts, bad: BadStepsError, *, first_batch: int
) -> tuple[int, Window, str]:
    """Where to go on, without which batches, why; the primary process says it.

    Raises:
        FaultError: there is nowhere to go on from, or it was tried often enough.
    """
    told: Any = None
    with together.same_end("decide where to go on from"):
        if jax.process_index() == 0:
            told = _ask_policy(parts, bad, first_batch=first_batch)
    to, skip, text = together.from_primary(told)
    if to is None:
        fault = Fault(kind=bad.fault.kind, step=bad.fault.step, evidence=text)
        raise FaultError(fault)
    return to, (skip[0], skip[1]), text


def _ask_policy(
    parts: Parts, bad: BadStepsError, *, first_batch: int
) -> tuple[int | None, Window, str]:
    """The same, from what is on the disk; None, and why, for nowhere."""
    config = parts.config.rollback
    decided = decisions.read(parts.manager.root)
    mine = [one for one in decided.rollbacks if one.cause]
    points = _resume_points(parts, decided)
    policy = RollbackPolicy(
        max_rollbacks=config.max_rollbacks,
        near_batches=config.near_batches,
        skip_before=config.skip_before,
        skip_after=config.skip_after,
    )
    is_spike = bad.fault.kind is FaultKind.SPIKE
    while True:
        answer = policy.decide(
            RollbackQuestion(
                first_step=bad.first_step,
                first_batch=first_batch,
                margin_steps=config.spike_margin_steps if is_spike else 0,
                points=points,
                earlier=[one.skip for one in mine if one.skip],
            )
        )
        if answer.to is None:
            return None, answer.skip, _given_up(bad, answer.reason, earlier=mine)
        if _can_be_restored(layout.step_path(parts.manager.root, answer.to)):
            return answer.to, answer.skip, answer.reason
        points = [one for one in points if one.step != answer.to]


def _resume_points(parts: Parts, decided: decisions.Decisions) -> list[ResumePoint]:
    """The committed steps, and the batch that each would go on with."""
    points = []
    for step in parts.manager.steps():
        path = layout.step_path(parts.manager.root, step)
        try:
            record = run_record.read_record(path)
            windows = [(start, stop) for start, stop in record["data"]["skipped"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # The restore finds out what is wrong with it.
        windows += decided.skips_since(record["timeline"])
        points.append(ResumePoint(step=step, next_batch=batch_index(step, windows)))
    return points


def _can_be_restored(path: str) -> bool:
    """Whether a step is whole: those after it are about to be given up for it."""
    try:
        damaged = verify.verify_step(path, allow_unproven=True)
        return not damaged and verify.is_healthy(path)
    except (OSError, FaultError):
        return False


def _given_up(
    bad: BadStepsError, reason: str, *, earlier: Sequence[decisions.Rollback]
) -> str:
    lines = [f"{bad.fault.evidence}; given up: {reason}"]
    lines += [f"earlier, from step {one.origin}: {one.reason}" for one in earlier]
    return "\n".join(lines[:9])
