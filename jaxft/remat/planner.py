"""Which policy for which layer: the least recomputation that fits a budget.

World: host-only. Floor: `remat`, above nothing: plain records go in and come out.
Read `jaxft/remat/estimate.py`, which makes the records, before this file and
`jaxft/memory_plan.py`, which asks the compiler, after it.

Peak memory of a compiled step = a constant + the bytes that the layers keep. The
constant depends on what is compiled (how many scans, of which policies), not on how
many layers each of them has: there the sum is exact to a few percent on every backend
that was tried. The constant is what a compile is for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

# A block of more layers than this is compiled for too long.
_MAX_PERIOD = 6
# Kept bytes, recomputed FLOPs, host bytes, and the policies that they are of.
_Sum = tuple[int, int, int, tuple[str, ...]]
# More than two groups of deeper models would be too many plans to look at.
_MAX_LAYERS_OF_THREE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What one policy means for one layer, for one device.

    Attributes:
        policy: as in `remat.plan`, e.g. `names(attn,up)`.
        kept_bytes: what stays in device memory from the forward to the backward pass.
        host_bytes: what goes to host memory instead.
        recomputed_flops: what the backward pass computes a second time.
        recomputed_bytes: what those matrix products read and write.
    """

    policy: str
    kept_bytes: int
    host_bytes: int = 0
    recomputed_flops: int = 0
    recomputed_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of a model, as a planner sees them.

    Attributes:
        options: one tuple a layer, the same policies in the same order in each.
        scanned: they are one stack under `lax.scan`, so that a change of policy from
            one layer to the next costs another scan.
        forward_flops: of each layer.
    """

    options: tuple[tuple[Option, ...], ...]
    scanned: bool
    forward_flops: tuple[int, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether all layers have the same options."""
        return all(options == self.options[0] for options in self.options)

    def of(self, plan: Sequence[str]) -> list[Option]:
        """The chosen option of each layer."""
        rows = zip(plan, self.options, strict=True)
        return [{o.policy: o for o in options}[policy] for policy, options in rows]

    def kept_bytes(self, plan: Sequence[str]) -> int:
        """Of all layers under a plan."""
        return sum(option.kept_bytes for option in self.of(plan))

    def host_bytes(self, plan: Sequence[str]) -> int:
        """Of all layers under a plan."""
        return sum(option.host_bytes for option in self.of(plan))

    def recomputed_flops(self, plan: Sequence[str]) -> int:
        """Of all layers under a plan."""
        return sum(option.recomputed_flops for option in self.of(plan))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What a plan will need of a device: a constant a form, and the kept bytes.

    Attributes:
        constants: bytes beside the kept ones, by `form`, as compiles have shown.
        guess: of a form that was not compiled yet.
    """

    constants: Mapping[str, int]
    guess: int

    def peak_bytes(self, layers: Layers, plan: Sequence[str]) -> int:
        """Predicted."""
        constant = self.constants.get(form(layers, plan), self.guess)
        return constant + layers.kept_bytes(plan)

    def corrected(
        self, layers: Layers, plan: Sequence[str], measured: int
    ) -> MemoryModel:
        """The model after a compile of `plan` has shown `measured` bytes."""
        constant = measured - layers.kept_bytes(plan)
        known = {**self.constants, form(layers, plan): constant}
        return MemoryModel(constants=known, guess=max(known.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Chooses a plan.

    Attributes:
        max_groups: how many scans may follow each other. A third one saves at most what
            one layer of two policies weighs, and is compiled for half as long again.
    """

    max_groups: int = 2

    def choose(
        self,
        layers: Layers,
        model: MemoryModel,
        budget_bytes: int,
        *,
        only_known: bool = False,
    ) -> tuple[str, ...] | None:
        """The plan of least recomputation that fits; None where none does.

        Among equals: less in host memory, then fewer scans, then fewer bytes.

        Args:
            layers: what there is to choose from.
            model: what a plan will take.
            budget_bytes: of one device.
            only_known: forms that were compiled already, whose constant is sure.
        """
        if not layers.alike:
            room = budget_bytes - model.constants.get("loop", model.guess)
            return _choose_freely(layers, room)
        plans = _scanned_plans(layers, model, budget_bytes, self.max_groups)
        fits = (
            plan
            for plan in plans
            if model.peak_bytes(layers, plan) <= budget_bytes
            and (not only_known or form(layers, plan) in model.constants)
        )
        return next(fits, None)


def form(layers: Layers, plan: Sequence[str]) -> str:
    """What a constant belongs to: how the layers are compiled."""
    if not layers.scanned:
        return "loop"
    if period := _period(plan):
        block = ",".join(plan[:period])
        return f"scan over {block}" if len(set(plan)) > 1 else f"scan: {block}"
    return "scans: " + " | ".join(policy for policy, _ in itertools.groupby(plan))


def num_scans(plan: Sequence[str]) -> int:
    """How many scans cover a plan; a pattern that repeats is one."""
    return 1 if _period(plan) else _num_runs(plan)


