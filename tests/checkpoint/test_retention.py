"""Half a deletion is no step, and does not stay."""

import os

import jax.numpy as jnp
import pytest

from jaxft.checkpoint import manager

pytestmark = pytest.mark.device


def _state(step):
    return {"step": step, "w": jnp.full((4,), step, jnp.float32)}


def test_a_killed_deletion_is_finished_by_the_next_start(tmp_path):
    """Also when nothing is saved afterwards; a save of somebody's stays."""
    with manager.CheckpointManager(tmp_path, keep="last(9)") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, _state(step), force=True)
    os.rename(tmp_path / "10", tmp_path / "10.orbax-checkpoint-tmp-deleted")
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    deleted = []

    def emit(kind, /, **fields):
        if kind == "deleted":
            deleted.append(fields["step"])

    with manager.CheckpointManager(tmp_path, emit=emit) as checkpoints:
        assert checkpoints.restore(_state(0)).step == 20
    assert sorted(os.listdir(tmp_path)) == ["20", "5.orbax-checkpoint-tmp"]
    assert deleted == [10]
