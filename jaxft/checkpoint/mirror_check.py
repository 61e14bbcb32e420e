"""Proves before the first step that a mirror can be one.

World: host-only. Floor: above `space`, below `mirrored`. Read
`jaxft/checkpoint/mirror_place.py` next.

A folder is tried by what copies do there. A store is not: one that does not answer now
may do so later, and a mirror stops no training.
"""

from __future__ import annotations

import hashlib
import os
import shutil

from jaxft.checkpoint import space
from jaxft.config import ConfigError

_SETTING = "checkpoint.mirror"
_SAMPLE = b"jaxft"


def folder_of(address: str) -> str:
    """The absolute folder that an address names; empty for a store."""
    if "://" in address and not address.startswith("file://"):
        return ""
    return os.path.abspath(os.path.expanduser(address.removeprefix("file://")))


def check_apart(address: str, *, root: str) -> None:
    """Refuses a mirror that would go with the root, or a root with its mirror.

    Raises:
        ConfigError: one of them is the other, or within it.
    """
    if not (folder := folder_of(address)):
        return
    ours, theirs = os.path.realpath(root), os.path.realpath(folder)
    common = os.path.commonpath([ours, theirs])
    if common not in (ours, theirs):
        return
    how = "is" if ours == theirs else "is within" if common == ours else "holds"
    problem = f"{address} {how} the checkpoint root {root}: use another place"
    raise ConfigError(_SETTING, problem)


def check_folder(address: str) -> None:
    """Tries to make, write, rename and delete in a mirror that is a folder.

    Raises:
        ConfigError: it names what does not work.
    """
    if not (folder := folder_of(address)):
        return
    # Its own name: the next one finds what a kill has left of it.
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    near = space.nearest_folder(folder)
    place = os.path.join(near, f".jaxft-probe-mirror-{digest}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        os.mkdir(place, 0o700)
        with open(os.path.join(place, "a"), "xb") as file:
            file.write(_SAMPLE)
            file.flush()
            os.fsync(file.fileno())
        os.rename(os.path.join(place, "a"), os.path.join(place, "b"))
    except OSError as error:
        what = "written" if near == folder else "made"
        reason = error.strerror or str(error)
        problem = f"{address} cannot be {what}: {reason}"
        raise ConfigError(_SETTING, problem) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
