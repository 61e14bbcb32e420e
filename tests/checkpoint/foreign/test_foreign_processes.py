"""Two real processes load one checkpoint: each its own shards, no word between them."""

import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.device, pytest.mark.slow]

PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft.checkpoint import foreign
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
for memory_bytes in (16, 2**20):
    for spec in (("x", "y"), ("y", "x"), (None, "x"), ()):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        target = {"w": jax.ShapeDtypeStruct((8, 12), np.float32, sharding=place)}
        w = foreign.load(sys.argv[1], target, memory_bytes=memory_bytes).tree["w"]
        assert w.sharding == place
        for shard in w.addressable_shards:
            whole = np.arange(96, dtype=np.float32).reshape(8, 12)
            assert np.array_equal(np.asarray(shard.data), whole[shard.index])
print("loaded")
"""


@pytest.mark.parametrize("way", ["ours", "v0-manager"])
def test_each_process_places_its_own_shards(save, way):
    path = save(
        {"w": jnp.asarray(np.arange(96, dtype=np.float32).reshape(8, 12))}, way=way
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), address, str(index)],
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
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
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-2000:]
        assert "loaded" in out
