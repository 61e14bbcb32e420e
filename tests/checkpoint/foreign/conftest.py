"""Checkpoints of others: every way in which stock Orbax writes one."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

from jaxft.checkpoint import manager

LAYOUTS = {
    "ocdbt-zarr2": {"use_ocdbt": True, "use_zarr3": False},
    "ocdbt-zarr3": {"use_ocdbt": True, "use_zarr3": True},
    "files-zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "files-zarr3": {"use_ocdbt": False, "use_zarr3": True},
}
WAYS = ["v0-manager", "v1", "ours"]
MORE_WAYS = sorted(LAYOUTS.keys() - set(WAYS))


def make_state():
    """A state such as a Linen program has."""
    rng = np.random.default_rng(7)

    def leaf(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    params = {
        "Dense_0": {"kernel": leaf(8, 16), "bias": leaf(16)},
        "Dense_1": {"kernel": leaf(16, 4), "bias": leaf(4)},
    }
    return {
        "step": jnp.int32(7),
        "params": params,
        "opt": [jax.tree.map(jnp.zeros_like, params), {"count": jnp.int32(7)}],
    }


@pytest.fixture
def state():
    return make_state()


def write(path, state, *, way):
    """Writes a checkpoint; what to load it by."""
    if way == "ours":
        with manager.CheckpointManager(path) as ours:
            ours.save(7, state, force=True)
        return path / "7"
    if way == "v0-manager":
        with ocp.CheckpointManager(path) as theirs:
            theirs.save(7, args=ocp.args.StandardSave(state))
        return path
    if way == "v1":
        v1.save(path, state)
        return path
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**LAYOUTS[way])) as theirs:
        theirs.save(path, args=ocp.args.PyTreeSave(state))
    return path


@pytest.fixture(
    scope="session",
    params=[*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in MORE_WAYS)],
)
def stored(request, tmp_path_factory):
    """(path, state, way): the same state as each of them writes it."""
    state = make_state()
    path = tmp_path_factory.mktemp("stored") / "checkpoint"
    return write(path, state, way=request.param), state, request.param


@pytest.fixture
def save(tmp_path):
    """Writes a state by one of the ways, and says where it is."""

    def run(state, *, way="ocdbt-zarr3", name="checkpoint"):
        return write(tmp_path / name, state, way=way)

    return run


@pytest.fixture
def same():
    """Whether two trees hold the same bits."""

    def compare(one, other) -> bool:
        flat, treedef = jax.tree.flatten(one)
        others, othertree = jax.tree.flatten(other)
        return treedef == othertree and all(
            np.asarray(a).dtype == np.asarray(b).dtype
            and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in zip(flat, others, strict=True)
        )

    return compare


@pytest.fixture
def remove_others():
    """Deletes the files of all leaves but some; True where leaves have files."""

    def run(item, *kept: str) -> bool:
        removed = False
        for name in os.listdir(item):
            folder = os.path.join(item, name)
            is_array = os.path.isdir(folder) and (
                {"zarr.json", ".zarray"} & set(os.listdir(folder))
            )
            if is_array and not name.startswith(kept):
                for below, _, files in os.walk(folder):
                    for file in files:
                        os.unlink(os.path.join(below, file))
                removed = True
        return removed

    return run
