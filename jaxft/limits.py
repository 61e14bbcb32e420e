"""How long a run may make no progress: all its time limits, and what they learn from.

World: host-only. Floor: beside `events`, above `config`. Read `HangConfig` in
`jaxft/config.py` before this file; `jaxft/faults/watchdog.py`, which judges inside the
worker, and `jaxft/recovery/silence.py`, which judges from outside, after it.

A limit is a multiple of the longest time that the same thing took in this run, and
never below what its phase may take on a bad day. Until that is known the limit is
generous: a first step, a slow compilation or a cold disk is no alarm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxft import durable
from jaxft.config import Config, ConfigError
from jaxft.records import Phase

# The least limit of a phase, as a multiple of `min_secs`. What happens once a start
# meets cold caches and other machines, and input from elsewhere has retries of its own.
_PATIENCE = {
    Phase.START: 10.0,
    Phase.INIT: 10.0,
    Phase.RESTORE: 10.0,
    Phase.COMPILE: 10.0,
    Phase.FIRST_STEP: 5.0,
    Phase.STEP: 1.0,
    Phase.DATA: 5.0,
    Phase.EVALUATE: 2.0,
    Phase.SAVE: 1.0,
    # It has as many bytes to send as it has, and says nothing in between.
    Phase.MIRROR: 30.0,
    Phase.PEERS: 1.0,
}
# What another process may be at while this one waits for it in a step.
_OF_PEERS = (Phase.STEP, Phase.DATA, Phase.EVALUATE, Phase.SAVE)
# An alarm may be wrong: after each the limit of its phase is twice what it was.
_MAX_DOUBLINGS = 3
# How many times make a block (many where they are short), and how many blocks are
# "recent".
_QUICK = frozenset({Phase.STEP, Phase.DATA, Phase.EVALUATE})
_QUICK_BLOCK, _BLOCK = 256, 4
_NUM_BLOCKS = 4
# So many of the quick ones must have been seen before they are believed.
_MIN_QUICK = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Every time limit of a run, in seconds, in an order that can work.

    Attributes:
        factor: a limit over the longest time that was seen.
        min_secs: the least limit of a step; that of other phases is a multiple.
        first_secs: the limit of a phase that was never seen.
        margin_secs: how much later than the worker itself its supervisor acts.
        save_secs: after this a save fails by itself.
        grace_secs: from a request to stop to the worker's end.

    Raises:
        ConfigError: one limit makes another one senseless.
    """

    factor: float = 10.0
    min_secs: float = 60.0
    first_secs: float = 1800.0
    margin_secs: float = 15.0
    save_secs: float = 600.0
    grace_secs: float = 30.0

    def __post_init__(self) -> None:
        rules = [
            (
                self.factor > 1.0,
                "hang.factor",
                f"must be above 1, is {self.factor:g}: a step that takes as long as "
                "the longest before it does not hang",
            ),
            (
                0.0 < self.min_secs <= self.first_secs,
                "hang.min_secs",
                f"must be positive and at most hang.first_secs {self.first_secs:g}, is "
                f"{self.min_secs:g}: what is known is not judged milder than what is "
                "not",
            ),
            (
                0.0 < self.margin_secs <= self.first_secs,
                "hang.margin_secs",
                f"must be positive and at most hang.first_secs {self.first_secs:g}, is "
                f"{self.margin_secs:g}: the worker needs it to say where it hangs",
            ),
            (
                0.0 < self.save_secs < self.first_secs,
                "hang.first_secs",
                f"must exceed checkpoint.timeout_secs {self.save_secs:g}, is "
                f"{self.first_secs:g}: a slow save fails by its own deadline, which "
                "must end before it counts as a hang",
            ),
            (
                0.0 < self.grace_secs < self.first_secs,
                "hang.first_secs",
                f"must exceed preemption.grace_secs {self.grace_secs:g}, is "
                f"{self.first_secs:g}: who was asked to stop leaves before it counts "
                "as hanging",
            ),
        ]
        for holds, path, problem in rules:
            if not holds:
                raise ConfigError(path, problem)

    @classmethod
    def of(cls, config: Config) -> TimeLimits:
        """The limits of a run.

        Raises:
            ConfigError: one of them makes another one senseless.
        """
        return cls(
            factor=config.hang.factor,
            min_secs=config.hang.min_secs,
            first_secs=config.hang.first_secs,
            margin_secs=config.hang.margin_secs,
            save_secs=config.checkpoint.timeout_secs,
            grace_secs=config.preemption.grace_secs,
        )

    @property
    def tick_secs(self) -> float:
        """How often the watchdog looks, and the least time between its lines."""
        return min(0.25, self.min_secs / 20.0, self.margin_secs / 4.0)

    @property
    def collective_secs(self) -> float:
        """What no process of several has to wait longer for within a step."""
        return self.first_secs + 2.0 * self.margin_secs

    @property
    def last_words_secs(self) -> float:
        """What a worker that hangs has to say so, before the supervisor ends it."""
        return self.margin_secs / 2.0

    def limit_secs(self, phase: Phase, learnt: LearntTimes) -> float:
        """How long `phase` may go on without progress."""
        if phase is Phase.PEERS:
            # More patient than any of them: who is late is to be ended, not who waits.
            others = (self.limit_secs(one, learnt) for one in _OF_PEERS)
            return max(others) + 2.0 * self.margin_secs
        longest = learnt.longest_secs(phase)
        limit = self.first_secs if longest is None else self.factor * longest
        limit = max(limit, self.min_secs * _PATIENCE[phase])
        if phase is Phase.SAVE:
            limit = max(limit, self.save_secs + self.min_secs)
        num_alarms = learnt.alarms.get(phase, 0)
        return limit * 2.0 ** min(num_alarms, _MAX_DOUBLINGS)


