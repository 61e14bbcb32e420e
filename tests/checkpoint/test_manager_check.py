"""What would fail at the first save is refused before the first step."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import config
from jaxft.checkpoint import leaves, manager, options, space

pytestmark = pytest.mark.device

GOOD = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "n": 3, "none": None}


def _refused(root, target):
    with pytest.raises(config.ConfigError) as error:
        manager.CheckpointManager(root).check(target)
    assert error.value.path == "checkpoint"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_can_be_saved_passes_and_nothing_is_written(tmp_path):
    manager.CheckpointManager(tmp_path / "a/b").check(GOOD)
    assert os.listdir(tmp_path) == []
    # An abstract state and the real one are judged alike.
    state = {"w": jnp.ones(2), "rng": jax.random.key(0), "u": jnp.ones(2, jnp.uint4)}
    leaves.check(state)
    leaves.check(jax.eval_shape(lambda: state))


@pytest.mark.parametrize("kind", ["file", "dangling", "loop", "below a file"])
def test_a_root_that_is_no_folder(tmp_path, kind):
    root = tmp_path / "checkpoints"
    if kind == "file":
        root.write_text("x")
    elif kind == "below a file":
        (tmp_path / "file").write_text("x")
        root = tmp_path / "file" / "checkpoints"
    else:
        os.symlink(root if kind == "loop" else tmp_path / "not mounted", root)
    before = sorted(os.listdir(tmp_path))
    assert str(root) in _refused(root, GOOD)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_root_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert str(tmp_path) in _refused(tmp_path / "a" / "b", GOOD)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ({"a.b": GOOD["w"], "a": {"b": GOOD["w"]}}, ["'a.b'", "'a', 'b'"]),
        ({"a": {(1, 2): GOOD["w"]}}, ["'a'", "(1, 2)"]),
        ({"a": {"": GOOD["w"]}}, ["'a'"]),
        ({"a": {"x": object()}}, ["a/x"]),
        ({"a": {"x": jax.ShapeDtypeStruct((1,), jax.dtypes.float0)}}, ["a/x"]),
        (
            {"a": {"x": jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True)}},
            ["a/x"],
        ),
        ({"a": {"x": np.array(["text"])}}, ["a/x"]),
    ],
)
def test_a_leaf_that_cannot_be_stored_is_named(tmp_path, target, names):
    line = _refused(tmp_path, target)
    for name in names:
        assert name in line


def test_too_little_room_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "_free_bytes", lambda folder: 3 << 20)
    state = {"w": jax.ShapeDtypeStruct((1 << 18,), jnp.float32)}
    line = _refused(tmp_path / "root", state)
    assert "3.0 MiB free" in line
    assert "4 more steps of 1.0 MiB" in line
    manager.CheckpointManager(tmp_path / "root", keep="last(2)").check(state)
    assert os.listdir(tmp_path) == []


def test_a_misspelt_leaf_to_watch_is_found_before_the_first_step(tmp_path):
    checkpoints = manager.CheckpointManager(tmp_path, health="params/**, ww")
    with pytest.raises(config.ConfigError) as error:
        checkpoints.check(GOOD)
    assert error.value.path == "checkpoint.health"
    manager.CheckpointManager(tmp_path, health="params/**, w").check(GOOD)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_failed_saves", 0),
        ("max_failed_saves", -1),
        ("max_failed_saves", 1.5),
        ("mirror", "s3:/bucket/prefix"),
        ("mirror", "gs:/bucket"),
        ("mirror", "s4://bucket"),
    ],
)
def test_a_setting_that_means_nothing_is_named(tmp_path, setting, value):
    with pytest.raises(config.ConfigError) as error:
        manager.CheckpointManager(tmp_path, **{setting: value})
    assert error.value.path == f"checkpoint.{setting}"


def test_a_manager_alone_does_what_the_one_of_a_run_does():
    """But for when it saves: nobody else keeps time."""
    settings = config.CheckpointConfig()
    for name, given in inspect.signature(manager.CheckpointManager).parameters.items():
        if hasattr(settings, name) and name != "save":
            wanted = getattr(settings, name)
            assert given.default == getattr(wanted, "value", wanted), name
    assert settings.health == options.HEALTH
