"""Finds out before a save whether all processes write into one folder.

World: device. Floor: above `space`, below `planner`, its one user. Read
`jaxft/checkpoint/together.py` before and `jaxft/checkpoint/planner.py` after.

A root that is a local folder of each machine takes part of a step on each of them,
and no step is ever whole: the save would wait for the missing parts until its
deadline. So the primary process writes a file, and all others look for it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import time
import uuid

import jax

from jaxft.checkpoint import space, together
from jaxft.config import ConfigError

# A network file system may show a new file late.
_SEEN_SECS = 10.0
_POLL_SECS = 0.05


def check(root: str) -> None:
    """Refuses a root that not all processes share; all of them call it together.

    Args:
        root: the checkpoint root; it need not exist. Where it is on another path in
            another process it still may be the same folder.

    Raises:
        ConfigError: one does not see what the primary one writes there.
        OSError: the primary process cannot write there.
        FaultError: kind CONFIG: the same, in the other processes.
    """
    if jax.process_count() == 1:
        return
    token = None
    try:
        with together.same_end(f"write to {root}"):
            if jax.process_index() == 0:
                token = _leave_token(root)
        there = [root, os.path.relpath(token, root)] if token else None
        primary_root, place = together.from_primary(there)
        is_seen = _is_same_end(root, primary_root, place) and _sees(root, place)
        blind = together.where(not is_seen)
    finally:
        if token:
            with contextlib.suppress(OSError):  # The next one takes it away.
                token.unlink()
    if blind:
        raise ConfigError(
            "checkpoint",
            f"process {blind[0]} does not see what process 0 writes to "
            f"{primary_root}: the root must be one folder that all processes share",
        )


def _leave_token(root: str) -> pathlib.Path:
    """A new empty file in the root or, where it is not there yet, above it."""
    start = os.path.join(space.nearest_folder(root), space.probe_name(root))
    for left in glob.glob(f"{glob.escape(start)}-*"):  # by a kill
        pathlib.Path(left).unlink(missing_ok=True)
    token = pathlib.Path(f"{start}-{uuid.uuid4().hex}")
    token.touch(exist_ok=False)
    return token


def _is_same_end(root: str, primary_root: str, place: str) -> bool:
    """Whether the folders that are not there yet will have the same names.

    A file beside the root proves nothing about another root beside it.
    """
    num_missing = place.count(os.pardir + os.sep)
    ends = [path.split(os.sep)[-num_missing:] for path in (root, primary_root)]
    return not num_missing or ends[0] == ends[1]


def _sees(root: str, place: str) -> bool:
    path = os.path.normpath(os.path.join(root, place))
    deadline = time.monotonic() + _SEEN_SECS
    while not os.path.lexists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECS)
    return True
