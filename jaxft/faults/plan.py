"""The text of `faults.inject` as data: which fault happens where.

World: host-only. Floor: faults, the lowest. Read `FaultsConfig` in `jaxft/config.py`
before this file and `jaxft/faults/inject.py`, which makes them happen, after it.

    kill@120; hang@200; nan_grad@250-252; slow_disk@550-600:10MBps
    sigterm@450 grace=5; raise@820 times=2; bitflip@400 leaf=params/embed
    random(n=10, seed=3, kinds=kill+raise, first=50, last=900)

`@n` is the border after n finished step attempts, or the first one after it that the
run comes to. For bad data (`nan_grad`, `bad_batch`, `spike`) it is the number of the
batch, from 0, and a range is one of batches.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.config import ConfigError

PATH = "faults.inject"
# A spike multiplies loss and gradient by it unless `:factor` says otherwise.
SPIKE_FACTOR = 1000.0
_RANDOM_RATE = "1MBps"
_SLOW_STEPS = 5

_ITEM = re.compile(r"(\w+)\s*@\s*(\d+)(?:\s*-\s*(\d+))?(?:\s*:\s*([\w.]+))?\s*(.*)")
_OPTION = re.compile(r"(\w+)\s*=\s*(\S+)")
_RANDOM = re.compile(r"random\s*\((.*)\)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]i?)?B(?:ps|/s)")
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3}


class Injected(enum.StrEnum):
    """What can be made to happen."""

    KILL = "kill"
    HANG = "hang"
    HANG_GIL = "hang_gil"
    NAN_GRAD = "nan_grad"
    BAD_BATCH = "bad_batch"
    SPIKE = "spike"
    BITFLIP = "bitflip"
    SIGTERM = "sigterm"
    ENOSPC = "enospc"
    SLOW_DISK = "slow_disk"
    CORRUPT_NEWEST = "corrupt_newest"
    KILL_IN_SAVE = "kill_in_save"
    OOM = "oom"
    RAISE = "raise"


# These belong to the data: they come back whenever the batch is drawn again.
OF_BATCHES = frozenset({Injected.NAN_GRAD, Injected.BAD_BATCH, Injected.SPIKE})
_WITH_RANGE = OF_BATCHES | {Injected.SLOW_DISK}
_OPTIONS = {
    "process": frozenset(Injected) - OF_BATCHES,
    "times": frozenset(Injected) - _WITH_RANGE,
    "grace": frozenset({Injected.SIGTERM}),
    "leaf": frozenset({Injected.BITFLIP}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault of a plan.

    Attributes:
        number: its place in the plan, from 1; its marker on disk has this name.
        kind: what happens.
        first: border (or batch) at which it happens, or the first of them.
        last: the last of them, `first` where it is one.
        value: bytes a second of `slow_disk`, factor of `spike`; 0 for others.
        process: index of the process it happens on.
        times: how often it happens, over all restarts.
        grace_secs: of `sigterm`: a SIGKILL follows so much later; 0 for none.
        leaf: glob of the leaf that `bitflip` changes; empty for the first one.
    """

    number: int
    kind: Injected
    first: int
    last: int
    value: float = 0.0
    process: int = 0
    times: int = 1
    grace_secs: float = 0.0
    leaf: str = ""

    def __str__(self) -> str:
        place = f"{self.first}-{self.last}" if self.last > self.first else self.first
        text = f"{self.kind}@{place}"
        if self.kind is Injected.SLOW_DISK:
            text += f":{self.value:.0f}Bps"
        elif self.value and self.value != SPIKE_FACTOR:
            text += f":{self.value:g}"
        for name, value, usual in (
            ("process", self.process, 0),
            ("times", self.times, 1),
            ("grace", f"{self.grace_secs:g}", "0"),
            ("leaf", self.leaf, ""),
        ):
            text += "" if value == usual else f" {name}={value}"
        return text


def parse_plan(
    text: str, *, num_steps: int, num_bad: int = 1, num_high: int = 1
) -> tuple[PlannedFault, ...]:
    """Reads a plan; the same text gives the same plan.

    Args:
        text: the grammar above; empty for no fault.
        num_steps: where the run ends: random faults lie before it.
        num_bad: batches in a row that a random fault of the data makes bad;
        num_high: those of a random spike.

    Raises:
        ConfigError: for `faults.inject`: something in it is not understood.
    """
    faults: list[PlannedFault] = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        drawn = [item]
        if match := _RANDOM.fullmatch(item):
            lengths = dict.fromkeys(OF_BATCHES, num_bad) | {Injected.SPIKE: num_high}
            drawn = _draw(match[1], num_steps=num_steps, lengths=lengths)
        faults += [
            _parse(one, number=len(faults) + i) for i, one in enumerate(drawn, 1)
        ]
    return tuple(faults)


