"""One job after the other that is killed again and again, anywhere, at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

# A job of so many steps for each kill is not through before the last of them.
STEPS_PER_KILL = 40
_UNFINISHED = re.compile(r"(\d+)\..*tmp")


class Moment(enum.StrEnum):
    """When a process is killed."""

    STEPS = "a few steps later"
    SAVE = "inside a save"
    # The workers of the generation before are just down: while the next one is agreed
    # on, starts, joins, restores, compiles, or does its first steps.
    ANY = "some time after the last one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    role: str
    index: int
    moment: Moment
    steps: int
    secs: float


def plan(first: int, *, num_processes: int, num_kills: int) -> Iterator[Kill]:
    """First each worker and each supervisor in turn, then anybody; seeded.

    `first` is how many there are before these, in other jobs.
    """
    rng = random.Random(f"{num_processes} {first}")
    roles = ("worker", "supervisor")
    order = [(role, index) for role in roles for index in range(num_processes)]
    moments = [Moment.STEPS, Moment.SAVE, Moment.ANY]
    for number in range(num_kills):
        last = (rng.choice(roles), rng.randrange(num_processes))
        place = first + number
        role, index = order[place] if place < len(order) else last
        yield Kill(
            role=role,
            index=index,
            moment=moments[number] if number < 2 else rng.choice(moments),
            steps=rng.randint(1, STEPS_PER_KILL // 2),
            secs=rng.uniform(0.0, 8.0),
        )


def unfinished(job: Any) -> set[tuple[str, int]]:
    """Names and inodes of what saves have begun to write; old ones may lie there."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(job.run.workdir / "checkpoints"):
            if _UNFINISHED.match(entry.name):
                found.add((entry.name, entry.inode()))
    return found


def await_moment(job: Any, kill: Kill) -> str:
    """Returns when it is time; what it was then, for who reads the figures."""
    match kill.moment:
        case Moment.STEPS:
            step = job.newest_step() + kill.steps
            job.wait_for_step(step)
            return f"at step {step}"
        case Moment.SAVE:
            before = unfinished(job)

            def has_begun() -> list[str]:
                began = unfinished(job) - before
                return [name for name, _ in began] if job.running("worker") else []

            found = job.run.wait_for(has_begun, timeout_secs=job.deadline_secs)
            return f"inside the save of {found[0].partition('.')[0]}"
        case Moment.ANY:
            time.sleep(kill.secs)
            return f"after {kill.secs:.1f} s"


@pytest.mark.parametrize(
    ("num_processes", "num_kills", "first"),
    [
        (2, 2, 0),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [(2, 10, 0), (2, 10, 10), (4, 5, 0), (4, 5, 5)]
        ),
    ],
)
def test_kill_after_kill_changes_no_number(
    job: Callable[..., Any],
    reference: Callable[..., Any],
    num_processes: int,
    num_kills: int,
    first: int,
    record_property: Callable[[str, object], None],
) -> None:
    settings = {"train__num_steps": num_kills * STEPS_PER_KILL}
    one = job(num_processes=num_processes, **settings)
    one.start()
    down_secs = []
    for kill in plan(first, num_processes=num_processes, num_kills=num_kills):
        when = await_moment(one, kill)
        down_secs.append(one.kill(kill.role, kill.index))
        record_property(f"{kill.role} {kill.index} {when}", down_secs[-1])
    code, out, err = one.finish()
    assert code == 0, err
    assert re.search(r"^(\[0\] )?run +finished$", out, re.MULTILINE), out
    assert max(down_secs) < one.down_secs + one.busy_secs, down_secs
    generations = one.generations()
    # Two kills may fall into one generation; none is begun without a cause.
    assert 2 <= len(generations) <= num_kills + 1
    names = [f"process-{index}" for index in range(num_processes)]
    for generation in generations:
        assert [seat.name for seat in generation.members] == names
    one.check_same(reference(num_processes, **settings))
