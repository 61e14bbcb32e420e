"""A position in the stream of batches, and threads that read ahead of it.

World: host-only. Floor: `data`. Read `jaxft/data/pipeline.py` before this file and
`jaxft/loop.py`, which draws from it, after it.

The position is the consumer's: the next step to be drawn. What the threads have read
beyond it is thrown away with the process and read again. Which batch a step gets is
arithmetic (`batch_index`), so a position costs nothing to save and nothing to reach.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.metadata
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxft.config import ConfigError

# How often a consumer that waits looks up, and how long `close` waits for threads.
_POLL_SECS = 0.1
_JOIN_SECS = 1.0

Window = tuple[int, int]


class Batches(Protocol):
    """What the iterator reads; `jaxft.data.pipeline.Pipeline` is one."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content and the order of the stream."""
        ...

    def probe(self) -> str:
        """A hash of the order as it really is."""
        ...

    def read(self, batch_number: int, /) -> dict[str, np.ndarray]:
        """One batch; a pure function, called from several threads."""
        ...


def batch_index(step: int, skipped: Iterable[Window] = ()) -> int:
    """The batch that a step trains on: the step-th one outside skipped windows.

    Args:
        step: finished step attempts before it, from 0.
        skipped: half-open windows [start, stop) of batch numbers; in any order, they
            may overlap or be empty.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"there is no step {step}")
    index, end = step, 0
    for start, stop in sorted(skipped):
        # Without what earlier windows already cover.
        start = max(start, end)
        if start >= stop:
            continue
        if index < start:
            break
        index += stop - start
        end = stop
    return index


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: BaseException


class BatchIterator:
    """Iterates over batches in order; its position can be saved and moved.

    Args:
        batches: the stream.
        num_threads: threads that read.
        prefetch: batches that are ready or being read beyond the position.
        step: the first step to draw.
        skipped: windows of batch numbers that no step gets; see `batch_index`.
        poll: called about ten times a second while the consumer waits; it may raise
            to give up waiting, and the position stays where it is.
        clock: seconds, for `wait_secs`.

    One thread consumes: the methods are not meant to be called at the same time.
    Threads end with `close` or with the process, which they never hold up.

    Raises:
        ConfigError: `num_threads` or `prefetch` is not positive.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        num_threads: int,
        prefetch: int,
        step: int = 0,
        skipped: Sequence[Window] = (),
        poll: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        for name, value in (("num_threads", num_threads), ("prefetch", prefetch)):
            if value < 1:
                raise ConfigError(f"data.{name}", f"must be positive, is {value}")
        self._batches = batches
        self._prefetch = prefetch
        self._poll = poll
        self._clock = clock
        self._wait_secs = 0.0
        # Guards everything below; notified whenever any of it changes.
        self._changed = threading.Condition()
        self._closed = False
        self._ready: dict[int, dict[str, np.ndarray] | _Failure] = {}
        # A read that was begun before a seek is known by its old generation.
        self._generation = 0
        self.seek(step, skipped=skipped)
        self._threads = [
            threading.Thread(
                target=self._read_ahead, name=f"jaxft-read-{i}", daemon=True
            )
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # A thread inside C++ code while the interpreter ends would abort the process.
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """The next step to be drawn."""
        return self._step

    @property
    def skipped(self) -> tuple[Window, ...]:
        """The windows of batch numbers that no step gets."""
        return self._skipped

    @property
    def wait_secs(self) -> float:
        """Seconds the consumer waited, since the start or `take_wait_secs`."""
        return self._wait_secs

    def take_wait_secs(self) -> float:
        """Returns `wait_secs` and starts it again from zero."""
        taken, self._wait_secs = self._wait_secs, 0.0
        return taken

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The batch of the current step; moves on to the next step.

        Raises:
            Exception: what reading raised, with its own traceback. The position does
                not move, and the next call reads the same batch again.
            RuntimeError: the iterator is closed, or reading raised StopIteration or
                SystemExit, which would end the consumer as if all were well.
        """
        start = self._clock()
        try:
            batch = self._wait()
        finally:
            self._wait_secs += self._clock() - start
        if not isinstance(batch, _Failure):
            return batch
        error = batch.error
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"the source raised {error!r}") from error

    def _wait(self) -> dict[str, np.ndarray] | _Failure:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._step in self._ready, _POLL_SECS
                )
                if self._closed:
                    raise RuntimeError("the iterator is closed")
                batch = self._ready.pop(self._step, None)
                if isinstance(batch, _Failure):
                    self.seek(self._step)
                elif batch is not None:
                    self._step += 1
                    self._changed.notify_all()
                if batch is not None:
                    return batch
            # Not under the lock: whatever it does, reading goes on.
            self._poll()

    def seek(self, step: int, *, skipped: Sequence[Window] | None = None) -> None:
        """Moves to any step at once, also while threads read.

        Args:
            step: the next step to be drawn.
            skipped: the windows from now on; None keeps them.

        Raises:
            ValueError: `step` is negative.
        """
        batch_index(step)
        with self._changed:
            if skipped is not None:
                self._skipped = tuple((start, stop) for start, stop in skipped)
            self._step = self._next_read = step
            self._generation += 1
            self._ready.clear()
            self._changed.notify_all()

    def get_state(self) -> dict[str, Any]:
        """The position as JSON; it does not depend on threads, prefetch or processes.

        `versions` is information: what decides is the probe.
        """
        return {
            "step": self._step,
            "skipped": [list(window) for window in self._skipped],
            "fingerprint": self._batches.fingerprint,
            "probe": self._batches.probe(),
            "versions": dict(_versions()),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a saved position; its windows replace those that were given.

        Raises:
            ConfigError: the position is damaged or belongs to another stream; the
                iterator stays where it was.
        """
        try:
            step = operator.index(state["step"])
            windows = [map(operator.index, window) for window in state["skipped"]]
            skipped = [(start, stop) for start, stop in windows]
            fingerprint, probe = state["fingerprint"], state["probe"]
            batch_index(step, skipped)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "data", f"the saved position cannot be read: {error!r}"
            ) from error
        if fingerprint != self._batches.fingerprint:
            raise ConfigError(
                "data",
                "the saved run had another corpus, seq_len, holdout_fraction, "
                "global_batch, shuffle or seed (fingerprint "
                f"{str(fingerprint)[:12]}, now {self._batches.fingerprint[:12]}); "
                "restore them or start in a new workdir",
            )
        if probe != self._batches.probe():
            raise ConfigError(
                "data",
                "rows come in another order than in the saved run, with the same "
                f"settings (saved with {state.get('versions')}, now {_versions()}); "
                "install the saved versions or start in a new workdir",
            )
        self.seek(step, skipped=skipped)

    def close(self) -> None:
        """Ends the threads; one that is stuck in a read is left to the process."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN_SECS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        """Reads the next batch once there is room for it; False when closed.

        A function of its own so that a waiting thread keeps no batch alive.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._next_read < self._step + self._prefetch
            )
            if self._closed:
                return False
            generation, step = self._generation, self._next_read
            index = batch_index(step, self._skipped)
            self._next_read += 1
        try:
            batch = self._batches.read(index)
        except BaseException as error:  # whatever it is, the consumer must not hang
            batch = _Failure(error)
        with self._changed:
            if generation == self._generation and not self._closed:
                self._ready[step] = batch
                self._changed.notify_all()
        return True


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("grain", "numpy")}
