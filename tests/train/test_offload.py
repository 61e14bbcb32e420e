"""The optimizer's state in host memory: same bits, same tree, same checkpoints."""

import pathlib

import jax
import numpy as np
import optax
import pytest

from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import ConfigError, TrainConfig
from jaxft.models.adapters import from_functions
from jaxft.train.step import make_train_step

WIDTH = 8


def _step(**options):
    def init(key):
        return {"w": jax.random.normal(key, (WIDTH, WIDTH))}

    def loss(params, batch, rng):
        error = batch["x"] @ params["w"] - batch["y"]
        return {"loss": (jax.numpy.sum(error**2), np.float32(error.shape[0]))}

    config = TrainConfig(**options)
    return make_train_step(from_functions(init, loss), optax.adam(1e-2), config=config)


def _rows(seed):
    rng = np.random.default_rng(seed)
    make = lambda: rng.normal(size=(16, WIDTH)).astype(np.float32)
    return {"x": make(), "y": make()}


def _train(step, state, num_steps, start=0):
    for seed in range(start, num_steps):
        state, _ = step(state, *step.place(_rows(seed)))
    return state


def _equal(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)


def test_the_arrays_lie_on_the_host_and_no_bit_differs():
    plain, offloaded = _step(), _step(offload_opt_state=True)
    states = [_train(step, step.init(), 4) for step in (plain, offloaded)]
    kinds = {
        x.sharding.memory_kind for x in jax.tree.leaves(states[1].opt_state) if x.ndim
    }
    assert kinds == {"pinned_host"}
    assert _equal(states[0].params, states[1].params)
    assert _equal(states[0].opt_state, states[1].opt_state)


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_serves_both(tmp_path: pathlib.Path, first: bool):
    before = _step(offload_opt_state=first)
    after = _step(offload_opt_state=not first)
    with CheckpointManager(tmp_path, save="steps(1)") as manager:
        state = _train(before, before.init(), 2)
        manager.save(2, state)
        manager.wait()
        restored = manager.restore(after.abstract_state)
    assert restored is not None
    assert _equal(restored.state.opt_state, state.opt_state)
    wanted = _train(before, state, 4, start=2)
    assert _equal(_train(after, restored.state, 4, start=2).params, wanted.params)


def test_virtual_shards_are_refused():
    with pytest.raises(ConfigError, match=r"offload_opt_state.*virtual_shards"):
        _step(offload_opt_state=True, virtual_shards=8)
