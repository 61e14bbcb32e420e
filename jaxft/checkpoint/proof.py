"""What proves a step: digests of the state it was made of, and its manifest.

World: device. Floor: above `orbax_io`, below `restore` and `manager`. Read
`jaxft/checkpoint/state_digests.py` and `jaxft/checkpoint/manifest.py` before.

A `Proof` accompanies one save: it says which leaves are linked, and makes the manifest
when all else is written. `differing_leaves` is its counterpart.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from jaxft import patterns, records
from jaxft.checkpoint import array_store, incremental, layout, run_record, step_files
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint.chunking import ArrayOptions
from jaxft.checkpoint.leaf_links import Links
from jaxft.checkpoint.manifest import LeafEntry, Manifest
from jaxft.checkpoint.state_digests import Digests, Partials
from jaxft.fingerprints import LeafDigest

PyTree = Any

_POLL_SECS = 0.01
_SHARE_SECS = 0.2


class UnhealthyError(Exception):
    """A state that is no resume point, as its leaves are not finite.

    Attributes:
        leaves: their paths.
    """

    def __init__(self, paths: tuple[str, ...]):
        super().__init__(f"not finite: {', '.join(paths[:20])}")
        self.leaves = paths


# --- of one save --------------------------------------------------------------


class Proof:
    """Accompanies one save.

    Args:
        step: its label.
        record: its run record.
        state: what is saved.
        arrays: how its arrays are stored.
        health: globs of the leaves that must be finite.

    Attributes:
        step: its label.
        arrays: how its arrays are stored.
        over: set when the save has ended.
        kinds: leaf path -> what it is, as text; where links are possible.
        links: which leaves are not written; see `plan_links`.
        facts: for the commit event, complete when the step is sealed.
        manifest: of the step, when it is sealed.
    """

    def __init__(
        self,
        step: int,
        *,
        record: Mapping[str, Any],
        state: PyTree,
        arrays: ArrayOptions,
        health: str,
    ):
        self.step = step
        self.arrays = arrays
        self.over = threading.Event()
        self.kinds: Mapping[str, str] = {}
        self.links = Links()
        self.facts: dict[str, Any] = {"num_linked": 0, "linked_bytes": 0}
        self.manifest: Manifest | None = None
        self._timeline = record["timeline"]
        self._health = patterns.Patterns(health)
        self._digests = Digests(state, memory_bytes=arrays.memory_bytes)
        self._carried: Mapping[str, LeafEntry] = {}
        self._base: Manifest | None = None  # of what is carried

    def plan_links(
        self,
        *,
        alike: Collection[str],
        newest: Manifest,
        base: Manifest,
        base_path: str,
        full_every: int,
        beside: Manifest | None = None,
    ) -> None:
        """Chooses the leaves to link, by the digests of the candidates.

        Where all of the state is held, that is left to whoever asks for the links
        first, in the background; else it must be known before the arrays may change,
        and is waited for.

        Args:
            alike: leaves of the kind that they are in `base`; no other is linked.
            newest: of the newest committed step.
            base: of the one committed before it, whose bytes are linked.
            base_path: folder of that.
            full_every: commits after which a leaf is written anew.
            beside: see `incremental.candidates`.
        """
        settings: dict[str, Any] = {
            "step": self.step,
            "newest": newest,
            "base": base,
            "array_layout": self.arrays.layout,
            "codec": self.arrays.codec,
            "full_every": full_every,
            "beside": beside,
        }
        types = {path: of for path, of in self._digests.types.items() if path in alike}
        asked = incremental.candidates(types, **settings)
        if not asked:
            return
        self._base = base
        self.start_digests()
        state = os.path.join(base_path, layout.STATE_ITEM)

        def decide() -> dict[str, str]:
            digests = self._digests.of(path for path in types if path in asked)
            self._carried = incremental.plan_links(digests, types, **settings)
            names = [entry.name for entry in self._carried.values()]
            return {name: os.path.join(state, name) for name in names}

        if self._digests.are_held:
            possible = frozenset(self._digests.names[path] for path in asked)
            self.links = Links(possible=possible, decide=_once(decide))
        else:
            self.links = Links.known(decide())

    def start_digests(self) -> None:
        """Starts the digests, if no link had to wait for them before.

        Best after the snapshot: the devices, which on CPU are the cores that begin the
        save, are free until then. The arrays must not have been donated yet.
        """
        self._digests.start()

    def take_digests(self) -> None:
        """Takes those that the devices do not; for a thread that has time.

        First those that the writing waits for.
        """
        with contextlib.suppress(Exception):  # The writing will meet it as well.
            self.links.decide()
        self._digests.take()

    def seal(self, folder: pathlib.Path, *, others: Iterable[Partials] = ()) -> None:
        """Judges the state and writes the manifest of the finished step.

        Args:
            folder: the step, under another name yet.
            others: what the other processes know of the digests.

        Raises:
            UnhealthyError: it is no resume point. In several processes, all of which
                wait for the commit, the manifest says so instead.
            OSError: a file cannot be read or written.
        """
        digests = self._digests.all(others)
        bad = self.bad_leaves(digests)
        if bad and jax.process_count() == 1:
            raise UnhealthyError(bad)
        files = step_files.collect_files(
            folder, array_layout=self.arrays.layout, known=self._linked_files()
        )
        names = self._digests.names
        sizes = array_store.measure_leaves(
            folder,
            names=list(names.values()),
            files=files,
            array_layout=self.arrays.layout,
        )
        entries = {
            path: self._carried.get(path)
            or LeafEntry(
                path=path,
                name=name,
                dtype=self._digests.types[path][0],
                shape=self._digests.types[path][1],
                fingerprint=digests[path].fingerprint,
                written_at=self.step,
                num_chunks=sizes[name][0],
                num_bytes=sizes[name][1],
                num_nonfinite=digests[path].num_nonfinite,
            )
            for path, name in names.items()
        }
        self.manifest = Manifest(
            step=self.step,
            timeline=self._timeline,
            array_layout=self.arrays.layout,
            codec=self.arrays.codec,
            healthy=not bad,
            unhealthy=bad,
            leaves=entries,
            files=files,
        )
        manifests.write(folder, self.manifest)
        self.facts["linked_bytes"] = sum(e.num_bytes for e in self._carried.values())
        self.facts["num_linked"] = len(self._carried)

    def _linked_files(self) -> dict[str, step_files.FileEntry]:
        """What the step they come from says of the files that are linked."""
        if self._base is None:
            return {}
        names = {entry.name for entry in self._carried.values()}
        files = self._base.files
        return {path: files[path] for path in step_files.of_leaves(files, names)}

    @property
    def is_unhealthy(self) -> bool:
        """Whether a step was written that is no resume point."""
        return self.manifest is not None and not self.manifest.healthy

    def bad_leaves(self, digests: Mapping[str, LeafDigest]) -> tuple[str, ...]:
        """Paths of the leaves that must be finite and are not.

        Somebody's own tree may have no leaf of the names that are asked for: then all
        of its leaves are.
        """
        if not self._health.text.strip():
            return ()
        paths = self._health.select(digests) or list(digests)
        return tuple(path for path in paths if digests[path].num_nonfinite)

    # --- several processes: what each knows goes through the root ---------------

    def share(self, step_path: str, *, timeout_secs: float) -> None:
        """Gives the primary process what this one knows, until the step is there.

        The primary one begins a save by removing what an earlier one left, which may
        be after this process has told: what is gone is told again.
        """
        folder = _shared_folder(step_path)
        path = os.path.join(folder, f"{jax.process_index()}.json")
        try:
            text = json.dumps({"partials": self._digests.partials()})
        except Exception as error:
            text = json.dumps({"failure": records.first_line(error)})
        deadline = time.monotonic() + timeout_secs
        while time.monotonic() < deadline and not os.path.isdir(step_path):
            if not os.path.exists(path):
                with contextlib.suppress(FileNotFoundError):
                    os.makedirs(folder, exist_ok=True)
                    with open(f"{path}.new", "w") as file:
                        file.write(text)
                    os.rename(f"{path}.new", path)
            if self.over.wait(_SHARE_SECS):
                break
        shutil.rmtree(folder, ignore_errors=True)

    def end(self, step_path: str) -> None:
        """The save has ended: nobody needs what was shared any more."""
        self.over.set()
        if jax.process_count() > 1:
            shutil.rmtree(_shared_folder(step_path), ignore_errors=True)

    def seal_shared(
        self,
        folder: pathlib.Path,
        *,
        step_path: str,
        timeout_secs: float,
    ) -> None:
        """`seal` in the primary process of several, with what the others shared.

        Raises:
            TimeoutError: one of them has not.
            RuntimeError: one of them could not take its digests.
        """
        deadline = time.monotonic() + timeout_secs
        others = []
        for index in range(jax.process_count()):
            if index == jax.process_index():
                continue
            path = pathlib.Path(_shared_folder(step_path), f"{index}.json")
            while not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {index} has not told its digests")
                time.sleep(_POLL_SECS)
            told = json.loads(path.read_bytes())
            if "failure" in told:
                raise RuntimeError(f"process {index} has no digests: {told['failure']}")
            others.append(told["partials"])
        self.seal(folder, others=others)


def _once(function: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    """Its result, from the one call that the first of all threads makes.

    If that fails the next one tries again, and fails like it.
    """
    lock, results = threading.Lock(), []

    def call() -> dict[str, str]:
        with lock:
            if not results:
                results.append(function())
            return results[0]

    return call


def _shared_folder(step_path: str) -> str:
    return f"{step_path}{layout.TMP_MARK}-digests"


# --- of one restore -----------------------------------------------------------


def sample(manifest: Manifest) -> list[str]:
    """A stable eighth of the leaves, and at least one."""
    chosen = [path for path in manifest.leaves if zlib.crc32(path.encode()) % 8 == 0]
    return chosen or list(manifest.leaves)[:1]


def differing_leaves(digests: Digests, manifest: Manifest) -> list[tuple[str, str]]:
    """(leaf path, what differs) of a restored state; all processes call it together.

    Args:
        digests: started, of the state as it lies on the devices now.
        manifest: of the step that it was read from.
    """
    problems = []
    for path, digest in digests.all_together().items():
        entry = manifest.leaves.get(path)
        if entry is None:
            problems.append((path, "has no fingerprint in the manifest"))
        elif digest.fingerprint != entry.fingerprint:
            reason = (
                f"its values have changed: fingerprint {digest.fingerprint}, "
                f"{entry.fingerprint} was saved"
            )
            problems.append((path, reason))
    return problems


def num_state_bytes(specs: Mapping[str, run_record.LeafSpec]) -> tuple[int, int]:
    """(leaves with elements, about how many bytes they are)."""
    sizes = [
        math.prod(spec.shape) * run_record.item_bytes(spec.dtype)
        for spec in specs.values()
        if not spec.is_empty and spec.kind is not run_record.LeafKind.TEXT
    ]
    return len(sizes), sum(sizes)
