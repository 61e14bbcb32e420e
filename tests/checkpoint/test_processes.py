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


def test_both_save_one_checkpoint_and_no_policy_of_theirs_asks_a_clock(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "root"), address]
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
    for index, (out, err) in enumerate(ends):
        assert processes[index].returncode == 0, err[-2000:]
        lines = [line for line in out.splitlines() if "[Gloo]" not in line]
        *refused, last = lines
        assert len(refused) == 2
        for line in refused:
            assert line.startswith("config.checkpoint.save: ")
            assert line.endswith("2 processes do not agree: use steps(n)")
        assert last == f"2 {[2.0 * i for i in range(8 * index, 8 * index + 8)]}"
    assert os.listdir(tmp_path / "root") == ["2"]
