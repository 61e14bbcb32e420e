"""How steps are stored and proven, as text and as values that have been checked.

World: host-only. Floor: above `layout`. Read
`jaxft/checkpoint/manager.py` next.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxft import patterns
from jaxft.checkpoint import host_memory, layout
from jaxft.config import ArrayLayout, CheckpointConfig, Codec, ConfigError, Verify

# Which leaves must be finite, unless somebody says so. Not every state has them all.
HEALTH = CheckpointConfig().health

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_MIN_AUTO_BYTES = 2**26
_UNKNOWN_BYTES = 2**30  # taken where the system does not say what it has
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

# Below this many bytes a leaf, the files of a step cost more than its bytes.
_MIN_MEAN_BYTES = 2**16
_MAX_FEW_LEAVES = 500


# Why no step may be committed now, one line; empty where one may. Of a job of several
# processes that was begun anew without this one, it may not.
MayCommit = Callable[[], str]


def always() -> str:
    """A `MayCommit` for whoever writes alone."""
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How steps are stored and proven.

    Attributes:
        layout: of the arrays on disk.
        codec: of their chunks.
        full_every: commits after which a leaf is written anew; 0 never links.
        verify: how much of a step is proven when it is restored.
        health: globs of the leaves that must be finite.
        memory_bytes: host memory that a save or a restore may take beyond the state.
        may_commit: asked before a save begins, and just before it commits.
    """

    layout: ArrayLayout
    codec: Codec
    full_every: int
    verify: Verify
    health: str
    memory_bytes: int
    may_commit: MayCommit = always


def make_options(
    *,
    array_layout: str,
    codec: str,
    full_every: int,
    verify: str,
    health: str,
    memory_budget: str,
    may_commit: MayCommit = always,
) -> Options:
    """Checks the settings of a manager; the arguments are those of the config.

    Raises:
        ConfigError: it names the setting and what there is.
    """
    if type(full_every) is not int or full_every < 0:
        problem = f"must be a number of commits, or 0 for none, is {full_every!r}"
        raise ConfigError("checkpoint.full_every", problem)
    return Options(
        layout=_choice(ArrayLayout, array_layout, "checkpoint.layout"),
        codec=_choice(Codec, codec, "checkpoint.codec"),
        full_every=full_every,
        verify=_choice(Verify, verify, "checkpoint.verify"),
        health=health,
        memory_bytes=_memory_bytes(memory_budget),
        may_commit=may_commit,
    )


def _memory_bytes(text: str) -> int:
    """A size, or for `auto` half of the memory that is available now."""
    if text.strip() != "auto":
        return parse_bytes(text, path="checkpoint.memory_budget")
    available = host_memory.available_bytes()
    if available is None:
        return _UNKNOWN_BYTES
    return max(_MIN_AUTO_BYTES, available // 2)


def check_health(health: str, paths: Iterable[str]) -> None:
    """Refuses a glob that names no leaf: what it was meant for would go unwatched.

    Args:
        health: the setting.
        paths: of all leaves of the state.

    Raises:
        ConfigError: it names the glob.
    """
    paths = list(paths)
    usual = _globs(HEALTH)
    for glob in _globs(health):
        if glob in usual or glob.startswith("!"):
            continue
        if not patterns.Patterns(glob).select(paths):
            tops = sorted({path.partition("/")[0] for path in paths})
            raise ConfigError(
                "checkpoint.health",
                f"{glob!r} fits no leaf; the state has {', '.join(tops[:20])}",
            )


def _globs(text: str) -> list[str]:
    return [glob.strip() for glob in text.split(",") if glob.strip()]


def checked_root(root: str | os.PathLike[str], *, timeout_secs: float) -> str:
    """The absolute root of a manager, whose deadline is checked as well.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if not timeout_secs > 0:
        raise ConfigError(
            "checkpoint.timeout_secs", f"must be positive, is {timeout_secs}"
        )
    try:
        return layout.absolute_root(root)
    except ValueError as error:
        raise ConfigError("checkpoint", str(error)) from error


_E = TypeVar("_E", bound=enum.Enum)


def _choice(kind: type[_E], text: str | _E, path: str) -> _E:
    try:
        return kind(text)
    except ValueError as error:
        names = ", ".join(str(choice.value) for choice in kind)
        raise ConfigError(path, f"{text!r} is none of {names}") from error


def parse_bytes(text: str, *, path: str) -> int:
    """Reads `14GiB`, `500 MB` or `1000000`; at least 1 MiB.

    Raises:
        ConfigError: it names `path`.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(path, f"{text!r} is no size: write e.g. 4GiB or 500MB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    size = int(float(match[1]) * base ** _POWERS[unit.removesuffix("i")])
    if size < 2**20:
        raise ConfigError(path, f"{text!r} is below 1MiB: nothing could be read")
    return size


def choose_layout(
    wanted: ArrayLayout,
    *,
    num_leaves: int,
    num_bytes: int,
    has_links: bool,
    num_processes: int = 1,
) -> tuple[ArrayLayout, str]:
    """The layout to write in, and why.

    Args:
        wanted: the setting.
        num_leaves: leaves with elements.
        num_bytes: of all of them.
        has_links: whether the root has hard links.
        num_processes: that save together; only one alone links.
    """
    if wanted is not ArrayLayout.AUTO:
        return wanted, "it was asked for"
    if num_processes > 1:
        return ArrayLayout.OCDBT, f"{num_processes} processes link no leaves"
    if not has_links:
        return ArrayLayout.OCDBT, "the root has no hard links"
    mean_bytes = num_bytes // max(1, num_leaves)
    if num_leaves > _MAX_FEW_LEAVES and mean_bytes < _MIN_MEAN_BYTES:
        reason = f"{num_leaves} leaves of {mean_bytes} bytes are many small files"
        return ArrayLayout.OCDBT, reason
    return ArrayLayout.FILES, "unchanged leaves can be linked"