class LearntTimes:
    """The longest recent times of each phase; a fixed size, however long the run.

    Attributes:
        alarms: phase -> how often it was called a hang; not stored.
    """

    def __init__(self) -> None:
        self.alarms: dict[Phase, int] = {}
        # Per phase: how many were seen, and the longest of each block, newest last.
        self._seen: dict[Phase, tuple[int, list[float]]] = {}

    def observe(self, phase: Phase, secs: float, *, num: int = 1) -> None:
        """`num` times, the longest of them `secs`."""
        count, longest = self._seen.get(phase, (0, []))
        if phase is Phase.COMPILE and longest:
            # Most are served from the cache; the one that was not must stay known.
            secs = max(secs, *longest)
        block = _QUICK_BLOCK if phase in _QUICK else _BLOCK
        if count // block != (count + num) // block or not longest:
            longest = [*longest, secs][-_NUM_BLOCKS:]
        longest[-1] = max(longest[-1], secs)
        self._seen[phase] = count + num, longest

    def longest_secs(self, phase: Phase) -> float | None:
        """The longest of the recent ones; None while too few are known."""
        count, longest = self._seen.get(phase, (0, []))
        if not longest or (phase in _QUICK and count < _MIN_QUICK):
            return None
        return max(longest)

    def to_json(self) -> dict[str, Any]:
        """Phase -> {count, longest_secs}."""
        return {
            str(phase): {"count": count, "longest_secs": longest}
            for phase, (count, longest) in self._seen.items()
        }

    @classmethod
    def from_json(cls, stored: Any) -> LearntTimes:
        """What is not as it should be was never learnt."""
        learnt = cls()
        if not isinstance(stored, Mapping):
            return learnt
        for name, entry in stored.items():
            with contextlib.suppress(TypeError, ValueError, LookupError):
                phase, count = Phase(name), int(entry["count"])
                longest = [float(secs) for secs in entry["longest_secs"]]
                # Of a broken file anything may come; no number of it is a limit.
                if count > 0 and longest and all(0.0 <= x < 1e6 for x in longest):
                    learnt._seen[phase] = count, longest[-_NUM_BLOCKS:]
        return learnt


def read_learnt(workdir: str | os.PathLike[str]) -> LearntTimes:
    """From `<workdir>/supervisor.json`; what cannot be read was never learnt."""
    try:
        text = (pathlib.Path(workdir) / "supervisor.json").read_text()
        stored = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return LearntTimes()
    return LearntTimes.from_json(
        stored.get("longest") if isinstance(stored, dict) else None
    )


def write_learnt(workdir: str | os.PathLike[str], learnt: Mapping[str, Any]) -> None:
    """Replaces `<workdir>/supervisor.json`; a reader never sees half of it.

    Nothing depends on it but the next start's patience: where it cannot be written it
    is not.
    """
    body = json.dumps({"format": 1, "longest": learnt}) + "\n"
    with contextlib.suppress(OSError):
        durable.replace(pathlib.Path(workdir, "supervisor.json"), body.encode())
