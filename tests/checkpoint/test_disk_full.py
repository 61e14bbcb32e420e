"""A real full disk, a real quota of bytes."""

import os
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import manager

pytestmark = pytest.mark.device


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _state(step, *, mebibytes):
    noise = np.random.default_rng(step).bytes(mebibytes << 20)  # does not compress
    return {"step": step, "w": jnp.asarray(np.frombuffer(noise, np.uint8))}


def test_what_a_killed_save_left_is_no_reason_not_to_start(small_disk):
    """On a disk of keep + 1 steps; the next save has another label."""
    root = small_disk / "checkpoints"
    state = _state(1, mebibytes=4)
    with manager.CheckpointManager(root, keep="last(1)") as checkpoints:
        assert checkpoints.save(1, state)
    left = root / "3.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    (left / "w").write_bytes(b"x" * (4 << 20))
    with manager.CheckpointManager(root, keep="last(1)") as checkpoints:
        checkpoints.check(state)
        assert checkpoints.restore(state).step == 1
        assert checkpoints.save(2, _state(2, mebibytes=4))
    assert os.listdir(root) == ["2"]


def test_a_full_disk_is_told_and_costs_nothing_else(small_disk):
    told = []
    root = small_disk / "checkpoints"
    checkpoints = manager.CheckpointManager(
        root, keep="last(1)", emit=lambda kind, /, **fields: told.append(kind)
    )
    assert checkpoints.save(1, _state(1, mebibytes=3))
    checkpoints.wait()

    assert checkpoints.save(2, _state(2, mebibytes=20))
    with pytest.raises(records.FaultError, match=r"save of step 2 .* disk full"):
        checkpoints.wait()
    assert checkpoints.error().fault.exit_code == 74
    assert told.count("save_failed") == 1
    # The failed save has given its space back; the earlier step is whole.
    assert os.listdir(root) == ["1"]
    restored = checkpoints.restore(_state(0, mebibytes=3))
    assert np.array_equal(restored.state["w"], _state(1, mebibytes=3)["w"])

    (small_disk / "ballast").write_bytes(b"x" * (6 << 20))
    assert checkpoints.save(3, _state(3, mebibytes=3))
    with pytest.raises(records.FaultError, match="disk full"):
        checkpoints.close()
    (small_disk / "ballast").unlink()
    assert checkpoints.save(4, _state(4, mebibytes=3))
    checkpoints.close()
    assert checkpoints.error() is None
    assert os.listdir(root) == ["4"]
    restored = checkpoints.restore(_state(0, mebibytes=3))
    assert np.array_equal(restored.state["w"], _state(4, mebibytes=3)["w"])
