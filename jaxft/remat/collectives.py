"""Counts the collectives of an optimized program, by kind and bytes.

World: host-only. Floor: `remat`. It reads the compiler's own text.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# `%name = SHAPE kind(` or, of a pair that is split for overlap, `kind-start(`.
_OPERATION = re.compile(
    rf"=\s+(?P<shape>\(?[^=]*?)\s(?P<kind>{_KINDS})(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[subf]\d+|bf16|f8\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLED = re.compile(r"(?:body|calls|to_apply|condition)=%?([\w.\-]+)")
_UNTIL = re.compile(r"condition=%?([\w.\-]+)")
_INTEGER = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of one kind in one step.

    Attributes:
        kind: as the compiler calls it.
        count: how many are run; a loop counts by its trips where they can be read.
        num_bytes: of their results, for one device.
    """

    kind: str
    count: int
    num_bytes: int


def count_collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives of one run of an optimized program, given as text."""
    own, calls, entry = _parse(hlo)
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, times in _reached(entry, calls):
        for kind, num_bytes in own[name]:
            totals[kind][0] += times
            totals[kind][1] += times * num_bytes
    return tuple(
        Collective(kind=kind, count=count, num_bytes=num_bytes)
        for kind, (count, num_bytes) in sorted(totals.items())
    )


def _parse(hlo: str) -> tuple[dict, dict, str]:
    """Each computation's own collectives, what it calls how often, and the first."""
    own: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    called: dict[str, list[tuple[str, int, str]]] = collections.defaultdict(list)
    constants: dict[str, list[int]] = collections.defaultdict(list)
    entry = current = ""
    for line in hlo.splitlines():
        if not line.startswith(" "):
            if match := _COMPUTATION.match(line):
                current = match[2]
                entry = current if match[1] else entry
            continue
        if match := _OPERATION.search(line):
            own[current].append((match["kind"], _result_bytes(match)))
        constants[current] += [int(number) for number in _INTEGER.findall(line)]
        trips = int(found[1]) if (found := _TRIPS.search(line)) else 0
        until = found[1] if (found := _UNTIL.search(line)) else ""
        called[current] += [(name, trips, until) for name in _CALLED.findall(line)]
    calls = {
        caller: [
            (name, trips or _trips(constants[until])) for name, trips, until in row
        ]
        for caller, row in called.items()
    }
    return own, calls, entry


def _trips(constants: list[int]) -> int:
    """Of a loop whose condition compares its counter with the only number in it."""
    return constants[0] if len(constants) == 1 else 1


def _result_bytes(match: re.Match[str]) -> int:
    sizes = [
        math.prod(int(n) for n in dims.split(",") if n) * _itemsize(dtype)
        for dtype, dims in _ARRAY.findall(match["shape"])
    ]
    # A start gives its operands back beside its results: those are the larger half.
    return max(sizes, default=0) if match["start"] else sum(sizes)


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _reached(
    name: str, calls: dict[str, list[tuple[str, int]]], times: int = 1
) -> Iterator[tuple[str, int]]:
    yield name, times
    for called, trips in calls.get(name, ()):
        yield from _reached(called, calls, times * trips)
