"""What a drill does to a run: which kinds of fault, where, under which settings.

World: host-only. Floor: cli, below `drill`. Read `jaxft/faults/plan.py` before and
`jaxft/cli/drill.py`, which runs it, after.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from jaxft.config import Config, ConfigError
from jaxft.faults import disk
from jaxft.faults.plan import OF_BATCHES, Injected, PlannedFault, parse_plan

# No fault before this share of the run: there has to be something to go back to.
_QUIET_SHARE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrillPlan:
    """One drill.

    Attributes:
        faults: in the order of their places.
        refused: kind -> why this machine, or this config, cannot give it.
        settings: dotted path -> value, for the disturbed run and its twin alike.
    """

    faults: tuple[PlannedFault, ...]
    refused: dict[str, str]
    settings: dict[str, object]

    @property
    def text(self) -> str:
        """The value of `faults.inject` for the disturbed run."""
        return "; ".join(map(str, self.faults))

    @property
    def bad_data(self) -> str:
        """That for the twin: bad batches are part of the data, and only they."""
        return "; ".join(str(f) for f in self.faults if f.kind in OF_BATCHES)


def plan_drill(
    config: Config,
    *,
    workdir: pathlib.Path,
    num_faults: int,
    seed: int,
    kinds: Sequence[str],
) -> DrillPlan:
    """Plans a drill; the same arguments give the same one.

    Args:
        config: resolved.
        workdir: of the run that will be disturbed.
        num_faults: how many.
        seed: of their places and order.
        kinds: which; empty for all that can be had.

    Raises:
        ConfigError: a kind is unknown, none is left, or the run is too short.
    """
    if unknown := [kind for kind in kinds if kind not in list(Injected)]:
        problem = f"there is no {unknown[0]!r}; there are {', '.join(Injected)}"
        raise ConfigError("", f"--kinds: {problem}")
    wanted = [Injected(kind) for kind in kinds] or list(Injected)
    reasons = {kind: _why_not(kind, config, workdir) for kind in wanted}
    refused = {str(kind): why for kind, why in reasons.items() if why}
    given = [kind for kind, why in reasons.items() if not why]
    if not given:
        told = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
        raise ConfigError("", f"no fault can be had here: {told}")
    num_steps = config.train.num_steps
    first = max(1, round(_QUIET_SHARE * num_steps))
    # Of each stretch one half is for the fault, one to recover.
    stretch = (num_steps - 1 - first) // num_faults
    needed = 2 * _room(given, config)
    if stretch < needed:
        least = round((needed * num_faults + 2) / (1 - _QUIET_SHARE)) + 1
        raise ConfigError(
            "train.num_steps",
            f"{num_faults} faults of these kinds need {least} steps, not {num_steps}",
        )
    plan = (
        f"random(n={num_faults}, seed={seed}, kinds={'+'.join(given)}, "
        f"first={first}, last={num_steps - 2})"
    )
    faults = parse_plan(
        plan,
        num_steps=num_steps,
        num_bad=config.train.max_nonfinite,
        num_high=config.rollback.spike_steps,
    )
    return DrillPlan(
        faults=_shifted(faults, config),
        refused=refused,
        # None of it changes numbers. There are as many faults as never in life, and
        # neither budget is meant for that.
        settings={
            "supervisor.max_restarts": config.supervisor.max_restarts + num_faults,
            "supervisor.backoff_secs": 0.0,
            "rollback.near_batches": max(1, stretch // 4),
            "log.event_secs": 0.0,  # Else the figures are coarse.
        },
    )


def _shifted(
    faults: Sequence[PlannedFault], config: Config
) -> tuple[PlannedFault, ...]:
    """Bad data by the numbers that its batches will have at these steps.

    Each rollback leaves a window out, and all later steps get later batches; else the
    bad ones would come nearer and nearer to the faults before them.
    """
    window = config.rollback.skip_before + config.rollback.skip_after + 1
    shifted, shift = [], 0
    for fault in faults:
        if fault.kind in OF_BATCHES:
            first, last = fault.first + shift, fault.last + shift
            fault = dataclasses.replace(fault, first=first, last=last)
            shift += window
        shifted.append(fault)
    return tuple(shifted)


def _why_not(kind: Injected, config: Config, workdir: pathlib.Path) -> str:
    """Why a kind cannot be had here; empty when it can."""
    match kind:
        case Injected.BITFLIP:
            return "silent corruption is detected by nothing yet"
        case Injected.SPIKE if not config.rollback.spike_factor:
            return "rollback.spike_factor is off"
        case Injected.SPIKE | Injected.NAN_GRAD | Injected.BAD_BATCH if (
            not config.rollback.max_rollbacks
        ):
            return "rollback.max_rollbacks is 0"
        case Injected.HANG | Injected.HANG_GIL if not config.hang.enabled:
            return "hang.enabled is off"
        case Injected.SIGTERM if "TERM" not in config.preemption.signals.upper():
            return "SIGTERM is not among preemption.signals"
        case Injected.ENOSPC:
            try:
                disk.check_scratch(workdir / "faults", str(workdir / "checkpoints"))
            except ConfigError as error:
                return error.problem.removeprefix("enospc ").removeprefix("enospc: ")
    return ""


def _room(kinds: Sequence[Injected], config: Config) -> int:
    """Steps that the longest of these faults takes."""
    if not OF_BATCHES.intersection(kinds):
        return 1
    rollback = config.rollback
    window = rollback.skip_before + rollback.skip_after + 1
    return max(config.train.max_nonfinite, rollback.spike_steps) + window
