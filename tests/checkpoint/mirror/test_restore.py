"""From the mirror alone: real steps, the disk gone, the same bits back."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.checkpoint import decisions, manager, mirror, mirror_fetch, verify

pytestmark = pytest.mark.device

FROZEN = np.arange(3000, dtype=np.float32)


def _state(step):
    return {
        "key": jax.random.key(1),
        "frozen": jnp.asarray(FROZEN),
        "moving": jnp.full((7, 5), step, jnp.bfloat16),
        "step": step,
    }


def _train(root, *steps, target="", events=None):
    """Saves, mirrors after each commit, and is over."""
    with manager.CheckpointManager(root, keep="last(3)") as checkpoints:
        copier = mirror.Mirror(target, emit=events) if target else None
        for step in steps:
            assert checkpoints.save(step, _state(step), force=True)
            checkpoints.wait()
            if copier:
                copier.offer(os.path.join(root, str(step)))
        if copier:
            assert copier.close(60)


def _same(one, other):
    def bits(leaf):
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return jax.tree.map(bits, one) == jax.tree.map(bits, other)


def test_training_goes_on_from_a_disk(tmp_path, events):
    root, target = tmp_path / "root", tmp_path / "mirror"
    _train(root, 1, 2, 3, 4, 5, target=str(target), events=events)
    assert not events.of("mirror_failed")
    assert mirror_fetch.list_steps(str(target)) == [3, 4, 5]
    for step in (3, 4, 5):
        assert not verify.verify_step(target / str(step))
    # The mirror shares files where the root does, and only there.
    shared = [
        [os.stat(place / step / "state/frozen/c/0").st_ino for step in ("3", "4", "5")]
        for place in (root, target)
    ]
    assert [inodes[0] == inodes[2] for inodes in shared] == [True, True]
    assert [inodes[1] == inodes[2] for inodes in shared] == [False, False]
    shutil.rmtree(root)
    mirror_fetch.fetch(str(target), into=root)
    with manager.CheckpointManager(root) as checkpoints:
        restored = checkpoints.restore(_state(0))
    assert restored.step == 5
    assert _same(restored.state, _state(5))
    # Or in the mirror itself, which is a root like any other.
    with manager.CheckpointManager(target) as checkpoints:
        assert _same(checkpoints.restore(_state(0)).state, _state(5))
    _train(root, 6, target=str(target), events=events)
    assert mirror_fetch.list_steps(str(target)) == [3, 4, 5, 6]
    assert not events.of("mirror_failed")


def test_a_manager_that_lost_its_disk_empties_no_mirror(tmp_path, events):
    root, target = tmp_path / "root", str(tmp_path / "mirror")

    def open_manager():
        return manager.CheckpointManager(
            root,
            keep="last(2) | every(10)",
            full_every=0,  # Else a step that parts two others may stay for a while.
            mirror=target,
            emit=events,
        )

    with open_manager() as checkpoints:
        for step in (10, 20, 30, 34, 35):
            assert checkpoints.save(step, _state(step), force=True)
    shutil.rmtree(root)
    with open_manager() as checkpoints:
        restored = checkpoints.restore(_state(0))
    assert (restored.step, checkpoints.steps()) == (35, [35])
    assert mirror_fetch.list_steps(target) == [10, 20, 30, 34, 35]
    # A closed manager saves, and mirrors, like an open one.
    assert checkpoints.save(36, _state(36), force=True)
    checkpoints.close()
    assert mirror_fetch.list_steps(target) == [10, 20, 30, 35, 36]
    checkpoints.rollback(35, reason="spike", skip=(35, 36))
    checkpoints.close()
    assert mirror_fetch.list_steps(target) == [10, 20, 30, 35]
    shutil.rmtree(root)
    with open_manager() as checkpoints:
        restored = checkpoints.restore(_state(0))
    assert restored.step == 35
    assert decisions.read(root).skips_since(0) == [(35, 36)]
    assert not events.of("mirror_failed")


def test_a_mirror_slower_than_the_saves_delays_and_fails_none(tmp_path, events):
    def state(step):
        w = jnp.full((8, 2**20), step, jnp.float32)  # 32 s at this rate
        return {"w": w, "step": step}

    def open_manager(rate):
        return manager.CheckpointManager(
            tmp_path / "root",
            keep="last(2)",
            mirror=str(tmp_path / "mirror"),
            mirror_rate=rate,
            emit=events,
        )

    checkpoints = open_manager("1MiB")
    for step in (1, 2, 3, 4):
        assert checkpoints.save(step, state(step))
        checkpoints.wait()
    # The one that is being copied is held, and nothing else waits for the copy.
    held, *kept = checkpoints.steps()
    assert kept == [3, 4]
    assert not events.of("mirror_commit")
    checkpoints.close(may_wait=lambda: False)
    assert [event["step"] for event in events.of("mirror_failed")] == [held]
    with open_manager("") as checkpoints:
        assert checkpoints.restore(state(0)).step == 4
    assert events.of("mirror_commit")[0]["step"] == 4


def _flip(step):
    """One bit of the leaf that each step has for itself."""
    file = step / "state/moving/c/0/0"
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("other_copy", "restored_step"),
    [("whole", 3), ("damaged", 2), ("unreachable", 2), ("another root's", 2)],
)
def test_what_is_damaged_here_comes_back(tmp_path, events, other_copy, restored_step):
    root, target = tmp_path / "root", tmp_path / "mirror"

    def open_manager():
        return manager.CheckpointManager(
            root, layout="files", mirror=str(target), emit=events
        )

    with open_manager() as checkpoints:
        for step in (1, 2, 3):
            assert checkpoints.save(step, _state(step), force=True)
    _flip(root / "3")
    if other_copy == "damaged":
        _flip(target / "3")
    elif other_copy == "unreachable":
        target.rename(tmp_path / "elsewhere")
        target.write_text("where a folder should be")
    elif other_copy == "another root's":
        (root / "mirror-id").write_text("0" * 32)
    with open_manager() as checkpoints:
        restored = checkpoints.restore(_state(0))
    assert restored.step == restored_step
    assert _same(restored.state, _state(restored_step))
    assert checkpoints.steps() == [1, 2, 3][:restored_step]
    assert (root / "3.quarantined-1").is_dir()
    fetched = [event["step"] for event in events.of("mirror_fetch")]
    assert fetched == ([3] if restored_step == 3 else [])
    reasons = [event["reason"] for event in events.of("mirror_failed")]
    if other_copy == "damaged":
        assert "state/moving/c/0/0 has changed" in reasons[0]
    elif other_copy == "unreachable":
        assert "mirror: Not a directory" in reasons[0]
    # What lay aside before is nobody's any more: a run may have gone another way.
    if restored_step == 3:
        shutil.rmtree(root / "3")
        with open_manager() as checkpoints:
            assert checkpoints.restore(_state(0)).step == 2


@pytest.mark.slow
def test_training_goes_on_from_an_object_store(tmp_path, s3, events):
    root = tmp_path / "root"
    _train(root, 1, 2, 3, target=s3.url(), events=events)
    assert not events.of("mirror_failed")
    shutil.rmtree(root)
    path = mirror_fetch.fetch(s3.url(), into=root)
    assert not verify.verify_step(path)
    with manager.CheckpointManager(root) as checkpoints:
        assert _same(checkpoints.restore(_state(0)).state, _state(3))


_BARE = """
import sys
import orbax.checkpoint as ocp
for root in sys.argv[1:]:
    with ocp.CheckpointManager(root) as stock:
        tree = stock.restore(stock.latest_step())["state"]
        print(stock.latest_step(), tree["step"], tree["frozen"].sum())
"""


@pytest.mark.slow
def test_bare_orbax_reads_the_mirror_and_what_was_fetched(tmp_path, events):
    root, target, new = (tmp_path / name for name in ("root", "mirror", "new"))
    _train(root, 1, 2, 3, target=str(target), events=events)
    mirror_fetch.fetch(str(target), into=new)
    here = pathlib.Path(mirror.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", _BARE, str(root), str(target), str(new)],
        env=os.environ | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3", "3", str(FROZEN.sum())] * 3
