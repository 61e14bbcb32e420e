"""Remat by plan: estimates, chooses, compiles for the target, corrects, decides.

World: device. Floor: above `build`. Read `jaxft/remat/planner.py`, the pure choice,
before this file and `jaxft/worker.py`, which lives by the decision, after it.

The estimate of the layers is exact up to a constant; one compile of the run's own
step shows the constant, and at most two more correct the plan. Rows are divided over
the devices before anything is counted; over a `tensor` axis nothing is: there the
estimate is an upper bound, which the compile corrects.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxft.build import Core, build_core
from jaxft.checkpoint.options import parse_bytes
from jaxft.config import Config, ConfigError
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.precision import make_precision
from jaxft.remat import planner
from jaxft.remat.collectives import Collective, count_collectives
from jaxft.remat.estimate import record_layers
from jaxft.remat.planner import Layers, MemoryModel, Planner
from jaxft.remat.policies import parse_plan
from jaxft.remat.targets import (
    Footprint,
    Target,
    find_target,
    read_footprint,
    read_refusal,
)

MAX_COMPILES = 3
# Of the room beside the state, left free by the second and the third try.
_MARGINS = (0.0, 0.005, 0.02)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One compile.

    Attributes:
        plan: one policy a layer.
        predicted_bytes: before it; of the constant and what the layers keep.
        footprint: what the compiler said.
        secs: it took.
        collectives: of the program; empty where it was refused.
    """

    plan: tuple[str, ...]
    predicted_bytes: int
    footprint: Footprint
    secs: float
    collectives: tuple[Collective, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The plan of a run and what it stands on.

    Attributes:
        plan: one policy a layer.
        layers: the estimates.
        budget_bytes: of one device; None where a plan was given, not chosen.
        trials: the compiles, in order; the last accepted one is of `plan`.
        accepted: the compile of `plan`.
        trace_secs: until the estimates were there.
    """

    plan: tuple[str, ...]
    layers: Layers
    budget_bytes: int | None
    trials: tuple[Trial, ...]
    accepted: Trial
    trace_secs: float

    @property
    def text(self) -> str:
        """As `remat.plan` takes it."""
        return planner.describe(self.plan)

    def explain(self) -> str:
        """Per layer: policy, kept, offloaded, recomputed."""
        return planner.explain(self.layers, self.plan)


class Subject:
    """A run's step for a target: estimated once, compiled plan by plan.

    Args:
        config: resolved.
        target: the devices.

    Raises:
        ConfigError: something cannot work, or the model does not tell of its layers.
    """

    def __init__(self, config: Config, target: Target):
        if config.train.virtual_shards:
            raise ConfigError(
                "remat.plan", "auto does not know virtual shards: name a plan"
            )
        self.config, self.target = config, target
        started = time.monotonic()
        core = self._core("none")
        self.layers = _estimate(core, config, target)
        self.trace_secs = time.monotonic() - started
        state, rows = core.train_step.abstract_state, core.train_step.batch_sharding
        self.local_rows = rows.shard_shape((config.data.global_batch,))[0]
        self.local_rows //= config.train.num_microbatches
        self.state_bytes = _bytes_per_device(state)
        self.optimizer_bytes = _bytes_per_device(state.opt_state)
        # State, gradients and gathered parameters, and one layer in its backward pass.
        self.least_bytes = self.state_bytes + 2 * _bytes_per_device(state.params)
        self.least_bytes += max(
            option.kept_bytes
            for options in self.layers.options
            for option in options
            if option.policy == "none"
        )

    def compile(self, plan: Sequence[str]) -> tuple[Footprint, tuple[Collective, ...]]:
        """The run's own step under a plan, by the target's compiler."""
        core = self._core(planner.describe(plan))
        batch: Any = core.batch
        lowered = core.train_step.lower(None, batch)
        try:
            compiled = lowered.compile()
        except Exception as error:
            refused = read_refusal(error)
            if refused is None:
                raise
            needed = refused.peak_bytes and refused.peak_bytes + self.state_bytes
            return dataclasses.replace(refused, peak_bytes=needed), ()
        text = compiled.as_text() or ""
        return read_footprint(compiled), count_collectives(text)

    def _core(self, plan: str) -> Core:
        return build_core(self.config, devices=self.target.devices, plan=plan)


def decide(
    subject: Subject,
    budget_bytes: int,
    *,
    compile_plan: Callable[..., Any] | None = None,
    max_compiles: int = MAX_COMPILES,
) -> Decision:
    """Chooses the plan of least recomputation that fits, and confirms it.

    Args:
        subject: what is planned for.
        budget_bytes: of one device.
        compile_plan: instead of `subject.compile`.
        max_compiles: one to confirm, the others to correct.

    Raises:
        ConfigError: nothing fits; it says what is missing and what would help.
    """
    layers, compile_plan = subject.layers, compile_plan or subject.compile
    model = MemoryModel(constants={}, guess=subject.least_bytes)
    trials: list[Trial] = []
    for margin in _MARGINS[:max_compiles]:
        room = budget_bytes - int(margin * (budget_bytes - subject.state_bytes))
        is_fitting = any(_fits(trial.footprint, budget_bytes) for trial in trials)
        plan = None
        is_last = bool(trials) and len(trials) == max_compiles - 1
        if is_last:
            plan = Planner().choose(layers, model, room, only_known=True)
        if plan is None and (is_fitting or not is_last):
            plan = Planner().choose(layers, model, room)
        if plan is None and not is_fitting:
            plan = _smallest(layers)  # The guess may be wrong: let the compiler say.
        if plan is None or any(trial.plan == plan for trial in trials):
            break
        trial = _try(plan, layers=layers, model=model, compile_plan=compile_plan)
        trials.append(trial)
        if trial.footprint.peak_bytes:
            model = model.corrected(layers, plan, trial.footprint.peak_bytes)
        elif trial.footprint.refused:
            # It does not say by how much: by a tenth of the budget, then.
            model = model.corrected(layers, plan, int(1.1 * budget_bytes))
    fitting = [t for t in trials if _fits(t.footprint, budget_bytes)]
    if not fitting:
        raise ConfigError(
            "remat.memory_budget", _refusal(subject, budget_bytes, model, trials)
        )
    best = min(fitting, key=lambda trial: layers.recomputed_flops(trial.plan))
    return Decision(
        plan=best.plan,
        layers=layers,
        budget_bytes=budget_bytes,
        trials=tuple(trials),
        accepted=best,
        trace_secs=subject.trace_secs,
    )


def target_of(config: Config, name: str) -> Target:
    """The devices of a name; `here` are those that the config's mesh would take.

    Raises:
        ConfigError: there is no such target, or no such mesh here.
    """
    here = make_mesh(config.mesh).devices.flat if name == "here" else ()
    return find_target(name, devices=list(here))


def plan_for(config: Config, target_name: str) -> dict[str, Any]:
    """Plans a run for a target, or compiles the plan it names; as JSON values."""
    target = target_of(config, target_name)
    started = time.monotonic()
    subject = Subject(config, target)
    if config.remat.plan.strip() == "auto":
        budget = parse_budget(config.remat.memory_budget, target.memory_bytes)
        decision = decide(subject, budget)
    else:
        num_layers = len(subject.layers.options)
        plan = parse_plan(config.remat.plan, num_layers)
        decision = examine(subject, [str(policy) for policy in plan])
        if refused := decision.accepted.footprint.refused:
            raise ConfigError("remat.plan", f"{decision.text} does not fit: {refused}")
    return report(decision, target) | {"secs": time.monotonic() - started}


def report(decision: Decision, target: Target) -> dict[str, Any]:
    """A decision as JSON values."""
    layers, footprint = decision.layers, decision.accepted.footprint
    forward = sum(layers.forward_flops)
    return {
        "format": 1,
        "target": target.name,
        "experimental": target.experimental,
        "device": target.devices[0].device_kind,
        "num_devices": len(target.devices),
        "memory_bytes": target.memory_bytes,
        "budget_bytes": decision.budget_bytes,
        "plan": decision.text,
        "peak_bytes": footprint.peak_bytes,
        "host_bytes": footprint.host_bytes,
        "recompute_percent": _percent(layers.recomputed_flops(decision.plan), forward),
        "groups": _groups(decision),
        "collectives": [
            dataclasses.asdict(found) for found in decision.accepted.collectives
        ],
        "trace_secs": decision.trace_secs,
        "trials": [
            {
                "plan": planner.describe(trial.plan),
                "predicted_bytes": trial.predicted_bytes,
                "peak_bytes": trial.footprint.peak_bytes,
                "refused": trial.footprint.refused,
                "secs": trial.secs,
            }
            for trial in decision.trials
        ],
    }


def _groups(decision: Decision) -> list[dict[str, Any]]:
    """Neighbouring layers of one policy, with the sums over each group."""
    layers, groups, start = decision.layers, [], 0
    chosen = layers.of(decision.plan)
    for policy, run in itertools.groupby(decision.plan):
        stop = start + len(list(run))
        part = chosen[start:stop]
        groups.append(
            {
                "layers": f"{start}-{stop - 1}" if stop - start > 1 else str(start),
                "policy": policy,
                "kept_bytes": sum(option.kept_bytes for option in part),
                "host_bytes": sum(option.host_bytes for option in part),
                "recompute_percent": _percent(
                    sum(option.recomputed_flops for option in part),
                    sum(layers.forward_flops[start:stop]),
                ),
            }
        )
        start = stop
    return groups


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def examine(subject: Subject, plan: Sequence[str]) -> Decision:
    """Compiles a plan that was given."""
    model = MemoryModel(constants={}, guess=subject.least_bytes)
    compile_plan = subject.compile
    trial = _try(
        tuple(plan), layers=subject.layers, model=model, compile_plan=compile_plan
    )
    return Decision(
        plan=tuple(plan),
        layers=subject.layers,
        budget_bytes=None,
        trials=(trial,),
        accepted=trial,
        trace_secs=subject.trace_secs,
    )


def parse_budget(text: str, memory_bytes: int | None) -> int:
    """Reads `14GiB`, or `90%` of what a device has.

    Raises:
        ConfigError: it is neither, or nobody says what a device has.
    """
    path = "remat.memory_budget"
    if not text.strip().endswith("%"):
        return parse_bytes(text, path=path)
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(path, f"{text!r} is no share: write e.g. 90% or 14GiB")
    if memory_bytes is None:
        raise ConfigError(
            path,
            f"{text} of a memory that the backend does not tell: write e.g. 14GiB",
        )
    return int(share * memory_bytes)


def _fits(footprint: Footprint, budget_bytes: int) -> bool:
    return not footprint.refused and footprint.peak_bytes <= budget_bytes


def _try(
    plan: tuple[str, ...],
    *,
    layers: Layers,
    model: MemoryModel,
    compile_plan: Callable[..., Any],
) -> Trial:
    started = time.monotonic()
    footprint, collectives = compile_plan(plan)
    return Trial(
        plan=plan,
        predicted_bytes=model.peak_bytes(layers, plan),
        footprint=footprint,
        secs=time.monotonic() - started,
        collectives=collectives,
    )


def _smallest(layers: Layers) -> tuple[str, ...]:
    """What keeps the least, and of those what computes the least again."""
    return tuple(
        min(row, key=lambda o: (o.kept_bytes, o.recomputed_flops)).policy
        for row in layers.options
    )


def _estimate(core: Core, config: Config, target: Target) -> Layers:
    """Traces the loss for the rows that one device computes at a time."""
    step = core.train_step
    rows = step.batch_sharding.shard_shape((config.data.global_batch,))[0]
    rows //= config.train.num_microbatches
    batch = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in core.batch.items()
    }
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), step.abstract_state
    )
    cast = make_precision(config.precision).cast_compute

    def trace(state: Any, batch: Any) -> Any:
        loss = core.model.loss
        return loss(cast(state.params), state.extra, batch, state.rng, train=True)[1]

    per_flop = target.host_bytes_per_flop
    with record_layers(offload=per_flop > 0) as recorder:
        jax.eval_shape(trace, state, batch)
    if not recorder.options:
        raise ConfigError(
            "remat.plan",
            f"auto: {config.model.factory} does not tell of its layers: apply them by "
            "jaxft.remat.layers or jaxft.remat.wrap",
        )
    return _without_slow_offload(recorder.layers(), per_flop)


def _without_slow_offload(layers: Layers, per_flop: float) -> Layers:
    """Only what moves to the host while the layer itself is computed."""
    rows = []
    for options, flops in zip(layers.options, layers.forward_flops, strict=True):
        rows.append(tuple(o for o in options if o.host_bytes <= per_flop * flops))
    return dataclasses.replace(layers, options=tuple(rows))


def _bytes_per_device(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * getattr(x.dtype, "itemsize", 4)
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != "pinned_host"
    )


def _refusal(
    subject: Subject, budget_bytes: int, model: MemoryModel, trials: Sequence[Trial]
) -> str:
    """How many bytes are missing, and the nearest thing that would help."""
    layers, smallest = subject.layers, _smallest(subject.layers)
    needed = model.peak_bytes(layers, smallest)
    missing = needed - budget_bytes
    measured = [t for t in trials if t.plan == smallest and t.footprint.peak_bytes]
    how = "compiled" if measured else "estimated"
    return (
        f"no plan fits {size(budget_bytes)} a device: {planner.describe(smallest)} "
        f"takes {size(needed)} ({how}), {size(missing)} too many; "
        f"{_remedy(subject, needed, budget_bytes)}"
    )


def _remedy(subject: Subject, needed: int, budget_bytes: int) -> str:
    config, missing = subject.config, needed - budget_bytes
    # What grows with the rows that are computed at a time.
    by_rows, local = needed - subject.least_bytes, subject.local_rows
    factor = 2
    while by_rows - by_rows / factor < missing and factor <= local:
        factor *= 2
    if subject.least_bytes < budget_bytes and local % factor == 0:
        return (
            f"nearest: train.num_microbatches={config.train.num_microbatches * factor}"
            f", or data.global_batch={config.data.global_batch // factor}"
        )
    state = (
        f"the state alone is {size(subject.state_bytes)} a device, of it the "
        f"optimizer's {size(subject.optimizer_bytes)}"
    )
    if not config.train.offload_opt_state and subject.optimizer_bytes >= missing:
        return f"{state}; nearest: train.offload_opt_state=True"
    grown = 2 * max(1, config.mesh.fsdp)
    if config.mesh.fsdp > 0 and grown <= len(subject.target.devices):
        return f"{state}; nearest: mesh.fsdp={grown}"
    return f"{state}; nearest: more devices along fsdp"


def size(num_bytes: float) -> str:
    """For people: `13.2 GiB`."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
