"""The digests of a state: on its way to disk, and where it lies after a restore.

World: device. Floor: beside `leaves`, below `proof`. Read
`jaxft/parallel/fingerprint.py` before and `jaxft/checkpoint/proof.py` after.

The digest of a leaf is taken where the leaf lies, before it is copied to the host, and
again where it lies after a restore: whatever happened on the way shows. What lies on
the host is held there instead, so that the loop need not wait for its programs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft import fingerprints
from jaxft.checkpoint import contents, leaves
from jaxft.checkpoint.chunking import ArrayOptions
from jaxft.fingerprints import LeafDigest
from jaxft.parallel import fingerprint

PyTree = Any

_AT_HAND_BYTES = 2**20
_ALL_AT_HAND_BYTES = 2**26
# Leaf path -> what one process holds of it; see `fingerprint.PendingDigests.partials`.
Partials = dict[str, list[tuple[int, int, int]]]


class Digests:
    """The digests of all leaves of a state that have elements and are no text.

    Those of JAX arrays are started by `start` and do not block; the others are taken
    at once, since their memory is the caller's.

    Args:
        state: the tree; after `start` its arrays may be donated. Memory that JAX
            shares with the caller, as `jax.device_put` of a NumPy array may do on
            CPU, is not to be written to before the digests are there.
        paths: only these leaves; None for all.
        memory_bytes: at most half of it is held of leaves that lie on the host, but
            for small ones.

    Attributes:
        names: leaf path -> the name it is stored under.
        are_held: whether, since `start`, all leaves are on the host and held there.
    """

    def __init__(
        self,
        state: PyTree,
        *,
        paths: Iterable[str] | None = None,
        memory_bytes: int = ArrayOptions.memory_bytes,
    ):
        wanted = None if paths is None else frozenset(paths)
        self.names: dict[str, str] = {}
        self.are_held = False
        self._types: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._host: dict[str, LeafDigest] = {}
        on_device = {}
        for path, (name, leaf) in leaves.flatten(state).items():
            if isinstance(leaf, str) or (wanted is not None and path not in wanted):
                continue
            if not isinstance(leaf, jax.Array):
                leaf = np.asarray(leaf, contents.PYTHON_DTYPES.get(type(leaf).__name__))
            if 0 in leaf.shape:
                continue
            self.names[path] = name
            self._types[path] = leaf.dtype, leaf.shape
            if isinstance(leaf, jax.Array):
                on_device[path] = leaf
            else:
                self._host[path] = fingerprints.digest_array(leaf)
        self._on_device = on_device
        self._memory_bytes = memory_bytes
        self._views: dict[str, _View] = {}
        self._views_lock = threading.Lock()
        self._pending: fingerprint.PendingDigests | None = None
        self._started = threading.Event()
        self._failure: Exception | None = None

    @functools.cached_property
    def types(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Leaf path -> (dtype, shape)."""
        return {
            path: (str(dtype), tuple(shape))
            for path, (dtype, shape) in self._types.items()
        }

    def start(self) -> None:
        """Starts what is on other devices than the host's; returns at once.

        A failure is for whoever asks for a digest: a write that goes on already fails
        by it, and is not left waiting.
        """
        if self._started.is_set():
            return
        try:
            on_device, on_host = _split(self._on_device, self._memory_bytes)
            self._views = {path: _View(leaf) for path, leaf in on_host.items()}
            self._pending = fingerprint.start_digests(on_device)
            self.are_held = not on_device
        except Exception as error:
            self._failure = error
        except BaseException:
            # Whoever waits is not to wait for ever.
            self._failure = InterruptedError("stopped while digests were started")
            raise
        finally:
            self._on_device = {}
            self._started.set()

    def _begun(self) -> fingerprint.PendingDigests:
        """The digests to come, for whichever thread asks."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        assert self._pending is not None
        return self._pending

    def take(self) -> None:
        """Takes all that are on the host; for a thread that has time.

        A failure is for whoever asks for a digest; see `start`.
        """
        with contextlib.suppress(Exception):
            self._take_views(self.names)

    def _take_views(self, paths: Iterable[str]) -> None:
        """Digests what lies at hand, in the thread of whoever asks first."""
        with self._views_lock:
            asked = {path: self._views[path] for path in paths if path in self._views}
            small = _small({path: view.array for path, view in asked.items()})
            for path in small:
                self._host[path] = fingerprints.digest_array(asked[path].array)
            large = {path: asked[path] for path in asked if path not in small}
            self._host |= fingerprint.start_digests(_back(large)).result()
            for path in asked:
                del self._views[path]

    def of(self, paths: Iterable[str]) -> dict[str, LeafDigest]:
        """The digests of some leaves, of which this process holds all parts."""
        paths = list(paths)
        pending = self._begun()
        self._take_views(paths)
        on_device = [path for path in paths if path not in self._host]
        return pending.result(on_device) | {
            path: self._host[path] for path in paths if path in self._host
        }

    def partials(self) -> Partials:
        """What this process knows of the leaves that are on devices."""
        return self._begun().partials()

    def all(self, others: Iterable[Partials] = ()) -> dict[str, LeafDigest]:
        """The digests of all leaves, with the partials of the other processes."""
        mine = self.partials()
        self._take_views(self.names)
        others = list(others)
        digests = {}
        for path in self.names:
            if path in self._host:
                digests[path] = self._host[path]
            else:
                parts = [part[path] for part in (mine, *others)]
                digests[path] = fingerprints.combine(p for one in parts for p in one)
        return digests

    def all_together(self) -> dict[str, LeafDigest]:
        """Like `all`, in a call that all processes make at the same place."""
        if jax.process_count() == 1:
            return self.all()
        mine = self.partials()
        sums = np.array(
            [
                [sum(lane) % 2**32 for lane in zip(*parts, strict=True)] or [0] * 3
                for parts in mine.values()
            ],
            np.uint32,
        ).reshape(len(mine), 3)
        gathered = np.asarray(multihost_utils.process_allgather(sums))
        return self._host | {
            path: fingerprints.combine(
                (int(low), int(high), int(bad)) for low, high, bad in gathered[:, index]
            )
            for index, path in enumerate(mine)
        }


class _View:
    """A leaf in host memory, which stays as it is when the leaf is donated."""

    def __init__(self, leaf: jax.Array):
        if leaves.is_key(leaf.dtype):
            leaf = jax.random.key_data(leaf)
        self.array = np.asarray(leaf)
        self.place = leaf.sharding if leaf.committed else None


def _back(views: Mapping[str, _View]) -> dict[str, jax.Array]:
    """The leaves again, in the same memory."""
    by_place: dict[Any, list[str]] = {}
    for path, view in views.items():
        by_place.setdefault(view.place, []).append(path)
    found: dict[str, jax.Array] = {}
    with jax.enable_x64(True):  # Else what has 64 bits would lose half of them.
        for place, paths in by_place.items():
            arrays = jax.device_put([views[path].array for path in paths], place)
            found |= zip(paths, arrays, strict=True)
    return {path: found[path] for path in views}


def _split(
    arrays: Mapping[str, jax.Array], memory_bytes: int
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Those that must be started before they may change, and those on the host.

    On CPU the memory of the devices is the host's, and what is held in it stays.
    """
    is_on_host = functools.cache(_is_on_host)
    on_host, num_bytes = {}, 0
    for path, leaf in arrays.items():
        size = leaf.nbytes
        if is_on_host(leaf.sharding, size > _AT_HAND_BYTES):
            on_host[path] = leaf
            num_bytes += size
    if num_bytes > memory_bytes // 2:
        small = _small(on_host)
        on_host = {path: on_host[path] for path in small}
    return {path: arrays[path] for path in arrays if path not in on_host}, on_host


def _small(arrays: Mapping[str, Any]) -> set[str]:
    """With what NumPy is through before a program for its shape would be compiled."""
    small = {path for path, x in arrays.items() if x.nbytes <= _AT_HAND_BYTES}
    if sum(arrays[path].nbytes for path in small) > _ALL_AT_HAND_BYTES:
        return set()
    return small


def _is_on_host(sharding: jax.sharding.Sharding, is_large: bool) -> bool:
    if jax.process_count() > 1:
        return False
    # A copy of several parts is no view, and is worth its while if it is small.
    if sharding.num_devices > 1 and is_large:
        return False
    return all(device.platform == "cpu" for device in sharding.device_set)


def prepare(state: PyTree) -> None:
    """Compiles in the background what the digests of such a state need."""
    arrays = {
        path: leaf
        for path, (_, leaf) in leaves.flatten(state).items()
        if isinstance(leaf, jax.Array) and leaf.size
    }
    on_device, on_host = _split(arrays, ArrayOptions.memory_bytes)
    small = _small(on_host)
    on_device |= {path: on_host[path] for path in on_host if path not in small}
    if not on_device:
        return
    compile_all = fingerprint.prepare(on_device)
    threading.Thread(target=compile_all, name="jaxft-prepare", daemon=True).start()
