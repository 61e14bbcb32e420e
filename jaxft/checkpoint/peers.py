"""A write that fails in one process fails in all of them: soon, and by one cause.

World: device. Floor: above `causes`, below `orbax_io`, its one user. Read
`jaxft/checkpoint/together.py` before and `jaxft/checkpoint/saves.py` after.

Orbax lets the others wait for the one that failed, up to the deadline of the save, and
then says that the storage is slow. Here the first to fail leaves a note beside the
step, and whoever waits looks for it. The note only ends the wait. That a step is whole
is proven by all having come to the barrier, never by the lack of a note, which a
network file system may show late.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Callable

import jax

from jaxft.checkpoint import causes, layout, together

# Then twice as long, and so on: a failure is known soon after it, and a slow write,
# for which the others wait in vain again and again, is no crowd of messages.
_FIRST_SECS = 0.5
_NOTE = f"{layout.TMP_MARK}-failed"


class Peers:
    """The processes that write one step together; all of them make it together.

    Args:
        step_path: the step's folder.
        barrier: waits for all of them; called with `key` and `timeout_ms`.
    """

    def __init__(self, step_path: str, *, barrier: Callable[..., None]):
        # The same step may have been given up before, and somebody still be at that.
        self._token = together.from_primary(uuid.uuid4().hex[:8])
        self._note = f"{step_path}{_NOTE}-{self._token}"
        self._barrier = barrier

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all of them, or until one has failed.

        Raises:
            PeerError: one has.
            Exception: the barrier's own, when time has run out, say.
        """
        # Who is in a barrier cannot leave it, and nothing else may keep a process alive
        # or end with it in a thread: so there are many, one after the other, and each
        # passes, or runs out of time, for all of them alike.
        deadline = time.monotonic() + timeout_ms / 1000
        for number in itertools.count():
            left_secs = max(_FIRST_SECS, deadline - time.monotonic())
            wait_secs = min(_FIRST_SECS * 2**number, left_secs)
            try:
                self._barrier(
                    key=f"{key}.{self._token}.{number}",
                    timeout_ms=round(wait_secs * 1000),
                )
                return
            except jax.errors.JaxRuntimeError as error:
                if (failure := self._look()) is not None:
                    raise failure from error
                is_over = time.monotonic() >= deadline
                if is_over or "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def tell(self, error: BaseException) -> BaseException:
        """Tells the others that this process has failed, unless one was first.

        Args:
            error: why.

        Returns:
            What the save has failed of: `error`, or the failure of the first.
        """
        if jax.process_count() == 1:
            return error
        # A link is made whole or not at all, by the first, and where a disk is full.
        # It leads nowhere.
        try:
            text = f"{jax.process_index()} {causes.cause(error)}"
            os.symlink(text.replace("\0", " ")[:200], self._note)
        except OSError:
            pass  # Somebody was first; or the others find out when time runs out.
        return self._look() or error

    def _look(self) -> causes.PeerError | None:
        """The failure of another process, if one has told."""
        try:
            process, _, cause = os.readlink(self._note).partition(" ")
            if int(process) != jax.process_index():
                return causes.PeerError(int(process), cause)
        except (OSError, ValueError):
            pass
        return None
