"""Damage of every kind to every kind of file: never a wrong value, always a way back.

Each trial damages one file of the newest step of a root with linked and unlinked
leaves, and restores. What comes back must be, bit for bit, the state of the newest
step that does not contain the damaged file.
"""

import os
import random
import shutil
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxft.checkpoint import layout, manager

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(1800),
    # Reads that Orbax leaves behind when another one fails may end after the test.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STORES = [
    ("files", "raw"),
    ("files", "lz4"),
    ("files", "zstd"),
    ("ocdbt", "raw"),
    ("ocdbt", "zstd"),
]
STEPS = (10, 20, 30, 40)
DAMAGES = ("flip", "truncate", "empty", "delete")


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self if name == kind]


def _state(step):
    """Leaves that change with the step, and, under `same`, leaves that do not."""

    def leaves(seed):
        rng = np.random.default_rng(seed)
        return {
            "f4": jnp.asarray(rng.normal(size=(64, 8)).astype(np.float32)),
            "bf16": jnp.asarray(rng.normal(size=(33,)), jnp.bfloat16),
            "i4": jnp.asarray(rng.integers(-8, 8, size=(9,)), jnp.int4),
            "u4": jnp.asarray(rng.integers(0, 16, size=(9,)), jnp.uint4),
            "f8": jnp.asarray(rng.normal(size=(12,)), jnp.float8_e4m3),
            "flag": jnp.asarray(rng.integers(0, 2, size=(5,)).astype(bool)),
            "c8": jnp.asarray(rng.normal(size=(6,)) + 1j, jnp.complex64),
            "f8_np": rng.normal(size=(7,)),
            "key": jax.random.key(seed),
        }

    return {
        "step": step,
        "text": f"step {step}",
        "zeros": jnp.zeros((40, 8)),
        "changing": leaves(step),
        "same": leaves(0),
    }


def _fill(root, *, array_layout, codec):
    with manager.CheckpointManager(
        root, keep="last(9)", layout=array_layout, codec=codec
    ) as checkpoints:
        for step in STEPS:
            assert checkpoints.save(step, _state(step), data={"at": step}, force=True)


def _bits(leaf):
    if isinstance(leaf, str | int | float):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def _assert_is(restored, step):
    assert restored.step == step
    assert restored.data == {"at": step}
    want, got = jax.tree.leaves(_state(step)), jax.tree.leaves(restored.state)
    assert [_bits(leaf) for leaf in got] == [_bits(leaf) for leaf in want]


def _kind(path):
    """Files that play the same part: one of each kind is hit as often as any other."""
    parts = path.split("/")
    if parts[0] != layout.STATE_ITEM:
        return path
    if "c" in parts or parts[-1] == "zarr.json":
        kind = "zarr.json" if parts[-1] == "zarr.json" else "chunk"
        group = "same" if parts[1].startswith("same") else "changing"
        return f"{group} {kind}"
    if "d" in parts:
        return "/".join(parts[: parts.index("d") + 1])
    return path


def _files(step):
    found = {}
    for folder, _, files in os.walk(step):
        for file in files:
            path = os.path.relpath(os.path.join(folder, file), step)
            found.setdefault(_kind(path), []).append(path)
    return {kind: sorted(paths) for kind, paths in sorted(found.items())}


def _damage(path, how, rng):
    """Damages the file in place, under all of its names; False where it cannot."""
    size = os.path.getsize(path)
    if how == "delete":
        os.unlink(path)
        return True
    if size == 0:
        return False
    os.chmod(path, 0o644)
    if how == "truncate":
        os.truncate(path, rng.randrange(size))
    elif how == "empty":
        os.truncate(path, 0)
    else:
        with open(path, "r+b") as file:
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return True


def _trial(base, root, *, number, rng):
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    files = _files(root / "40")
    kinds = list(files)
    file = rng.choice(files[kinds[number % len(kinds)]])
    how = DAMAGES[(number // len(kinds) + number) % len(DAMAGES)]
    shared = [
        step
        for step in STEPS[:-1]
        if (root / str(step) / file).exists()
        and os.path.samefile(root / "40" / file, root / str(step) / file)
    ]
    if not _damage(root / "40" / file, how, rng):
        return
    events = Events()
    with manager.CheckpointManager(root, emit=events) as checkpoints:
        restored = checkpoints.restore(_state(0))
    about = f"{how} of {file}, shared by {shared}"
    if restored is not None and restored.step == 40:
        # A database keeps data that nothing leads to any more; all that was read is
        # proven to be what was saved.
        assert how == "flip", about
        assert "/d/" in file, about
        assert restored.num_proven == 20
        _assert_is(restored, 40)
        return
    # A deleted name leaves the others whole, and the step before is the newest one.
    want = max(step for step in STEPS[:-1] if step not in shared)
    assert restored is not None, about
    _assert_is(restored, want)
    first = events.of("corrupt")[0]
    assert first["step"] == 40, about
    assert first["path"], about
    told = f"{first['path']} {first['reason']}"
    names = (file, *file.split("/")[1:2], os.path.basename(file))
    assert any(name in told or name.replace(".", "/") in told for name in names), (
        about,
        told,
    )
    aside = sorted(
        int(path.name.split(".")[0]) for path in root.glob("*.quarantined-*")
    )
    assert aside == sorted([40, *(shared if how != "delete" else [])]), about
    assert restored.num_proven == 20, about


@pytest.mark.parametrize(("array_layout", "codec"), STORES)
def test_one_damaged_file(tmp_path, array_layout, codec, full):
    base = tmp_path / "base"
    _fill(base, array_layout=array_layout, codec=codec)
    linked = base / "40/state/same.f4/zarr.json"
    assert linked.exists() == (array_layout == "files")
    if array_layout == "files":
        assert os.path.samefile(linked, base / "20/state/same.f4/zarr.json")
        assert not os.path.samefile(linked, base / "30/state/same.f4/zarr.json")
    rng = random.Random(f"{array_layout} {codec}")
    num_trials = 100 if full else 4
    num_kinds = len(_files(base / "40"))
    start = rng.randrange(num_kinds)
    for trial in range(num_trials):
        root = tmp_path / "root"
        # The sample strides over the kinds; everything goes through all of them.
        number = start + trial if full else start + trial * (num_kinds // 4 + 1)
        _trial(base, root, number=number, rng=rng)
        shutil.rmtree(root)


def test_these_are_all_the_dtypes_that_need_help():
    """So that a change of what is stored as bytes is a change of this test."""
    state = _state(1)["same"]
    dtypes = {np.dtype(state[name].dtype) for name in ("u4", "f8")}
    assert dtypes == {np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.float8_e4m3)}
