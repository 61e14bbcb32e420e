"""A budget of bytes that tasks of one event loop share.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/array_handler.py` next, its one user.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any


class ByteBudget:
    """Bytes that may be in use at once; who asks for more than there are goes alone.

    Of one event loop, as Orbax's own is; unlike it, this one refuses nothing. Whoever
    asked first is served first, and nobody else is woken for it: with a task a chunk,
    thousands wait at a time.
    """

    def __init__(self, num_bytes: int):
        self._total = self._free = num_bytes
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]]
        self._waiting = collections.deque()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncGenerator[None]:
        """Holds so many bytes inside, or all there are."""
        num_bytes = min(num_bytes, self._total)
        await self._take(num_bytes)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _take(self, num_bytes: int) -> None:
        if not self._waiting and self._free >= num_bytes:
            self._free -= num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._serve()  # It may have been all that kept others waiting.
            else:
                self._give_back(num_bytes)  # It was given and has come too late.
            raise

    def _give_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        self._serve()

    def _serve(self) -> None:
        """Gives what is free to those in front, as long as it is enough for them."""
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if num_bytes > self._free:
                    return
                self._free -= num_bytes
                turn.set_result(None)
            self._waiting.popleft()


async def gather(tasks: Sequence[Any]) -> list[Any]:
    """All results; the first failure is raised once none is running any more.

    Whoever is left behind would go on to write into memory that is given back.
    """
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def gather_few(
    function: Callable[[Any], Any], items: Iterable[Any], *, most: int
) -> list[Any]:
    """What `function` gives of each item, at most so many at a time; see `gather`.

    Of thousands of small ones a task each would take more memory than what it moves.
    None is begun after one has failed.
    """
    results: dict[int, Any] = {}
    todo = enumerate(items)

    async def work() -> None:
        for number, item in todo:
            try:
                results[number] = await function(item)
            except BaseException:
                for _ in todo:
                    pass
                raise

    await gather([work() for _ in range(most)])
    return [results[number] for number in range(len(results))]
