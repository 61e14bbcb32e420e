"""A writer whose job has begun anew without it commits nothing."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxft.checkpoint.manager import CheckpointManager
from jaxft.records import FaultError
from jaxft.recovery.generations import Fence, Generation, Generations, Seat

pytestmark = pytest.mark.device


def state(step):
    return {"step": step, "w": jnp.full((4,), step, jnp.float32)}


def generation(number):
    seat = Seat(name="process-0", incarnation=f"run{number}")
    return Generation(
        number=number,
        members=(seat,),
        coordinator="127.0.0.1:6000",
        attempt=0,
        num_configured=1,
    )


def test_one_that_wakes_after_the_next_generation_began(tmp_path):
    files = Generations(tmp_path)
    files.propose(generation(1))
    root = tmp_path / "checkpoints"
    old = CheckpointManager(root, may_commit=Fence(tmp_path, generation=1))
    old.save(1, state(1))
    old.wait()
    assert old.steps() == [1]

    files.propose(generation(2))
    with pytest.raises(FaultError, match="generation 2 of the job has begun"):
        old.save(2, state(2), force=True)
    new = CheckpointManager(root, may_commit=Fence(tmp_path, generation=2))
    assert new.steps() == [1]
    new.save(2, state(2))
    new.close()
    assert new.steps() == [1, 2]


def test_it_is_asked_again_just_before_the_commit(tmp_path):
    files = Generations(tmp_path)
    files.propose(generation(1))
    fence = Fence(tmp_path, generation=1)
    num_asked = 0

    def may_commit():
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # All is written; the rename is next.
            assert files.propose(generation(2))
        return fence()

    old = CheckpointManager(tmp_path / "checkpoints", may_commit=may_commit)
    old.save(1, state(1))
    with pytest.raises(FaultError, match="generation 2 of the job has begun"):
        old.wait()
    assert old.steps() == []
    assert num_asked == 2
