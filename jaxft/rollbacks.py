"""Bad steps in a running worker: decide, durably, to go on from an earlier step.

World: device. Floor: above `build`, beside `loop`. Read `jaxft/faults/rollback.py`,
the pure decision, and `jaxft/checkpoint/decisions.py`, which makes it last, before
this file and `jaxft/worker.py`, which restores and goes on, after it.

Whatever ends the process in between, the next start finds either no decision, and
meets the bad steps again, or the decision, and does what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxft.build import Parts
from jaxft.checkpoint import decisions, layout, run_record, verify
from jaxft.config import RollbackConfig
from jaxft.data.iterator import batch_index
from jaxft.faults.nonfinite import BadStepsError
from jaxft.faults.rollback import ResumePoint, RollbackPolicy, RollbackQuestion
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
    kind, config = bad.fault.kind, parts.config.rollback
    first_batch = batch_index(bad.first_step - 1, parts.iterator.skipped)
    emit(
        "bad_steps",
        fault=kind,
        step=bad.last_step,
        first_step=bad.first_step,
        first_batch=first_batch,
        evidence=bad.fault.evidence,
    )
    parts.manager.finish()
    decided = decisions.read(parts.manager.root)
    mine = [one for one in decided.rollbacks if one.cause]
    points = _resume_points(parts, decided)
    policy = RollbackPolicy(
        max_rollbacks=config.max_rollbacks,
        near_batches=config.near_batches,
        skip_before=config.skip_before,
        skip_after=config.skip_after,
    )
    margin_steps = config.spike_margin_steps if kind is FaultKind.SPIKE else 0
    while True:
        answer = policy.decide(
            RollbackQuestion(
                first_step=bad.first_step,
                first_batch=first_batch,
                margin_steps=margin_steps,
                points=points,
                earlier=[one.skip for one in mine if one.skip],
            )
        )
        if answer.to is None:
            raise _given_up(bad, answer.reason, earlier=mine)
        if _can_be_restored(layout.step_path(parts.manager.root, answer.to)):
            break
        points = [one for one in points if one.step != answer.to]
    try:
        parts.manager.rollback(
            answer.to,
            reason=f"{bad.fault.evidence}: {answer.reason}",
            skip=answer.skip,
            cause=str(kind),
        )
    except OSError as error:
        # As for a save: the disk is to blame, and the next start does what is left.
        text = f"{bad.fault.evidence}; no rollback: {error}"
        fault = Fault(kind=FaultKind.SAVE_FAILED, step=bad.last_step, evidence=text)
        raise FaultError(fault) from error


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
) -> FaultError:
    lines = [f"{bad.fault.evidence}; given up: {reason}"]
    lines += [f"earlier, from step {one.origin}: {one.reason}" for one in earlier]
    fault = Fault(
        kind=bad.fault.kind, step=bad.fault.step, evidence="\n".join(lines[:9])
    )
    return FaultError(fault)
