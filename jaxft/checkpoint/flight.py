"""One save on its way, between its snapshot and its end.

World: device. Floor: above `orbax_io`, below `manager`, its one user.
"""

from __future__ import annotations

import threading

from jaxft.checkpoint import orbax_io


class Flight:
    """A save between its snapshot and its end.

    Attributes:
        step: its label.
        write: the write itself.
        over: set when the manager knows how it ended.
    """

    def __init__(self, step: int, write: orbax_io.Write):
        self.step = step
        self.write = write
        self.over = threading.Event()
