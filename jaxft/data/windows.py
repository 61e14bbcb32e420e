"""Batches that are left out, as a person writes them.

World: host-only. Floor: `data`. Read `jaxft/data/iterator.py`, which passes over
them, before this file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxft.config import ConfigError
from jaxft.data.iterator import Window, batch_index

_PATH = "data.skip"
_PART = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_skip(text: str) -> tuple[Window, ...]:
    """`300-310, 400` as half-open windows, `((300, 311), (400, 401))`.

    Raises:
        ConfigError: for `data.skip`: a part of it is no batch and no range.
    """
    windows = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(
                _PATH, f"{part!r} is no range of batches: write e.g. 300-310, 400"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < 2**62:
            raise ConfigError(_PATH, f"{part!r} is empty, or beyond any run")
        windows.append((first, last + 1))
    return tuple(windows)


def add_skips(
    saved: Sequence[Window], wanted: Sequence[Window], *, step: int
) -> list[Window]:
    """The windows from `step` on: those that are saved, and new ones.

    Args:
        saved: what the steps so far were trained without.
        wanted: what is to be left out.
        step: finished step attempts.

    Raises:
        ConfigError: for `data.skip`: a new window holds batches that the steps so far
            were trained on; they cannot be left out any more.
    """
    new = [window for window in wanted if window not in saved]
    for start, stop in new:
        if start < (next_batch := batch_index(step, saved)):
            raise ConfigError(
                _PATH,
                f"step {step} is trained on batches up to {next_batch - 1}, so "
                f"{start}-{stop - 1} cannot be left out: roll back first",
            )
    return [*saved, *new]
