"""A real full disk, a real quota of bytes."""

import os
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import config, records
from jaxft.checkpoint import manager, restore

pytestmark = pytest.mark.device


@pytest.fixture
def small_disk(tmp_path, mount_disk):
    return mount_disk(tmp_path / "disk", "10m")


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


def _make_read_only(folder):
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


@pytest.mark.parametrize("cause", ["full", "little room", "read-only"])
def test_a_disk_that_held_steps_is_no_wrong_setting(small_disk, cause):
    """A scheduler tries a failed save again, and a wrong setting never."""
    state = _state(1, mebibytes=1)
    with manager.CheckpointManager(small_disk / "used") as checkpoints:
        assert checkpoints.save(1, state)
    if cause == "read-only":
        _make_read_only(small_disk)
    else:
        room = 64 << 10 if cause == "little room" else 0
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "ballast").write_bytes(bytes(free - room))
    words = {
        "full": "cannot hold checkpoints: .* No space left on device",
        "little room": "free, and . more steps of",
        "read-only": "Read-only file system",
    }[cause]
    fresh = manager.CheckpointManager(small_disk / "fresh")
    with pytest.raises(config.ConfigError, match=rf"config\.checkpoint: .*{words}"):
        fresh.check(state)
    used = manager.CheckpointManager(small_disk / "used")
    with pytest.raises(records.FaultError, match=words) as error:
        used.check(state)
    assert error.value.fault.exit_code == 74
    assert error.value.fault.step == 1
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_good", [1, 0])
def test_a_damaged_step_that_may_not_be_renamed_is_passed_over(small_disk, num_good):
    told = []

    def emit(kind, /, **fields):
        told.append((kind, fields))

    root = small_disk / "checkpoints"
    with manager.CheckpointManager(root) as checkpoints:
        for step in range(2 - num_good, 3):
            assert checkpoints.save(step, _state(step, mebibytes=1), force=True)
    (root / "2" / "run" / "metadata").unlink()
    _make_read_only(small_disk)
    target = _state(0, mebibytes=1)
    if num_good:
        restored = restore.restore_newest(root, target, emit=emit)
        assert np.array_equal(restored.state["w"], _state(1, mebibytes=1)["w"])
        assert manager.CheckpointManager(root).restore(target).step == 1
    else:
        with pytest.raises(records.FaultError, match="cannot be moved aside") as error:
            restore.restore_newest(root, target, emit=emit)
        assert error.value.fault.exit_code == 66
    (failed,) = [fields for kind, fields in told if kind == "quarantine_failed"]
    assert (failed["step"], failed["path"]) == (2, str(root / "2"))
    assert "Read-only file system" in failed["reason"]
    assert "quarantine" not in [kind for kind, _ in told]
    assert "2" in os.listdir(root)
