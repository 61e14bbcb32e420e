"""When to save and what to keep, as text and as small values.

World: host-only. Floor: the lowest of `checkpoint`, beside `layout`. Read
`jaxft/records.py` before (the protocols) and `jaxft/checkpoint/manager.py` after.

`parse_save("steps(100) | secs(600)")` and `parse_keep("last(3) | every(1000)")`:
names with one positive number each, joined by `|`; a step that any part wants is
saved, or kept. The newest committed step is kept whatever the policy says.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxft import config, records

_TERM = re.compile(r"\s*(\w+)\s*\(\s*([^()]*?)\s*\)\s*")


@dataclasses.dataclass(frozen=True)
class Steps:
    """Saves at multiples of `num_steps`: labels do not depend on interruptions."""

    num_steps: int

    def should_save(self, question: records.SaveQuestion) -> bool:
        """Whether this border is a multiple."""
        return question.step > 0 and question.step % self.num_steps == 0


@dataclasses.dataclass(frozen=True)
class Secs:
    """Saves when the last save began at least `secs` ago."""

    secs: float

    def should_save(self, question: records.SaveQuestion) -> bool:
        """Whether enough time has gone by."""
        return question.now_secs - question.last_secs >= self.secs


@dataclasses.dataclass(frozen=True)
class AnySave:
    """Saves when any of `policies` wants to."""

    policies: tuple[records.SavePolicy, ...]

    def should_save(self, question: records.SaveQuestion) -> bool:
        """Whether any part says so."""
        return any(policy.should_save(question) for policy in self.policies)


@dataclasses.dataclass(frozen=True)
class Last:
    """Keeps the newest `num_steps` checkpoints."""

    num_steps: int

    def should_keep(self, checkpoints: Sequence[records.CheckpointInfo]) -> list[bool]:
        """True for the last ones."""
        dropped = max(0, len(checkpoints) - self.num_steps)
        return [index >= dropped for index in range(len(checkpoints))]


@dataclasses.dataclass(frozen=True)
class Every:
    """Keeps the checkpoints whose step is a multiple of `num_steps`."""

    num_steps: int

    def should_keep(self, checkpoints: Sequence[records.CheckpointInfo]) -> list[bool]:
        """True for the multiples."""
        return [info.step % self.num_steps == 0 for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class AnyKeep:
    """Keeps what any of `policies` keeps."""

    policies: tuple[records.KeepPolicy, ...]

    def should_keep(self, checkpoints: Sequence[records.CheckpointInfo]) -> list[bool]:
        """True where any part says so."""
        answers = [policy.should_keep(checkpoints) for policy in self.policies]
        return [any(column) for column in zip(*answers, strict=True)]


def _num_steps(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _num_secs(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError("must be a positive number of seconds")
    return number


_SAVE: Mapping[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "steps": (Steps, _num_steps),
    "secs": (Secs, _num_secs),
}
_KEEP: Mapping[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "last": (Last, _num_steps),
    "every": (Every, _num_steps),
}


def parse_save(text: str) -> records.SavePolicy:
    """Reads a save policy.

    Raises:
        ConfigError: it names `checkpoint.save` and lists what exists.
    """
    parts = _parse(text, path="checkpoint.save", known=_SAVE)
    return parts[0] if len(parts) == 1 else AnySave(tuple(parts))


def parse_keep(text: str) -> records.KeepPolicy:
    """Reads a retention policy.

    Raises:
        ConfigError: it names `checkpoint.keep` and lists what exists.
    """
    parts = _parse(text, path="checkpoint.keep", known=_KEEP)
    return parts[0] if len(parts) == 1 else AnyKeep(tuple(parts))


def _parse(
    text: str,
    *,
    path: str,
    known: Mapping[str, tuple[Callable[[Any], Any], Callable[[str], Any]]],
) -> list[Any]:
    choice = " and ".join(f"{name}(n)" for name in known)
    parts = []
    for term in text.split("|"):
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in known:
            raise config.ConfigError(
                path, f"{term.strip()!r} is no policy; there are {choice}, joined by |"
            )
        make, parse_number = known[match[1]]
        try:
            parts.append(make(parse_number(match[2])))
        except ValueError as error:
            raise config.ConfigError(
                path, f"{term.strip()!r}: {error}; write e.g. {match[1]}(10)"
            ) from error
    return parts


def reads_clock(policy: records.SavePolicy) -> bool:
    """Whether the answers of a policy depend on time: processes may differ."""
    if isinstance(policy, AnySave):
        return any(reads_clock(part) for part in policy.policies)
    return isinstance(policy, Secs)


def plan_deletions(
    checkpoints: Sequence[records.CheckpointInfo], *, keep: records.KeepPolicy
) -> list[records.CheckpointInfo]:
    """Which of the committed `checkpoints`, sorted by step, may go.

    Never the newest one, whatever `keep` says: it is the resume point.
    """
    if not checkpoints:
        return []
    kept = keep.should_keep(checkpoints)
    return [
        info
        for info, stays in zip(checkpoints[:-1], kept[:-1], strict=True)
        if not stays
    ]
