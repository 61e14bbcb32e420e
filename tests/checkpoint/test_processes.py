"""Two real processes: one checkpoint of both, and what is refused there."""

import os
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

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


def _run(program, root):
    """What each of two processes says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", program, str(root), address]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ends = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-2000:]
    return [
        [line for line in out.splitlines() if "[Gloo]" not in line] for out, _ in ends
    ]


def test_both_save_one_checkpoint_and_no_policy_of_theirs_asks_a_clock(tmp_path):
    for index, lines in enumerate(_run(PROGRAM, tmp_path / "root")):
        *refused, last = lines
        assert len(refused) == 2
        for line in refused:
            assert line.startswith("config.checkpoint.save: ")
            assert line.endswith("2 processes do not agree: use steps(n)")
        assert last == f"2 {[2.0 * i for i in range(8 * index, 8 * index + 8)]}"
    assert os.listdir(tmp_path / "root") == ["2"]


def test_both_prove_what_they_save_and_fall_back_together(tmp_path):
    first, second = _run(PROVEN, tmp_path / "root")
    told = ["save_unhealthy 4", "corrupt 3", "quarantine 3"]
    assert first[:-1] == told
    for index, lines in enumerate((first, second)):
        assert lines[-1] == f"2 3 {[2.0 * i for i in range(8 * index, 8 * index + 8)]}"
    names = sorted(os.listdir(tmp_path / "root"))
    assert names == ["1", "2", "3.quarantined-1"]
