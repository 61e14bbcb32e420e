"""Two real processes: one checkpoint of both, and what is refused there."""

import dataclasses
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft.checkpoint import manifest
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.fingerprints import Fingerprint

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]
SLOW = pytest.mark.slow

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import ConfigError

for policy in ("secs(5)", "steps(2) | secs(5)"):
    try:
        CheckpointManager(sys.argv[1], save=policy)
    except ConfigError as error:
        print(error)
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())
make = jax.jit(
    lambda step: {"w": jnp.arange(16.0) * step, "step": jnp.int32(step)},
    static_argnums=0,
    out_shardings={"w": rows, "step": everywhere},
)
with CheckpointManager(sys.argv[1], keep="last(1)") as checkpoints:
    for step in (1, 2):
        assert checkpoints.save(step, make(step), data={"next": step}, force=True)
restored = CheckpointManager(sys.argv[1]).restore(make(0))
assert restored.data == {"next": 2}
assert restored.state["w"].sharding == rows
(mine,) = restored.state["w"].addressable_shards
print(restored.step, np.asarray(mine.data).tolist())
"""


PROVEN = """
import faulthandler, pathlib, sys
faulthandler.dump_traceback_later(80, exit=True)
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft import fingerprints
from jaxft.checkpoint import manifest, verify
from jaxft.checkpoint.manager import CheckpointManager

root = pathlib.Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("data",))
rows = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())

def make(step, bad=0.0):
    make = jax.jit(
        lambda: {"params": {"w": jnp.arange(16.0) * step + bad}, "same": jnp.ones(4)},
        out_shardings={"params": {"w": rows}, "same": everywhere},
    )
    return make() | {"n": np.arange(3)}

def emit(kind, /, **fields):
    if kind in ("corrupt", "quarantine", "save_unhealthy", "save_failed"):
        print(kind, fields["step"])

with CheckpointManager(root, keep="last(9)", emit=emit) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, make(step), force=True)
    checkpoints.wait()
    checkpoints.save(4, make(4, bad=float("nan")), force=True)
multihost_utils.sync_global_devices("saved")
leaves = manifest.read(root / "3").leaves
for path, value in (("params/w", np.arange(16, dtype="f4") * 3), ("n", np.arange(3))):
    assert leaves[path].fingerprint == fingerprints.digest_array(value).fingerprint
assert verify.verify_step(root / "3") == []
multihost_utils.sync_global_devices("looked")
if jax.process_index() == 0:
    for victim in (root / "3/state").rglob("d/*"):
        victim.chmod(0o600)
        victim.write_bytes(bytes(byte ^ 1 for byte in victim.read_bytes()))
multihost_utils.sync_global_devices("damaged")
restored = CheckpointManager(root, emit=emit).restore(make(0))
(mine,) = restored.state["params"]["w"].addressable_shards
print(restored.step, restored.num_proven, np.asarray(mine.data).tolist())
"""


ALONE = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(80, exit=True)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft import records
from jaxft.checkpoint import judge
from jaxft.checkpoint.manager import CheckpointManager

root, is_second = sys.argv[1], jax.process_index() == 1
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
make = jax.jit(lambda: {"w": jnp.zeros(16), "frozen": jnp.zeros(4096)},
               out_shardings=rows)
target = {"params": make(), "n": np.arange(3)}

def emit(kind, /, **fields):
    if kind in ("corrupt", "quarantine", "unhealthy"):
        print(kind, fields["step"], fields.get("path", ""))

def restore(root, **settings):
    try:
        restored = CheckpointManager(root, emit=emit).restore(target, **settings)
        print("restored", restored and restored.step)
    except (records.FaultError, ZeroDivisionError) as error:
        print("raised", getattr(error, "fault", None) and error.fault.kind, error)

def dislike(step):
    return lambda record: "no" if is_second and record["step"] == step else ""

restore(root)
restore(root, check=dislike(5))
restore(root, check=lambda record: str(1 // (not is_second))[1:])
restore(f"{root}-copy/2/run/metadata" if is_second else root)
restore(f"{root}-absent" if is_second else root)
restore(root if is_second else f"{root}-absent")
restore(f"{root}-copy" if is_second else root)
restore(root, step=9)
read = judge.orbax_io.read_state
def flip(*args, **settings):
    state = read(*args, **settings)
    state["n"][1] += is_second
    return state
judge.orbax_io.read_state = flip
restore(root)
"""


@pytest.fixture
def run(run_processes):
    """What each of two processes says."""

    def lines(program, root):
        return [
            [line for line in out.splitlines() if "[Gloo]" not in line]
            for out, _ in run_processes(program, root)
        ]

    return lines


