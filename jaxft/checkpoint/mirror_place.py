"""Where a mirror is, and whose steps lie there: addresses, and identities of roots.

World: host-only. Floor: above `mirror_folder` and `mirror_objects`, below `mirror` and
`mirror_fetch`. Read `jaxft/checkpoint/mirror_mark.py` before.

A mirror may serve several roots: each has an identity, `<root>/mirror-id`, and only
steps that carry it are replaced or deleted. A root that is begun from the mirror goes
on as the one that wrote the step; the file then also lists the steps that it found
there and never had itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import uuid
from collections.abc import Mapping

from jaxft import durable
from jaxft.checkpoint import (
    decisions,
    mirror_folder,
    mirror_mark,
    mirror_objects,
)

Target = mirror_folder.FolderTarget | mirror_objects.ObjectTarget
Marks = Mapping[int, mirror_mark.Mark | None]

_ID_FILE = "mirror-id"
_ID = re.compile(r"([0-9a-f]{32})((?: \d+)*)\n?")


def open_target(target: str, *, timeout_secs: float) -> Target:
    """The place that an address names.

    Args:
        target: a folder, `file://...`, `s3://bucket/prefix` or `gs://bucket/prefix`;
            see `mirror_objects.ObjectStore` for stores that need an endpoint.
        timeout_secs: deadline of each request to an object store.

    Raises:
        ValueError: it names no place.
        MirrorError: the store cannot be opened.
    """
    check_target(target)
    if "://" in target and not target.startswith("file://"):
        return mirror_objects.ObjectTarget(target, timeout_secs=timeout_secs)
    return mirror_folder.FolderTarget(target.removeprefix("file://"))


def check_target(target: str) -> None:
    """Refuses an address that names no place; looks at nothing but the text.

    Raises:
        ValueError: it says what is wrong.
    """
    scheme, separator, rest = target.partition("://")
    schemes = ["file", *mirror_objects.DRIVERS]
    is_misspelt = not separator and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", target)
    if not target or is_misspelt or (separator and (scheme not in schemes or not rest)):
        known = ", ".join(f"{name}://" for name in schemes)
        raise ValueError(f"mirror {target!r} is no folder and no address of {known}")


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a root is, on a mirror.

    Attributes:
        owner: 32 hex digits.
        inherited: steps that were on the mirror when the root was begun from it.
    """

    owner: str
    inherited: frozenset[int] = frozenset()


def find_identity(root: str) -> Identity | None:
    """The identity of a root; None where it has none yet."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        if match := _ID.fullmatch(pathlib.Path(root, _ID_FILE).read_text()):
            return Identity(match[1], frozenset(map(int, match[2].split())))
    return None


def identify(root: str) -> Identity:
    """The identity of a root, made when it is asked for first.

    Raises:
        OSError: it cannot be read or written.
    """
    return find_identity(root) or write_identity(root, Identity(uuid.uuid4().hex))


def write_identity(root: str, identity: Identity) -> Identity:
    """Makes it durable; gives it back.

    Raises:
        OSError: it cannot be written.
    """
    words = [identity.owner, *map(str, sorted(identity.inherited))]
    path = os.path.join(root, _ID_FILE)
    durable.sweep(path)
    durable.replace(path, f"{' '.join(words)}\n".encode())
    return identity


def decided(place: Target, owner: str) -> decisions.Decisions:
    """What the mirror knows to be decided about a root.

    Raises:
        FaultError: kind CONFIG: it cannot be understood.
        MirrorError: the store fails or does not answer.
    """
    folder = f"{place.where}/{mirror_mark.DECIDED}/{owner}"
    return decisions.parse(place.decisions(owner), folder=folder)


def owners(marks: Marks) -> set[str]:
    """Identities of all roots that have steps on a mirror."""
    return {mark.source for mark in marks.values() if mark is not None}


def owned(marks: Marks, owner: str) -> dict[int, mirror_mark.Mark]:
    """The marks of the steps of one root."""
    return {
        step: mark
        for step, mark in marks.items()
        if mark is not None and mark.source == owner
    }
