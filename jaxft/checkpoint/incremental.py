"""Which leaves a save links instead of writing them: a pure decision.

World: host-only. Floor: above `manifest`. Read `jaxft/checkpoint/manifest.py` before
and `jaxft/checkpoint/proof.py` after.

A link is not a copy: a bad file condemns every step that shares it. Hence three rules
for a leaf that did not change.

* It is linked to the step before the newest one. So its bytes alternate between two
  files, and neighbouring steps never share one; nor do those that will be neighbours
  when others have been deleted, as far as that is known.
* It is written anew when its bytes are `full_every` commits old.
* Leaves of one age are not all written anew by one save. Where most of what could be
  linked is of one age, half of it goes ahead of its time; from then on two halves
  take turns. More parts would keep every save busy with some of them, while most
  saves should write what has changed and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping

from jaxft.checkpoint.manifest import LeafEntry, Manifest
from jaxft.fingerprints import LeafDigest

# Commits from a step to the one that links to it.
_DISTANCE = 2
# Of the elements that could be linked: above this share of one age, half goes ahead.
_MOST = 2 / 3

Specs = Mapping[str, tuple[str, tuple[int, ...]]]


def candidates(
    specs: Specs,
    *,
    step: int,
    newest: Manifest | None,
    base: Manifest | None,
    array_layout: str,
    codec: str,
    full_every: int,
    beside: Manifest | None = None,
) -> set[str]:
    """Leaves that may be linked if their digest says so: it is worth waiting for.

    A leaf that changed between the last two commits is none of them, for it will have
    changed again.

    Args:
        specs: leaf path -> (dtype, shape) of what is to be saved.
        step: its label.
        newest: of the newest committed step.
        base: of the one committed before it, whose files are linked.
        array_layout: `files` or `ocdbt`; only the first has files to link.
        codec: how chunks are encoded.
        full_every: commits after which a leaf is written anew; 0 never links.
        beside: of the step that will be the neighbour for good; nothing is shared
            with it.

    Returns:
        Paths; none where a manifest is missing.
    """
    if (
        newest is None
        or base is None
        or len({step, newest.step, base.step}) < 3
        or (base.array_layout, base.codec) != (array_layout, codec)
        or array_layout != "files"
    ):
        return set()
    others = [newest] if beside is None else [newest, beside]
    return {
        entry.path
        for entry in _steady(specs, newest=newest, base=base)
        # Of the newest it is only where steps between them are gone.
        if not any(_has_bytes(other, entry) for other in others)
        and entry.num_links + _DISTANCE <= full_every
    }


def plan_links(
    digests: Mapping[str, LeafDigest],
    specs: Specs,
    *,
    step: int,
    newest: Manifest | None,
    base: Manifest | None,
    array_layout: str,
    codec: str,
    full_every: int,
    beside: Manifest | None = None,
) -> dict[str, LeafEntry]:
    """Chooses the leaves that are linked to `base`; all others are written.

    Args:
        digests: by leaf path, of the candidates at least.
        specs: see `candidates`.
        step: see `candidates`.
        newest: see `candidates`.
        base: see `candidates`.
        array_layout: see `candidates`.
        codec: see `candidates`.
        full_every: see `candidates`.
        beside: see `candidates`.

    Returns:
        Leaf path -> its entry for the manifest of the new step.
    """
    possible = candidates(
        specs,
        step=step,
        newest=newest,
        base=base,
        array_layout=array_layout,
        codec=codec,
        full_every=full_every,
        beside=beside,
    )
    if newest is None or base is None or not possible:
        return {}
    unchanged = [
        base.leaves[path]
        for path, digest in digests.items()
        if path in possible and digest.fingerprint == base.leaves[path].fingerprint
    ]
    total = sum(map(_num_elements, _steady(specs, newest=newest, base=base)))
    ahead = _ahead(unchanged, num_elements=total, full_every=full_every)
    return {
        entry.path: dataclasses.replace(entry, num_links=entry.num_links + _DISTANCE)
        for entry in unchanged
        if entry.path not in ahead
    }


def _steady(specs: Specs, *, newest: Manifest, base: Manifest) -> list[LeafEntry]:
    """Entries of `base` that fit the leaves to be saved and that `newest` has too."""
    found = []
    for path, (dtype, shape) in specs.items():
        old, new = base.leaves.get(path), newest.leaves.get(path)
        if old is None or new is None:
            continue
        if _content(old) == _content(new) == (old.fingerprint, dtype, tuple(shape)):
            found.append(old)
    return found


def _has_bytes(manifest: Manifest, entry: LeafEntry) -> bool:
    """Whether a step has the very files of another step's leaf."""
    own = manifest.leaves.get(entry.path)
    return own is not None and own.written_at == entry.written_at


def _content(entry: LeafEntry) -> tuple[object, ...]:
    return entry.fingerprint, entry.dtype, tuple(entry.shape)


def _ahead(
    unchanged: Iterable[LeafEntry], *, num_elements: int, full_every: int
) -> set[str]:
    """Leaves that are written before they must be, so that ages differ from then on.

    Args:
        unchanged: what could be linked.
        num_elements: of all steady leaves, whatever their age.
        full_every: see `candidates`.
    """
    ages: dict[int, list[LeafEntry]] = {}
    for entry in unchanged:
        if entry.num_links + _DISTANCE > full_every // 2:
            ages.setdefault(entry.written_at, []).append(entry)
    ahead: set[str] = set()
    for same in ages.values():
        num_same = sum(map(_num_elements, same))
        if num_same <= num_elements * _MOST:
            continue
        num_taken = 0
        for entry in sorted(same, key=_rank):
            num_taken += _num_elements(entry)
            if num_taken <= num_same / 2:
                ahead.add(entry.path)
    return ahead


def _num_elements(entry: LeafEntry) -> int:
    return math.prod(entry.shape)


def _rank(entry: LeafEntry) -> bytes:
    """An order of leaves that mixes the layers and is the same in every process."""
    return hashlib.blake2b(entry.path.encode(), digest_size=8).digest()
