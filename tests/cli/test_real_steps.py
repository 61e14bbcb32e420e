"""The toolbox on what the manager and an untouched Orbax write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft

pytestmark = pytest.mark.device


def _state(step: int) -> dict:
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    frozen = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    return {
        "params": {
            "frozen": jax.device_put(frozen, rows),
            "w": jnp.full((3, 5), step, jnp.bfloat16),
            "u4": jnp.array([1, 15], jnp.uint4),
            "f8": jnp.array([0.5, 2], jnp.float8_e4m3),
        },
        "key": jax.random.key(step),
        "none": jnp.zeros((0, 4)),
        "nothing": None,
        "count": step,
        "note": "text",
    }


@pytest.fixture(scope="module", params=["files", "ocdbt"])
def saved(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    with jaxft.CheckpointManager(root, layout=request.param) as manager:
        for step in (1, 2, 3):
            assert manager.save(step, _state(step))
            manager.wait()
    return root


def test_real_steps_are_proven(ckpt, ckpt_json, saved):
    code, found = ckpt_json("verify", saved)
    assert (code, len(found["steps"])) == (0, 3), found
    code, found = ckpt_json("ls", saved)
    assert [step["healthy"] for step in found["steps"]] == [True] * 3
    code, found = ckpt_json("show", saved)
    assert {leaf["path"]: leaf["type"] for leaf in found["leaves"]} == {
        "params/frozen": "float32[8,8]",
        "params/w": "bfloat16[3,5]",
        "params/u4": "uint4[2]",
        "params/f8": "float8_e4m3[2]",
        "key": "key<fry>[]",
        "none": "float32[0,4]",
        "count": "int64[]",
        "note": "str",
    }


def test_real_steps_are_compared(ckpt_json, saved):
    code, found = ckpt_json("diff", saved / "1", saved / "3")
    assert code == 1
    different = {leaf["path"]: leaf for leaf in found["different"]}
    assert set(different) == {"params/w", "key", "count"}
    assert different["params/w"]["num_different"] == 15
    assert different["params/w"]["max_abs"] == 2.0


def test_real_steps_are_exported(ckpt, saved, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    out = tmp_path / "x.safetensors"
    code, _, err = ckpt("export", saved, out, "--match=params/frozen, params/w, key")
    assert (code, err) == (0, "")
    arrays = safetensors.load_file(out)
    assert (arrays["params.frozen"] == np.arange(64).reshape(8, 8)).all()
    assert (arrays["params.w"].astype(np.float32) == 3).all()
    assert (arrays["key"] == jax.random.key_data(jax.random.key(3))).all()


def test_stock_steps_are_readable_and_never_called_proven(ckpt, ckpt_json, tmp_path):
    import orbax.checkpoint as ocp

    state = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "n": np.int32([4])}
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
    step = tmp_path / "root/5"
    assert ckpt("verify", step)[0] == 66
    assert ckpt("verify", step, "--allow-unproven")[0] == 0
    code, found = ckpt_json("show", step)
    assert code == 0
    assert [leaf["type"] for leaf in found["leaves"]] == ["int32[1]", "float32[2,3]"]
    code, out, _ = ckpt("export", step, tmp_path / "x.npz", "--params-only")
    assert code == 0
    assert "no fingerprints" in out
    with np.load(tmp_path / "x.npz") as arrays:
        assert (arrays["params.w"] == np.arange(6).reshape(2, 3)).all()
