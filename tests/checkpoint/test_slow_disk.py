"""Saves that are slowed down on purpose."""

import jax.numpy as jnp
import pytest

from jaxft.checkpoint import manager

pytestmark = pytest.mark.device


def test_a_save_takes_as_long_as_its_bytes_at_that_rate(tmp_path):
    committed = {}

    def emit(kind, /, **fields):
        if kind == "save_commit":
            committed[fields["step"]] = fields

    state = {"w": jnp.arange(2**14, dtype=jnp.float32)}
    with manager.CheckpointManager(tmp_path / "steps", emit=emit) as checkpoints:
        checkpoints.slow_down(lambda step: 1e5 if step == 2 else 0.0)
        for step in (1, 2):
            assert checkpoints.save(step, state, force=True)
            # The loop is not held up: the disk is slow, not the call.
            assert checkpoints.in_flight in (step, None)
            checkpoints.wait()
        assert checkpoints.restore(state).step == 2
    slow = committed[2]
    assert slow["num_bytes"] > 2**16
    # What is added when it is sealed is not waited for.
    assert slow["secs"] >= 2**16 / 1e5
    assert committed[1]["secs"] < slow["secs"]
