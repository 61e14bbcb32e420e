"""Leaves that a save links instead of writing: which, and how it is done.

World: host-only. Floor: beside `array_store`, below `array_handler`. Read
`jaxft/checkpoint/incremental.py`, which chooses them, before and
`jaxft/checkpoint/array_handler.py`, its one user, after.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxft.checkpoint import step_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Leaves of a save that are linked and not written; the same on all processes.

    Attributes:
        possible: names of those that may be.
        decide: leaf name -> absolute folder of the same leaf, of the same value, in a
            committed step on the same file system, for those of them that are. May
            wait until it is known; the same at each call, from any thread.
    """

    possible: Collection[str] = frozenset()
    decide: Callable[[], Mapping[str, str]] = dict

    @classmethod
    def known(cls, links: Mapping[str, str]) -> Links:
        """These, and there is nothing left to decide."""
        return cls(possible=links.keys(), decide=lambda: links)


def link_leaf(source: str, target: str) -> None:
    """Gives `target` the files of the committed leaf `source`, by hard links.

    Raises:
        OSError: a file could not be linked.
    """
    files = step_files.list_files(source)
    if not files:
        raise FileNotFoundError(f"nothing to link in {source}")
    for folder in dict.fromkeys(os.path.dirname(file) for file in files):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
    for file in files:
        os.link(os.path.join(source, file), os.path.join(target, file))


async def link(infos: Sequence[Any], links: Mapping[str, str]) -> None:
    """Links leaves of one save, by Orbax's notes about them."""
    targets = []
    for info in infos:
        await info.await_path_creation()
        targets.append(os.path.join(os.fspath(info.parent_dir), info.name))

    def link_all() -> None:
        for info, target in zip(infos, targets, strict=True):
            link_leaf(links[info.name], target)

    await asyncio.to_thread(link_all)