def poisoned(faults: Sequence[PlannedFault]) -> list[PlannedFault]:
    """Those that are bad data."""
    return [fault for fault in faults if fault.kind in OF_BATCHES]


def _parse(item: str, *, number: int) -> PlannedFault:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _refused(item, "write kind@step, e.g. kill@120 or nan_grad@250-252")
    name, first, last, value, rest = match.groups()
    if name not in list(Injected):
        known = ", ".join(Injected)
        raise _refused(item, f"there is no {name!r}; there are {known}")
    kind = Injected(name)
    if last is not None and (kind not in _WITH_RANGE or int(last) < int(first)):
        problem = (
            "the range is empty" if kind in _WITH_RANGE else f"{kind} has no range"
        )
        raise _refused(item, problem)
    last = first if last is None else last
    if not int(last) < 2**31:
        raise _refused(item, "no run comes that far")
    return PlannedFault(
        number=number,
        kind=kind,
        first=int(first),
        last=int(last),
        value=_value(kind, value, item),
        **_options(kind, rest, item),
    )


def _value(kind: Injected, text: str | None, item: str) -> float:
    if kind is Injected.SLOW_DISK:
        match = _RATE.fullmatch(text or "")
        if match is None or not float(match[1]) > 0:
            raise _refused(item, "slow_disk needs a rate, e.g. slow_disk@5-9:10MBps")
        unit = match[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        return float(match[1]) * base ** _UNITS[unit.removesuffix("i")]
    if text is None:
        return SPIKE_FACTOR if kind is Injected.SPIKE else 0.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if kind is not Injected.SPIKE or not 0 < factor < 1e30:
        raise _refused(item, f"{text!r} means nothing here")
    return factor


def _options(kind: Injected, text: str, item: str) -> dict[str, Any]:
    names = {"grace": "grace_secs"}
    options: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        match = _OPTION.fullmatch(word)
        if match is None or kind not in _OPTIONS.get(match[1], ()):
            fitting = [name for name, kinds in _OPTIONS.items() if kind in kinds]
            known = ", ".join(f"{name}=" for name in fitting) or "no options"
            raise _refused(item, f"{word!r} is not understood; {kind} takes {known}")
        name, value = match.groups()
        options[names.get(name, name)] = (
            value if name == "leaf" else _number(value, name, item)
        )
    return options


def _number(text: str, name: str, item: str) -> int | float:
    try:
        number = float(text) if name == "grace" else int(text)
    except ValueError:
        raise _refused(item, f"{name}={text} is no number") from None
    if not (0 if name == "process" else 1e-3) <= number < 2**31:
        raise _refused(item, f"{name}={text} is out of range")
    return number


def _draw(text: str, *, num_steps: int, lengths: Mapping[Injected, int]) -> list[str]:
    """A random plan: each fault at a random place of a stretch of its own."""
    item = f"random({text})"
    known = {"n": "1", "seed": "0", "kinds": "kill", "first": "1", "last": ""}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in known:
            raise _refused(item, f"{part!r} is not one of {', '.join(known)}")
        known[name] = value
    known["last"] = known["last"] or str(num_steps - 1)
    numbers = {}
    for name in ("n", "seed", "first", "last"):
        if not known[name].isdecimal():
            raise _refused(item, f"{name}={known[name]} is no number")
        numbers[name] = int(known[name])
    n, first, last = numbers["n"], numbers["first"], numbers["last"]
    kinds = [kind.strip() for kind in known["kinds"].split("+")]
    if unknown := [kind for kind in kinds if kind not in list(Injected)]:
        raise _refused(item, f"there is no {unknown[0]!r} among {', '.join(Injected)}")
    length = (last + 1 - first) // max(n, 1)
    if n < 1 or length < 1:
        raise _refused(item, f"{n} faults do not fit between {first} and {last}")
    # Text and not a hash of Python's own, which differs from process to process.
    rng = random.Random(f"jaxft {numbers['seed']}")
    chosen = [kinds[i % len(kinds)] for i in range(n)]
    rng.shuffle(chosen)
    # In the first half of its stretch: what follows has room to recover.
    places = [first + i * length + rng.randrange((length + 1) // 2) for i in range(n)]
    pairs = zip(chosen, places, strict=True)
    return [_at(Injected(kind), place, lengths=lengths) for kind, place in pairs]


def _at(kind: Injected, place: int, *, lengths: Mapping[Injected, int]) -> str:
    if kind in lengths:
        return f"{kind}@{place}-{place + lengths[kind] - 1}"
    if kind is Injected.SLOW_DISK:
        return f"{kind}@{place}-{place + _SLOW_STEPS}:{_RANDOM_RATE}"
    return f"{kind}@{place}"


def _refused(item: str, problem: str) -> ConfigError:
    return ConfigError(PATH, f"{item!r}: {problem}")
