"""A budget of bytes: kept, in order, without waste, and cheap with many waiters."""

import asyncio
import random

import pytest

from jaxft.checkpoint.byte_budget import ByteBudget, gather_few

pytestmark = pytest.mark.timeout(60)


def test_never_more_than_there_are_and_everybody_has_a_turn():
    """Random sizes, some above the total, some tasks cancelled while they wait."""
    rng = random.Random(0)

    async def run():
        budget = ByteBudget(100)
        in_use, most, num_done = 0, 0, 0

        async def work(size):
            nonlocal in_use, most, num_done
            async with budget.reserve(size):
                in_use += min(size, 100)
                most = max(most, in_use)
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    in_use -= min(size, 100)
            num_done += 1

        tasks = [asyncio.create_task(work(rng.randrange(0, 150))) for _ in range(2000)]
        doomed = rng.sample(tasks, 500)
        while doomed:
            await asyncio.sleep(0)
            doomed.pop().cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        num_cancelled = sum(isinstance(e, asyncio.CancelledError) for e in ends)
        assert num_done + num_cancelled == 2000
        assert num_cancelled > 0
        assert (in_use, most) == (0, 100)
        async with asyncio.timeout(5), budget.reserve(1000):
            pass  # Nothing was lost on the way.

    asyncio.run(run())


def test_a_large_wish_is_not_overtaken_for_ever():
    async def run():
        budget, order = ByteBudget(10), []

        async def work(name, size):
            async with budget.reserve(size):
                order.append(name)
                await asyncio.sleep(0)

        names = [("a", 6), ("all", 99), ("b", 1), ("c", 1)]
        await asyncio.gather(*(work(*one) for one in names))
        assert order == ["a", "all", "b", "c"]

    asyncio.run(run())


@pytest.mark.parametrize("when", ["waiting", "given"])
def test_a_cancelled_wait_leaves_nothing_behind(when):
    async def run():
        budget = ByteBudget(10)
        gate = asyncio.Event()

        async def hold(size):
            async with budget.reserve(size):
                await gate.wait()

        first = asyncio.create_task(hold(10))
        await asyncio.sleep(0)
        second, third = (asyncio.create_task(hold(size)) for size in (10, 5))
        await asyncio.sleep(0)
        if when == "given":
            first.cancel()
            # The bytes are the second one's now, who does not know yet.
            await asyncio.sleep(0)
        second.cancel()
        gate.set()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert third.exception() is None
        async with asyncio.timeout(5), budget.reserve(10):
            pass

    asyncio.run(run())


def test_many_waiters_cost_as_many_wakes(monkeypatch):
    """No release wakes those who cannot go: turns of the loop grow with the tasks."""

    def num_turns(num_tasks):
        turns = 0
        real = asyncio.Handle._run  # one callback of the loop

        def count(handle):
            nonlocal turns
            turns += 1
            real(handle)

        async def work(budget):
            async with budget.reserve(10):
                await asyncio.sleep(0)

        async def run():
            budget = ByteBudget(40)
            await asyncio.gather(*(work(budget) for _ in range(num_tasks)))

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", count)
            asyncio.run(run())
        return turns

    few, many = num_turns(500), num_turns(8000)
    assert many < 20 * few


def test_few_at_a_time_in_their_order_and_none_after_a_failure():
    running, most, begun = 0, 0, []

    async def square(number):
        nonlocal running, most
        begun.append(number)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        if number == 40:
            raise ValueError("40")
        return number**2

    squares = asyncio.run(gather_few(square, range(30), most=4))
    assert squares == [number**2 for number in range(30)]
    assert most == 4
    assert asyncio.run(gather_few(square, [], most=4)) == []
    begun.clear()
    with pytest.raises(ValueError, match="40"):
        asyncio.run(gather_few(square, range(1000), most=4))
    assert running == 0
    assert len(begun) < 60
