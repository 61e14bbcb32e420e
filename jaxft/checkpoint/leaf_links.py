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
from concurrent import futures
from typing import Any

_NUM_THREADS = 4  # One alone waits for the file system most of the time.


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
    if not _link_files(source, target):
        raise FileNotFoundError(f"nothing to link in {source}")


def _link_files(source: str, target: str) -> int:
    """How many files there are now, in all folders."""
    os.makedirs(target, exist_ok=True)
    num_files = 0
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                num_files += _link_files(entry.path, path)
            else:
                os.link(entry.path, path)
                num_files += 1
    return num_files


async def link(infos: Sequence[Any], links: Mapping[str, str]) -> None:
    """Links leaves of one save, by Orbax's notes about them."""
    pairs = []
    for info in infos:
        await info.await_path_creation()
        target = os.path.join(os.fspath(info.parent_dir), info.name)
        pairs.append((links[info.name], target))

    def link_all() -> None:
        with futures.ThreadPoolExecutor(_NUM_THREADS, "jaxft-link") as threads:
            list(threads.map(link_leaf, *zip(*pairs, strict=True)))

    if pairs:
        await asyncio.to_thread(link_all)
