"""Saves in the background: at most one in flight, its deadline, and how it ended.

World: device. Floor: above `orbax_io`, below `manager`, its one user. Read
`jaxft/checkpoint/orbax_io.py` before and `jaxft/checkpoint/manager.py` after.

A failed save is never silent: its event comes at once; what else it means is said by
`policies.SaveErrors`. A state that is not finite is refused by the seal of its step,
and is no failed save: it is told, the last good step stays, and the run goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxft import records
from jaxft.checkpoint import causes, layout, orbax_io, policies, together
from jaxft.checkpoint.proof import UnhealthyError
from jaxft.parallel import distributed


class Flight:
    """A save between its snapshot and its end.

    Attributes:
        step: its label.
        write: the write itself.
        facts: what its commit event says besides, filled in on the way.
        verdict: asked when it is written: leaves for which it is no resume point.
        on_end: called at its end, with whether it has committed.
        over: set when it is known how it ended.
    """

    def __init__(
        self,
        step: int,
        write: orbax_io.Write,
        *,
        facts: Mapping[str, Any],
        verdict: Callable[[], tuple[str, ...]],
        on_end: Callable[[bool], None],
    ):
        self.step = step
        self.write = write
        self.facts = facts
        self.verdict = verdict
        self.on_end = on_end
        self.over = threading.Event()


class Saves:
    """The saves of one manager.

    Args:
        root: the checkpoint root, absolute.
        timeout_secs: deadline of one save.
        errors: what a failed one means.
        emit: told of commits, skips and failures.

    Attributes:
        num_skipped: saves that were not begun as one was in flight.
    """

    def __init__(
        self,
        root: str,
        *,
        timeout_secs: float,
        errors: policies.SaveErrors,
        emit: records.Emit,
    ):
        self.num_skipped = 0
        self._root = root
        self._timeout_secs = timeout_secs
        self._errors = errors
        self._emit = emit
        # What the threads share.
        self._lock = threading.Lock()
        self._flight: Flight | None = None
        self._threads: list[threading.Thread] = []
        self._failure: records.Fault | None = None
        self._failure_is_news = False
        self._num_failed = 0
        self._last_committed: int | None = None

    # --- what is known --------------------------------------------------------

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved."""
        with self._lock:
            return None if self._flight is None else self._flight.step

    @property
    def last_committed(self) -> int | None:
        """The newest step that is known to be committed."""
        with self._lock:
            return self._last_committed

    def set_last_committed(self, step: int | None) -> None:
        """Tells what a restore or a rollback found."""
        with self._lock:
            self._last_committed = step

    @property
    def should_retry(self) -> bool:
        """Whether the last save failed and is to be tried again at this border."""
        with self._lock:
            return 0 < self._num_failed <= self._errors.num_retries

    # --- the way of one save --------------------------------------------------

    def may_begin(self, step: int, *, force: bool, timeout_secs: float) -> bool:
        """Whether no save is in flight; the same in all processes.

        They need not see an end at the same time: who began alone, or raised alone,
        would leave the others waiting in a collective.

        Args:
            step: what is to be saved.
            force: wait for the one in flight, and do not raise an earlier failure.
            timeout_secs: how long to wait for that.

        Raises:
            FaultError: kind SAVE_FAILED: an earlier save failed, in some process, or
                the one in flight is not over in time. Kind PEER_LOST: another
                process does not come.
        """
        try:
            with together.same_end(f"save step {step}"):
                if force:
                    self.wait_for_flight(timeout_secs)
                else:
                    self.raise_news()
        except records.FaultError as error:
            if error.fault.kind is not records.FaultKind.CONFIG:
                raise
            raise self.refuse(step, error) from error
        flying = self.in_flight
        if not (busy := together.where(flying is not None)):
            return True
        if step not in (flying, self.last_committed):
            self.num_skipped += 1
            reason = f"step {flying} is still being saved"
            if flying is None:
                reason = f"process {busy[0]} has not ended the save before it"
            self._emit("save_skipped", step=step, reason=reason)
        return False

    def begin(
        self,
        step: int,
        write: orbax_io.Write,
        *,
        facts: Mapping[str, Any],
        verdict: Callable[[], tuple[str, ...]],
        on_end: Callable[[bool], None],
    ) -> None:
        """Follows a write that has begun.

        Args:
            step: its label.
            write: it.
            facts: what its commit event says besides; complete when it commits.
            verdict: asked when it is written: leaves for which it is no resume point.
            on_end: called in the background at its end, with whether it committed.
        """
        flight = Flight(step, write, facts=facts, verdict=verdict, on_end=on_end)
        thread = threading.Thread(
            target=self._follow, args=(flight,), name="jaxft-commit", daemon=True
        )
        with self._lock:
            self._flight = flight
            self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def refuse(self, step: int, error: Exception) -> records.FaultError:
        """A save that could not begin: to be raised, so it is no news any more."""
        fault = self._fault(step, error)
        with self._lock:
            self._note(fault, is_news=False)
        self._tell(fault)
        return records.FaultError(fault)

    def _follow(self, flight: Flight) -> None:
        """Waits for one save, keeps how it ended, and cleans up behind it."""
        flight.write.wait()
        error = flight.write.error()
        bad = _unhealthy(error) if error is not None else flight.verdict()
        try:
            if error is not None and self._owns_leftovers(flight):
                self._clean_failed(flight.write.path)
            self._end(flight, error, bad=bad)
        finally:
            # Whatever could not be told: nobody waits, and nothing stays pinned.
            flight.over.set()
            flight.on_end(error is None and not bad)

    def _end(
        self, flight: Flight, error: BaseException | None, *, bad: tuple[str, ...]
    ) -> None:
        """Keeps how a save ended: committed, failed, or, with `bad`, unhealthy."""
        fault = self._fault(flight.step, error) if error and not bad else None
        with self._lock:
            was_given_up = self._flight is not flight
            if not was_given_up:
                self._flight = None
            if error is None and not bad:
                self._last_committed = max(flight.step, self._last_committed or 0)
                # Made good; but not by one that comes late, unless it is its own.
                failed_step = -1 if self._failure is None else self._failure.step
                if not was_given_up or failed_step == flight.step:
                    self._failure, self._failure_is_news = None, False
                    self._num_failed = 0
            elif fault is not None and not was_given_up:
                self._note(fault, is_news=True)
            elif bad and not was_given_up:
                self._num_failed = 0  # The store has taken all of it: no row any more.
        if bad:
            self._emit("save_unhealthy", step=flight.step, leaves=list(bad))
        elif error is None:
            self._emit(
                "save_commit",
                step=flight.step,
                secs=flight.write.age_secs,
                num_bytes=layout.count_bytes(flight.write.path),
                **flight.facts,
            )
        elif fault is not None and not was_given_up:
            self._tell(fault)

    def _owns_leftovers(self, flight: Flight) -> bool:
        """False when the same step, given up before, is being saved again."""
        with self._lock:
            current = self._flight
        if current is None or current is flight:
            return True
        return current.step != flight.step

    @contextlib.contextmanager
    def cleaning(self, step: int) -> Iterator[None]:
        """What fails on the way into a save leaves nothing, and is an OSError."""
        try:
            yield
        except layout.LeafError:
            raise
        except Exception as error:
            # TensorStore's are of many kinds, and so are those of a full device.
            self._clean_failed(layout.step_path(self._root, step))
            if isinstance(error, OSError):
                raise
            raise OSError(records.first_line(error)) from error

    def _clean_failed(self, path: str) -> None:
        """Gives back the space of a failed save.

        Of several processes another may still write there: the next save, which no
        other one is beside, does it.
        """
        if jax.process_count() > 1:
            return
        try:
            orbax_io.remove_unfinished(path)
        except (OSError, records.FaultError) as error:
            self._emit("delete_failed", path=path, reason=str(error))

    # --- failures -------------------------------------------------------------

    def _note(self, fault: records.Fault, *, is_news: bool) -> None:
        """Counts a failure; with the lock held, together with the end of its save."""
        self._failure, self._failure_is_news = fault, is_news
        self._num_failed += 1

    def _tell(self, fault: records.Fault) -> None:
        self._emit("save_failed", step=fault.step, reason=fault.evidence)

    def _fault(self, step: int, error: BaseException) -> records.Fault:
        path = layout.step_path(self._root, step)
        known = self._last_committed  # without the lock: it may be held
        resume = "nothing is saved yet"
        if known is not None:
            resume = f"the same command goes on from step {known}"
        cause, detail = causes.cause(error), records.first_line(error)
        peer = causes.of_peer(error)
        process = jax.process_index() if peer is None else peer.process
        where = f" in process {process}" if jax.process_count() > 1 else ""
        text = (
            f"save of step {step} to {path} failed{where}: {cause}; "
            f"{causes.remedy(error, root=self._root)}; {resume}"
        )
        if detail != cause:
            text += f" ({detail})"
        kind = records.FaultKind.SAVE_FAILED
        if peer is None and any(map(distributed.is_of_peers, causes.chain(error))):
            kind = records.FaultKind.PEER_LOST
            text = (
                f"save of step {step} ended in process {process}: another process is "
                f"gone, or late; {resume} ({detail})"
            )
        return records.Fault(
            kind=kind,
            step=step,
            process=process,
            evidence=text,
        )

    @property
    def is_borne(self) -> bool:
        """Whether the policy lets training go on with the failures so far."""
        with self._lock:
            return not self._errors.is_fatal and (
                self._num_failed < self._errors.max_failed
            )

    def failure(self) -> records.FaultError | None:
        """The failed save that no later one has made good; whoever asks is told."""
        self.check_deadline()
        with self._lock:
            self._failure_is_news = False
            return None if self._failure is None else records.FaultError(self._failure)

    def error(self) -> records.FaultError | None:
        """`failure`, unless the policy is to go on all the same."""
        failure = self.failure()
        return None if self.is_borne else failure

    def raise_news(self) -> None:
        """Raises a failure that ends the run and that nobody has been told of.

        Raises:
            FaultError: see `error`.
        """
        self.check_deadline()
        with self._lock:
            is_news = self._failure_is_news
        if is_news and (error := self.error()) is not None:
            raise error

    # --- waiting --------------------------------------------------------------

    def check_deadline(self) -> None:
        """Stops to count on a save that missed its deadline."""
        with self._lock:
            flight = self._flight
            if flight is None or flight.write.age_secs <= self._timeout_secs:
                return
            fault = self._late(flight)
            self._flight = None
            self._note(fault, is_news=True)
        self._tell(fault)

    def _late(self, flight: Flight) -> records.Fault:
        text = f"not over after {flight.write.age_secs:.1f} s"
        return self._fault(flight.step, TimeoutError(text))

    def wait_for_flight(self, timeout_secs: float) -> None:
        """Waits for the save in flight, if there is one.

        Raises:
            FaultError: kind SAVE_FAILED: it is not over in time.
        """
        with self._lock:
            flight = self._flight
        if flight is None or flight.over.wait(timeout_secs):
            return
        self.check_deadline()
        raise records.FaultError(self._late(flight))

    def join(self, timeout_secs: float) -> None:
        """Waits until nothing goes on in the background, deletions included.

        Raises:
            FaultError: kind SAVE_FAILED: a save is not over in time.
        """
        deadline = time.monotonic() + timeout_secs
        self.wait_for_flight(timeout_secs)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _unhealthy(error: BaseException | None) -> tuple[str, ...]:
    """The leaves for which the seal refused the state; through Orbax's own errors."""
    while error is not None:
        if isinstance(error, UnhealthyError):
            return error.leaves
        error = error.__cause__ or error.__context__
    return ()
