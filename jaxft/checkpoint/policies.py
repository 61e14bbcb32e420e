"""When to save and what to keep, as text and as small values.

World: host-only. Floor: the lowest of `checkpoint`, beside `layout`. Read
`jaxft/records.py` before (the protocols) and `jaxft/checkpoint/manager.py` after.

`parse_save("steps(100) | secs(600)")`, `parse_save("auto | steps(1000)")`,
`parse_keep("last(3) | every(1000) | best(2, eval/loss)")`: parts joined by `|`; a step
that any part wants is saved, or kept. `best` goes by a metric of the evaluation, the
smaller the better, or the larger with `best(2, accuracy, max)`. The newest step and
the newest healthy one are kept whatever the policy says.

`parse_save_error("fail | warn | retry(3)")`, one of them: what a failed save means.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxft import config, records

_TERM = re.compile(r"\s*(\w+)\s*\(\s*([^()]*?)\s*\)\s*")
_AUTO = "auto"
_Shares = Callable[[records.CheckpointInfo, records.CheckpointInfo], bool]


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
class Auto:
    """Saves when the last save began as long ago as `interval` says now.

    It is asked at every border, which is how it can measure; see
    `jaxft.checkpoint.auto_interval`.
    """

    interval: Callable[[records.SaveQuestion], float]

    def should_save(self, question: records.SaveQuestion) -> bool:
        """Whether enough time has gone by."""
        secs = self.interval(question)
        return question.now_secs - question.last_secs >= secs


@dataclasses.dataclass(frozen=True)
class AnySave:
    """Saves when any of `policies` wants to."""

    policies: tuple[records.SavePolicy, ...]

    def should_save(self, question: records.SaveQuestion) -> bool:
        """Whether any part says so; all are asked, for some measure."""
        answers = [policy.should_save(question) for policy in self.policies]
        return any(answers)


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
class Best:
    """Keeps the `num_steps` checkpoints with the best value of a metric.

    Those that do not have it, or not as a finite number, are not among them; of two
    that are as good the newer one is. Where they have metrics and none has this one,
    which is most likely misspelt, it is no reason to delete any.
    """

    num_steps: int
    metric: str
    largest: bool = False

    def is_void(self, checkpoints: Sequence[records.CheckpointInfo]) -> bool:
        """Whether there are metrics, and nobody has this one."""
        evaluated = [info.metrics for info in checkpoints if info.metrics]
        return bool(evaluated) and all(self.metric not in one for one in evaluated)

    def should_keep(self, checkpoints: Sequence[records.CheckpointInfo]) -> list[bool]:
        """True for the best ones."""
        if self.is_void(checkpoints):
            return [True] * len(checkpoints)
        sign = -1.0 if self.largest else 1.0
        ranked = sorted(
            (sign * value, -info.step)
            for info in checkpoints
            if math.isfinite(value := info.metrics.get(self.metric, math.nan))
        )
        kept = {-step for _, step in ranked[: self.num_steps]}
        return [info.step in kept for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class AnyKeep:
    """Keeps what any of `policies` keeps."""

    policies: tuple[records.KeepPolicy, ...]

    def should_keep(self, checkpoints: Sequence[records.CheckpointInfo]) -> list[bool]:
        """True where any part says so that has something to go by."""
        parts = [
            policy
            for policy in self.policies
            if not (isinstance(policy, Best) and policy.is_void(checkpoints))
        ]
        answers = [part.should_keep(checkpoints) for part in parts or self.policies]
        return [any(column) for column in zip(*answers, strict=True)]


@dataclasses.dataclass(frozen=True)
class SaveErrors:
    """What a failed save means.

    Attributes:
        is_fatal: the first one ends the run.
        num_retries: how often in a row the next border tries again at once.
        max_failed: so many failures in a row end the run.
    """

    is_fatal: bool = True
    num_retries: int = 0
    max_failed: int = 1


def _num_steps(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{text or 'nothing'} is no whole number") from None
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _num_secs(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text or 'nothing'} is no number") from None
    if not 0 < number < math.inf:
        raise ValueError("must be a positive number of seconds")
    return number


def _best(text: str) -> Best:
    number, _, rest = text.partition(",")
    metric, _, mode = (part.strip() for part in rest.partition(","))
    if not metric or mode not in ("", "min", "max"):
        raise ValueError("takes a number, a metric, and min or max")
    return Best(_num_steps(number), metric, mode == "max")


# Name -> how its part is made of the text in brackets, and an example.
_Known = Mapping[str, tuple[Callable[[str], Any], str]]

_SAVE: _Known = {
    "steps": (lambda text: Steps(_num_steps(text)), "steps(10)"),
    "secs": (lambda text: Secs(_num_secs(text)), "secs(10)"),
}
_KEEP: _Known = {
    "last": (lambda text: Last(_num_steps(text)), "last(10)"),
    "every": (lambda text: Every(_num_steps(text)), "every(10)"),
    "best": (_best, "best(2, loss)"),
}


def parse_save(
    text: str,
    *,
    num_processes: int = 1,
    interval: Callable[[records.SaveQuestion], float] | None = None,
) -> records.SavePolicy:
    """Reads a save policy.

    Args:
        text: the policy.
        num_processes: that are to agree on its answers.
        interval: what `auto` goes by, in seconds; without one there is no `auto`.

    Raises:
        ConfigError: it names `checkpoint.save` and lists what exists; or it goes by
            the clocks of several processes.
    """
    known = dict(_SAVE)
    if interval is not None:
        known[_AUTO] = (lambda _: Auto(interval), _AUTO)
    parts = _parse(text, path="checkpoint.save", known=known)
    policy = parts[0] if len(parts) == 1 else AnySave(tuple(parts))
    if num_processes > 1 and reads_clock(policy):
        raise config.ConfigError(
            "checkpoint.save",
            f"{text!r} goes by a clock, on which {num_processes} processes do not "
            "agree: use steps(n)",
        )
    return policy


def parse_keep(text: str) -> records.KeepPolicy:
    """Reads a retention policy.

    Raises:
        ConfigError: it names `checkpoint.keep` and lists what exists.
    """
    parts = _parse(text, path="checkpoint.keep", known=_KEEP)
    return parts[0] if len(parts) == 1 else AnyKeep(tuple(parts))


def _parse(text: str, *, path: str, known: _Known) -> list[Any]:
    choice = " and ".join(example for _, example in known.values())
    parts = []
    for term in text.split("|"):
        if term.strip() == _AUTO and _AUTO in known:
            parts.append(known[_AUTO][0](""))
            continue
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in known or match[1] == _AUTO:
            raise config.ConfigError(
                path,
                f"{term.strip()!r} is no policy; there are e.g. {choice}, joined by |",
            )
        make, example = known[match[1]]
        try:
            parts.append(make(match[2]))
        except ValueError as error:
            raise config.ConfigError(
                path, f"{term.strip()!r}: {error}; write e.g. {example}"
            ) from error
    return parts


def parse_save_error(text: str, *, max_failed: int) -> SaveErrors:
    """Reads what a failed save means: `fail`, `warn` or `retry(n)`.

    Args:
        text: the policy.
        max_failed: so many failures in a row end the run under `warn`.

    Raises:
        ConfigError: it names `checkpoint.on_save_error` and lists what exists.
    """
    if type(max_failed) is not int or max_failed < 1:
        problem = f"must be at least 1 failed save in a row, is {max_failed!r}"
        raise config.ConfigError("checkpoint.max_failed_saves", problem)
    path = "checkpoint.on_save_error"
    if text.strip() == "fail":
        return SaveErrors()
    if text.strip() == "warn":
        return SaveErrors(is_fatal=False, max_failed=max_failed)
    match = _TERM.fullmatch(text)
    if match is None or match[1] != "retry":
        raise config.ConfigError(
            path, f"{text!r} is none of fail, warn and retry(n), e.g. retry(3)"
        )
    try:
        number = _num_steps(match[2])
    except ValueError as error:
        raise config.ConfigError(path, f"{text!r}: {error}") from error
    return SaveErrors(is_fatal=False, num_retries=number, max_failed=number + 1)


def reads_clock(policy: records.SavePolicy) -> bool:
    """Whether the answers of a policy depend on time: processes may differ."""
    if isinstance(policy, AnySave):
        return any(reads_clock(part) for part in policy.policies)
    return isinstance(policy, Secs | Auto)


def split_by_clock(
    policy: records.SavePolicy,
) -> tuple[records.SavePolicy | None, records.SavePolicy | None]:
    """What of a policy goes by the step alone, what by a clock; None for nothing."""
    parts = policy.policies if isinstance(policy, AnySave) else (policy,)
    halves: list[records.SavePolicy | None] = []
    for by_clock in (False, True):
        half = tuple(part for part in parts if reads_clock(part) is by_clock)
        halves.append(AnySave(half) if half else None)
    return halves[0], halves[1]


def names_auto(text: str) -> bool:
    """Whether `auto` is a part of a save policy."""
    return _AUTO in (term.strip() for term in text.split("|"))


def reads_metrics(policy: records.KeepPolicy) -> bool:
    """Whether the answers of a policy depend on evaluations."""
    return bool(metrics_of(policy))


def metrics_of(policy: records.KeepPolicy) -> frozenset[str]:
    """The metrics of an evaluation that a policy goes by."""
    if isinstance(policy, AnyKeep):
        return frozenset().union(*map(metrics_of, policy.policies))
    return frozenset({policy.metric} if isinstance(policy, Best) else ())


def most_kept(policy: records.KeepPolicy) -> int:
    """How many steps a policy keeps, apart from those that `every` adds up."""
    if isinstance(policy, AnyKeep):
        return sum(most_kept(part) for part in policy.policies)
    return policy.num_steps if isinstance(policy, Last | Best) else 0


def plan_deletions(
    checkpoints: Sequence[records.CheckpointInfo],
    *,
    keep: records.KeepPolicy,
    pinned: Collection[int] = (),
    shares: _Shares | None = None,
) -> list[records.CheckpointInfo]:
    """Which of the committed `checkpoints`, sorted by step, may go.

    Never the newest one and never the newest healthy one, whatever `keep` says: one of
    them is the resume point. `keep` is asked about the healthy ones alone, so the
    others do not count in `last`; they go when they are not the newest.

    Args:
        checkpoints: all that are there.
        keep: the policy.
        pinned: labels that stay whatever it says.
        shares: whether two steps share a file. Where two that stay would become
            neighbours and do, one between them stays as well, until they are not
            neighbours any more: one bad file must not be in both.
    """
    healthy = [info for info in checkpoints if info.healthy]
    kept = {
        info.step
        for info, stays in zip(healthy, keep.should_keep(healthy), strict=True)
        if stays
    }
    kept |= {info.step for info in (*checkpoints[-1:], *healthy[-1:])}
    kept |= set(pinned)
    if shares is not None:
        staying = [i for i, info in enumerate(checkpoints) if info.step in kept]
        for first, second in itertools.pairwise(staying):
            between = checkpoints[first : second + 1]
            kept |= {info.step for info in _apart(between, shares)}
    return [info for info in checkpoints if info.step not in kept]


def _apart(
    checkpoints: Sequence[records.CheckpointInfo], shares: _Shares
) -> list[records.CheckpointInfo]:
    """Those between the first and the last that have to stay to part the two."""
    first, *between, last = checkpoints
    if not between or not shares(first, last):
        return []
    for info in reversed(between):
        if not shares(first, info) and not shares(info, last):
            return [info]
    return [between[-1], *_apart(checkpoints[:-1], shares)]


def lasting_neighbour(
    checkpoints: Sequence[records.CheckpointInfo],
    new: records.CheckpointInfo,
    *,
    keep: records.KeepPolicy,
    pinned: Collection[int] = (),
) -> records.CheckpointInfo | None:
    """The step that `new` will follow when all have gone that go with time.

    Args:
        checkpoints: that are committed, sorted by step.
        new: the next one.
        keep: the policy.
        pinned: labels that stay whatever it says.

    Returns:
        None when `new` goes, too, or will be the first one.
    """
    later = [
        records.CheckpointInfo(step=new.step + 1 + i, path="", commit_secs=0.0)
        for i in range(max(1, most_kept(keep)))
    ]
    asked = [*checkpoints, new]
    answers = keep.should_keep([*asked, *later])
    lasting = [
        info
        for info, stays in zip(asked, answers, strict=False)
        if stays or info.step in pinned
    ]
    is_lasting = len(lasting) > 1 and lasting[-1] is new
    return lasting[-2] if is_lasting else None
