"""Steps that an earlier jaxft wrote stay readable, bit for bit.

`tests/golden/checkpoints/<format>` holds a root and a mirror that this file wrote when
the format was new:

    python tests/checkpoint/test_stored_formats.py tests/golden/checkpoints/1

They are never written anew: a new format gets a folder of its own.
"""

import collections
import json
import os
import pathlib
import shutil
import sys
import tempfile

# As in the tests; it is also run alone.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.checkpoint import decisions, manifest, mirror_mark, run_record
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.cli import __main__ as cli

pytestmark = pytest.mark.device

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "checkpoints"
FORMATS = ["1"]
LAST = 3
CONTENT = {
    "data": {"next": 7, "skipped": [[2, 3]]},
    "run": {"note": "\u00e9"},
    "metrics": {"loss": 0.5},
}

Point = collections.namedtuple("Point", ["x", "y"])


def _bits(dtype, shape):
    """Every kind of bits, NaN among them; of no library's random numbers."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return (np.arange(count) * 73 + 5).astype(np.uint8).view(dtype).reshape(shape)


def make_state(step):
    """The state of a step; `frozen` is the same in all.

    XLA's arithmetic is not the same bits in all versions, so NumPy does it.
    """
    rows = NamedSharding(jax.make_mesh((2, 4), ("a", "b")), PartitionSpec("a"))
    w = np.arange(8, dtype=np.float32).reshape(4, 2) * step / 3
    w[0] = -0.0, 1e-40
    frozen = np.arange(5, dtype=np.float32) / np.float32(7)
    return {
        "step": jnp.int32(step),
        "params": {"w": jax.device_put(w, rows), "frozen": jnp.asarray(frozen)},
        "rng": jax.random.key(step),
        "weak": jnp.asarray(0.1),
        "odd": Point(
            x=[jnp.asarray(_bits("bfloat16", (3, 2))), jnp.zeros((0, 3), jnp.int8)],
            y=(_bits(np.float64, (4,)), np.int64(-(2**40) - step), None),
        ),
        "bytes": jnp.asarray(np.arange(6).astype(ml_dtypes.uint4)),
        "python": {"float": 0.1 * step, "bool": True, "text": "\u00e4 b"},
    }


def write(folder):
    """A root whose step is partly links and is pinned, and a mirror of another."""
    root = str(folder / "root")
    with CheckpointManager(root, layout="files") as checkpoints:
        for step in range(1, LAST + 1):
            checkpoints.save(step, make_state(step), **CONTENT, force=True)
    for step in range(1, LAST):
        shutil.rmtree(f"{root}/{step}")
    decisions.pin(root, LAST, reason="it is good")
    mirror = str(folder / "mirror")
    with (
        tempfile.TemporaryDirectory() as root,
        CheckpointManager(
            root, layout="ocdbt", codec="zstd", mirror=mirror
        ) as checkpoints,
    ):
        checkpoints.save(LAST, make_state(LAST), **CONTENT)


def _raw(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    leaves = jax.tree_util.tree_leaves_with_path(saved)
    for (path, a), b in zip(leaves, jax.tree.leaves(restored), strict=True):
        assert type(a) is type(b), path
        if not hasattr(a, "dtype"):
            assert a == b, path
            continue
        assert (a.dtype, a.shape, _raw(a)) == (b.dtype, b.shape, _raw(b)), path
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False), path


@pytest.fixture(params=FORMATS)
def stored(request, tmp_path):
    """A copy: what is there is not to be changed."""
    return pathlib.Path(shutil.copytree(GOLDEN / request.param, tmp_path / "stored"))


def _check(restored, num_leaves):
    assert_same(restored.state, make_state(LAST))
    content = (restored.data, restored.record["run"], restored.record["metrics"])
    assert content == tuple(CONTENT.values())
    assert restored.num_proven == num_leaves


@pytest.mark.parametrize("case", ["root", "mirror"])
def test_a_stored_step_is_proven_by_the_toolbox(stored, case, capsys):
    step = stored / case / str(LAST)
    assert cli.main(["ckpt", "verify", str(step)]) == 0, capsys.readouterr().out


def test_a_stored_root_is_restored_and_gone_on_with(stored):
    # What is linked: a link of a checkout is a file of its own.
    leaves = manifest.read(stored / "root" / str(LAST)).leaves
    assert {leaves["params/frozen"].written_at, leaves["step"].written_at} == {1, LAST}
    assert decisions.read(str(stored / "root")).pinned == {LAST}
    with CheckpointManager(stored / "root", keep="last(1)") as checkpoints:
        _check(checkpoints.restore(make_state(0)), len(leaves))
        for step in range(LAST + 1, LAST + 4):
            checkpoints.save(step, make_state(step), force=True)
        restored = checkpoints.restore(make_state(0))
        assert_same(restored.state, make_state(LAST + 3))
        # It is pinned.
        assert checkpoints.steps() == [LAST, LAST + 3]


def test_a_stored_mirror_fills_an_empty_root(stored, tmp_path):
    with CheckpointManager(
        tmp_path / "root", mirror=str(stored / "mirror")
    ) as checkpoints:
        restored = checkpoints.restore(make_state(0))
        assert checkpoints.steps() == [LAST]
    _check(restored, len(restored.manifest.leaves))


def test_every_format_that_is_written_has_a_stored_example():
    written = {
        (module.FORMAT_NAME, module.FORMAT_VERSION)
        for module in (run_record, manifest, decisions, mirror_mark)
    }
    found = set()
    files = ("root/*/run/metadata", "root/*/manifest/metadata", "root/decisions/*")
    for pattern in (*files, "mirror/*/COMMIT"):
        for path in GOLDEN.glob(f"*/{pattern}"):
            form = json.loads(path.read_text())["format"]
            found.add((form["name"], form["version"]))
    assert written <= found


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
