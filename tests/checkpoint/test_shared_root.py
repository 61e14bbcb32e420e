"""Two real processes whose root is one folder, and two of which each has its own."""

import os
import pathlib

import pytest

from jaxft.checkpoint import shared_root, space

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

PROGRAM = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(80, exit=True)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft.checkpoint import shared_root
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import ConfigError

shared_root._SEEN_SECS = 0.1
folder, me = sys.argv[1], jax.process_index()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
state = jax.jit(lambda: {"w": jnp.arange(16.0)}, out_shardings=rows)()

def tell(name, act, **settings):
    try:
        print(name, act(CheckpointManager(os.path.join(folder, name), **settings)))
    except ConfigError as error:
        print(error)

# Not there yet, there in both, and there in one; the last is one folder at two paths.
for name in (f"absent-{me}", f"old-{me}", f"{me}/root", f"mount-{me}/root"):
    tell(name, lambda checkpoints: checkpoints.check(state))
tell(f"absent-{me}", lambda c: c.save(1, state), on_save_error="warn")
tell("one", lambda c: c.check({"w": state["w"], **{".": 1 for _ in range(me)}}))
def save(checkpoints):
    checkpoints.check(state)
    began = [checkpoints.save(step, state, force=True) for step in (1, 2)]
    checkpoints.close()
    return began
tell("one", save)
tell(f"mount-{me}/root", save)
"""


def test_a_root_that_is_not_shared_is_refused_before_anything_is_there(
    tmp_path, run_processes
):
    for name in ("old-0", "old-1", "0/root", "1", "real"):
        (tmp_path / name).mkdir(parents=True)
    for index in range(2):
        (tmp_path / f"mount-{index}").symlink_to(tmp_path / "real")
    # What a kill has left of an earlier try.
    left = tmp_path / f"{space.probe_name(str(tmp_path / 'one'))}-0123"
    left.touch()
    for index, (out, _) in enumerate(run_processes(PROGRAM, tmp_path)):
        lines = [line for line in out.splitlines() if "[Gloo]" not in line]
        refused = ["absent-0", "old-0", "0/root", "absent-0"]
        for name, line in zip(refused, [*lines[:3], lines[4]], strict=True):
            assert line == (
                "config.checkpoint: process 1 does not see what process 0 writes to "
                f"{tmp_path / name}: the root must be one folder that all processes "
                "share"
            )
        assert lines[3] == f"mount-{index}/root None"
        # Only the second one has a leaf that cannot be stored.
        assert ("process 1 cannot save to" in lines[5]) == (index == 0)
        assert lines[6:] == ["one [True, True]", f"mount-{index}/root [True, True]"]
    assert sorted(os.listdir(tmp_path / "one")) == ["1", "2"]
    assert sorted(os.listdir(tmp_path / "real/root")) == ["1", "2"]
    # No root was made, and nothing of the tries is left.
    names = ["0", "1", "mount-0", "mount-1", "old-0", "old-1", "one", "real"]
    assert sorted(os.listdir(tmp_path)) == names
    for name in ("old-0", "old-1", "0/root", "1"):
        assert not list(pathlib.Path(tmp_path, name).iterdir())


def test_alone_nothing_is_asked(tmp_path):
    shared_root.check(str(tmp_path / "absent" / "root"))
    assert not list(tmp_path.iterdir())
