"""A budget of bytes that tasks of one event loop share.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/array_handler.py` next, its one user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any


class ByteBudget:
    """Bytes that may be in use at once; who asks for more than there are goes alone.

    Of one event loop, as Orbax's own is; unlike it, this one refuses nothing.
    """

    def __init__(self, num_bytes: int):
        self._total = self._free = num_bytes
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncGenerator[None]:
        """Holds so many bytes inside, or all there are."""
        num_bytes = min(num_bytes, self._total)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= num_bytes)
            self._free -= num_bytes
        try:
            yield
        finally:
            async with self._changed:
                self._free += num_bytes
                self._changed.notify_all()


async def gather(tasks: Sequence[Any]) -> list[Any]:
    """All results; the first failure is raised once none is running any more.

    Whoever is left behind would go on to write into memory that is given back.
    """
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