def describe(plan: Sequence[str]) -> str:
    """A plan as `remat.plan` takes it: `full`, or `0-3:full,4:dots,...`."""
    if len(set(plan)) == 1:
        return plan[0]
    parts, start = [], 0
    for policy, run in itertools.groupby(plan):
        stop = start + len(list(run))
        layers = f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        parts.append(f"{layers}:{policy}")
        start = stop
    return ",".join(parts)


def explain(layers: Layers, plan: Sequence[str]) -> str:
    """A table for people: what each layer keeps, and what it moves to the host."""
    rows: list[tuple[str, ...]]
    rows = [("layer", "policy", "kept", "offloaded", "recomputed")]
    for number, option in enumerate(layers.of(plan)):
        forward = layers.forward_flops[number] if layers.forward_flops else 0
        share = 100 * option.recomputed_flops / forward if forward else 0.0
        sizes = (f"{n / 2**20:.1f} MiB" for n in (option.kept_bytes, option.host_bytes))
        rows.append((str(number), option.policy, *sizes, f"{share:.1f} %"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _period(plan: Sequence[str]) -> int:
    """The shortest pattern that repeats over the whole plan; 0 where none does."""
    if len(set(plan)) == 1:
        return 1
    for period in range(2, len(plan) // 2 + 1):
        if len(plan) % period == 0 and all(
            policy == plan[i % period] for i, policy in enumerate(plan)
        ):
            return period if period < _num_runs(plan) else 0
    return 0


def _num_runs(plan: Sequence[str]) -> int:
    return sum(1 for _ in itertools.groupby(plan))


def _efficient(options: Sequence[Option]) -> list[Option]:
    """Those that no other one beats in every respect."""

    def costs(option: Option) -> tuple[int, int, int]:
        return option.kept_bytes, option.recomputed_flops, option.host_bytes

    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (*costs(o), len(o.policy), o.policy)):
        mine = costs(option)
        if not any(
            all(a <= b for a, b in zip(costs(other), mine, strict=True))
            for other in kept
        ):
            kept.append(option)
    return kept


def _scanned_plans(
    layers: Layers, model: MemoryModel, budget_bytes: int, max_groups: int
) -> Iterator[tuple[str, ...]]:
    """Plans that few scans can cover and that may fit, the best first."""
    num_layers = len(layers.options)
    if num_layers > _MAX_LAYERS_OF_THREE:
        max_groups = min(max_groups, 2)
    offered = _efficient(layers.options[0])
    room = budget_bytes - min([model.guess, *model.constants.values()])
    columns = [
        np.array([getattr(option, name) for option in offered], np.int64)
        for name in ("kept_bytes", "recomputed_flops", "host_bytes")
    ]
    rows: list[np.ndarray] = []
    chosen: list[tuple[np.ndarray, np.ndarray]] = []
    for size in range(1, min(max_groups, num_layers, len(offered)) + 1):
        policies = np.array(list(itertools.combinations(range(len(offered)), size)))
        counts = np.array(list(_compositions(num_layers, size)))
        kept, flops, host = (counts @ column[policies].T for column in columns)
        which = np.nonzero(kept <= room)
        sizes = np.full(len(which[0]), size)
        rows.append(np.stack([flops[which], host[which], sizes, kept[which]]))
        chosen += zip(counts[which[0]], policies[which[1]], strict=True)
    if not chosen:
        return
    for i in np.lexsort(np.concatenate(rows, axis=1)[::-1]):
        counts, policies = chosen[i]
        names = [offered[policy].policy for policy in policies]
        yield from _arrange(names, counts.tolist())


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def _arrange(
    policies: Sequence[str], counts: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    """So many layers of each policy as one scan over blocks, and as runs."""
    total, common = sum(counts), math.gcd(*counts)
    if len(counts) > 1 and common > 1 and total // common <= _MAX_PERIOD:
        block = [
            policy
            for policy, count in zip(policies, counts, strict=True)
            for _ in range(count // common)
        ]
        yield tuple(block) * common
    yield tuple(
        policy
        for policy, count in zip(policies, counts, strict=True)
        for _ in range(count)
    )


def _choose_freely(layers: Layers, room: int) -> tuple[str, ...] | None:
    """Any policy for any layer: layers in a loop cost nothing by their order.

    Keeps, layer by layer, only the sums that no other sum beats.
    """
    sums: list[_Sum] = [(0, 0, 0, ())]
    for options in layers.options:
        grown: list[_Sum] = [
            (
                kept + option.kept_bytes,
                flops + option.recomputed_flops,
                host + option.host_bytes,
                (*plan, option.policy),
            )
            for kept, flops, host, plan in sums
            for option in _efficient(options)
            if kept + option.kept_bytes <= room
        ]
        sums = _front(grown)
    if not sums:
        return None
    return min(sums, key=lambda s: (s[1], s[2], s[0]))[3]


def _front(sums: list[_Sum]) -> list[_Sum]:
    """By bytes ascending, each with less recomputation than all before it."""
    front: list[_Sum] = []
    for row in sorted(sums, key=lambda s: s[:3]):
        if not front or (row[1], row[2]) < (front[-1][1], front[-1][2]):
            front.append(row)
    return front
