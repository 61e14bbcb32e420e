"""What holds the writing of a save back until the call that began it is over.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/array_handler.py` next, whose threads wait at it.
"""

from __future__ import annotations

import threading


class Gate:
    """Nothing of a save is written before it is opened.

    Whoever waits for the snapshots needs the processor that the writing would take. A
    save that is given up instead writes nothing, and its threads end.
    """

    def __init__(self):
        self._answer = threading.Event()
        self._is_open = False

    def open(self) -> None:
        """Lets the save be written, unless it was given up."""
        if not self._answer.is_set():
            self._is_open = True
            self._answer.set()

    def give_up(self) -> None:
        """Ends the save, unless it is being written; never too late to call."""
        self._answer.set()

    def wait(self) -> None:
        """Returns when it is open.

        Raises:
            InterruptedError: the save was given up.
        """
        self._answer.wait()
        if not self._is_open:
            raise InterruptedError("the save was given up before it was written")
