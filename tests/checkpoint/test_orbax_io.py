"""The step folder: read by an untouched Orbax, durable, isolated from the loop."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.checkpoint import layout, manager, orbax_io
from jaxft.checkpoint.gate import Gate

pytestmark = pytest.mark.device

BARE = """
import json, sys
import jax, numpy as np, orbax.checkpoint as ocp
with ocp.CheckpointManager(sys.argv[1]) as stock:
    assert stock.all_steps() == [7], stock.all_steps()
    restored = stock.restore(7)
state, run = restored["state"], restored["run"]
print(json.dumps({
    "w": np.asarray(state["params"]["w"]).tolist(),
    "dtype": str(state["params"]["w"].dtype),
    "spec": str(state["params"]["w"].sharding.spec),
    "count": int(state["opt"][0]["count"]),
    "zeros": np.asarray(state["opt"][0]["nu"]["w"]).tolist(),
    "key": np.asarray(jax.random.key_data(state["rng"])).tolist(),
    "step": state["step"], "text": state["text"], "none": state["none"],
    "ints": sorted(state["ints"]), "run": run["data"],
}))
"""


def test_an_untouched_orbax_restores_the_bare_step(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    w = jnp.arange(16, dtype=jnp.bfloat16).reshape(8, 2)
    params = {"w": jax.device_put(w, sharding)}
    state = {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "rng": jax.random.key(3),
        "step": 7,
        "text": "t",
        "none": None,
        "ints": {1: np.ones(2), 2: jnp.zeros((0, 3))},
    }
    with manager.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(7, state, data={"next": 8})
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "w": np.asarray(w, np.float32).tolist(),
        "dtype": "bfloat16",
        "spec": str(PartitionSpec("data")),
        "count": 0,
        "zeros": [[0.0, 0.0]] * 8,
        "key": [0, 3],
        "step": 7,
        "text": "t",
        "none": None,
        "ints": ["1", "2"],
        "run": {"next": 8},
    }


def test_the_names_are_the_ones_of_orbax():
    tree = {"a": {"b": 1, "c": [1, {"d/e": 1}]}, "f": {"0": 1}}
    theirs = jax.tree.leaves(ocp.tree.get_param_names(tree))
    paths = [("a", "b"), ("a", "c", "0"), ("a", "c", "1", "d/e"), ("f", "0")]
    assert list(layout.leaf_names(paths).values()) == theirs


def test_a_committed_step_is_read_only_and_complete(tmp_path):
    with manager.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
    assert os.listdir(tmp_path) == ["1"]
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o222, path
        assert layout.TMP_MARK not in str(path.relative_to(tmp_path))


def test_orbax_still_has_what_the_durable_commit_stands_on():
    base = ocp.path.atomicity.AtomicRenameTemporaryPath
    path = orbax_io._DurablePath.from_final(
        pathlib.Path("/x/5"), checkpoint_metadata_store=None
    )
    assert isinstance(path, base)
    assert str(path.get()) == "/x/5.orbax-checkpoint-tmp"
    assert str(path.get_final()) == "/x/5"
    assert str(path._final_path) == "/x/5.orbax-checkpoint-tmp-sealed"


def test_donation_right_after_the_save_does_not_reach_the_disk(tmp_path, full):
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def init():
        w = jax.random.normal(jax.random.key(0), (8, 1 << 16))
        return {"step": jnp.int32(0), "w": w, "one": jnp.zeros((1 << 16,))}

    placed = {"step": NamedSharding(mesh, PartitionSpec()), "w": sharding}
    placed["one"] = placed["step"]
    state = jax.jit(init, out_shardings=placed)()
    step = jax.jit(
        lambda s: {"step": s["step"] + 1, "w": s["w"] * 1.001 + 1, "one": s["one"] + 1},
        donate_argnums=0,
    )
    numbers = range(1, 100 if full else 12)
    with manager.CheckpointManager(tmp_path, keep="last(1000)") as checkpoints:
        for number in numbers:
            state = step(state)
            assert checkpoints.save(number, state, force=True)
            for _ in range(2):  # ahead of the writer, in its buffers
                state = step(state)
            state = state | {"step": state["step"] - 2}
        checkpoints.wait()
        # The same again, saved by nobody.
        twin = jax.jit(init, out_shardings=placed)()
        for number in numbers:
            twin = step(twin)
            restored = checkpoints.restore(twin, step=number).state
            for name in twin:
                assert np.array_equal(restored[name], twin[name]), (number, name)
            twin = step(step(jax.tree.map(jnp.copy, twin)))
            twin = twin | {"step": twin["step"] - 2}


def test_writing_into_a_numpy_leaf_after_the_save_does_not_reach_the_disk(tmp_path):
    big = np.arange(1 << 20, dtype=np.float32)
    sparse = np.arange(1 << 20, dtype=np.int8)[::2]
    state = {"w": big, "view": sparse, "u4": np.asarray(big % 16, jnp.uint4)}
    wanted = jax.tree.map(np.copy, state)
    with manager.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for leaf in state.values():
            leaf[:] = np.zeros((), leaf.dtype)
        restored = checkpoints.restore(wanted).state
    for name, value in wanted.items():
        assert np.array_equal(restored[name], value), name


@pytest.mark.parametrize("is_committed", [True, False])
def test_restored_leaves_are_as_good_as_fresh_ones(tmp_path, is_committed):
    """No recompilation, and donation hands over the very buffers."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = optax.adamw(1e-3)

    def init():
        params = {"w": jnp.ones((64, 16)), "b": jnp.zeros(16), "h": jnp.ones((8, 3))}
        return {
            "step": jnp.int32(0),
            "params": params | {"h": params["h"].astype(jnp.bfloat16)},
            "opt": tx.init(params),
            "rng": jax.random.key(0),
        }

    def place(leaf):
        divides = leaf.ndim and leaf.shape[0] % 8 == 0 and leaf.shape[0] > 8
        return NamedSharding(
            mesh, PartitionSpec("data") if divides else PartitionSpec()
        )

    shardings = jax.tree.map(place, jax.eval_shape(init)) if is_committed else None
    make = jax.jit(init, out_shardings=shardings) if is_committed else jax.jit(init)

    def train(state):
        noise = jax.random.normal(
            jax.random.fold_in(state["rng"], state["step"]), (16,)
        )
        grads = jax.tree.map(lambda p: p * 0.1, state["params"])
        grads["b"] += noise
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {
            "step": state["step"] + 1,
            "params": params,
            "opt": opt,
            "rng": state["rng"],
        }

    step = jax.jit(train, donate_argnums=0, out_shardings=shardings)
    fresh = make()
    committed = [leaf.committed for leaf in jax.tree.leaves(fresh)]
    state = step(make())
    state = step(state)
    compiled = step._cache_size()
    with manager.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        restored = checkpoints.restore(make()).state
    assert [leaf.committed for leaf in jax.tree.leaves(restored)] == committed
    straight = step(step(state))

    addresses = _addresses(restored["params"]["w"])
    after = step(restored)
    assert step._cache_size() == compiled
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored))
    assert _addresses(after["params"]["w"]) == addresses
    after = step(after)
    assert step._cache_size() == compiled
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(after), strict=True):
        if a.dtype != fresh["rng"].dtype:
            assert np.array_equal(a, b)


def _addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_a_save_that_never_commits_is_an_error(tmp_path):
    class Silent:
        def wait_until_finished(self):
            pass

        def close(self):
            pass

    write = orbax_io.Write(str(tmp_path / "5"), Silent(), gate=Gate())
    assert not write.wait(0.1)
    write.begin()
    assert write.wait(10)
    assert isinstance(write.error(), FileNotFoundError)