@pytest.mark.parametrize("service", ["true", pytest.param("false", marks=SLOW)])
def test_both_save_one_checkpoint_and_no_policy_of_theirs_asks_a_clock(
    tmp_path, run, monkeypatch, service
):
    """With JAX's preemption service and without: a save asks for none."""
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", service)
    for index, lines in enumerate(run(PROGRAM, tmp_path / "root")):
        *refused, last = lines
        assert len(refused) == 2
        for line in refused:
            assert line.startswith("config.checkpoint.save: ")
            assert line.endswith("2 processes do not agree: use steps(n)")
        assert last == f"2 {[2.0 * i for i in range(8 * index, 8 * index + 8)]}"
    assert os.listdir(tmp_path / "root") == ["2"]


def test_both_prove_what_they_save_and_fall_back_together(tmp_path, run):
    first, second = run(PROVEN, tmp_path / "root")
    # What is not finite stays until somebody passes over it.
    told = ["save_unhealthy 4", "quarantine 4", "corrupt 3", "quarantine 3"]
    assert first[:-1] == told
    for index, lines in enumerate((first, second)):
        assert lines[-1] == f"2 3 {[2.0 * i for i in range(8 * index, 8 * index + 8)]}"
    names = sorted(os.listdir(tmp_path / "root"))
    assert names == ["1", "2", "3.quarantined-1", "4.quarantined-1"]


def test_what_one_process_sees_is_for_all(tmp_path, run):
    """Each damage, failure and view here is of the second process alone."""
    root = tmp_path / "root"
    rows = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))

    def state(step):
        frozen = jax.device_put(jnp.arange(4096.0), rows)
        w = jax.device_put(jnp.arange(16.0) * step, rows)
        return {"params": {"w": w, "frozen": frozen}, "n": np.arange(3)}

    with CheckpointManager(root, keep="last(9)", layout="files") as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, state(step), force=True)
    shutil.copytree(root, f"{root}-copy")
    for step in range(1, 7):
        record = pathlib.Path(f"{root}-copy", str(step), "manifest/metadata")
        proof = manifest.read(record.parents[1])
        record.unlink()
        entry = dataclasses.replace(proof.leaves["n"], fingerprint=Fingerprint(1, 2))
        leaves = {**proof.leaves, "n": entry}
        manifest.write(record.parents[1], dataclasses.replace(proof, leaves=leaves))
    # Of the chunks of a leaf, each process reads one.
    chunk = "state/params.frozen/c/1"
    files = {step: root / str(step) / chunk for step in range(1, 7)}
    sharing = [s for s in range(5, 0, -1) if files[s].samefile(files[6])]
    assert sharing
    files[6].chmod(0o600)
    data = bytearray(files[6].read_bytes())
    data[100] ^= 1
    files[6].write_bytes(data)

    first, second = run(ALONE, root)
    left = [step for step in range(6, 0, -1) if step not in (6, *sharing)]
    bad = [*(f"corrupt {s} {chunk}" for s in (6, *sharing)), f"corrupt {left[0]} "]
    assert [line for line in first if line.startswith("corrupt")] == bad
    assert [line for line in second if line.startswith("corrupt")] == bad
    # The primary process alone renames.
    aside = [line.split()[:2] for line in first if line.startswith("quarantine")]
    assert aside == [["quarantine", str(s)] for s in (6, *sharing, left[0])]
    assert not [line for line in second if line.startswith("quarantine")]
    ends = zip(
        *(
            [line for line in lines if line.startswith(("restored", "raised"))]
            for lines in (first, second)
        ),
        strict=True,
    )
    step, next_step = left[0], left[1]
    config, cannot = "raised config ", "raised config process 1 cannot "
    path = f"{root}/{next_step}"
    for (one, other), (want, want_other) in zip(
        ends,
        [
            (f"restored {step}", f"restored {step}"),
            (f"restored {next_step}", f"restored {next_step}"),
            (f"{cannot}read {path}", "raised None integer division"),
            (f"{cannot}look into {root}", config),
            (f"{cannot}read {path}", f"{config}process 0 sees "),
            (f"{config}process 1 sees step {next_step} in {root}, process 0 sees none",)
            * 2,
            (f"{config}processes 0 and 1 see different {path}", config),
            ("raised no_checkpoint step 9", "raised no_checkpoint step 9"),
            (f"raised exception {path} is right", f"raised exception {path} is right"),
        ],
        strict=True,
    ):
        assert one.startswith(want)
        assert other.startswith(want_other)
    there = sorted(name for name in os.listdir(root) if name.isdecimal())
    assert there == sorted(str(step) for step in left[1:])
