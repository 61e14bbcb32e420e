"""Two real processes load one checkpoint: each its own shards, no word between them."""

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
def test_each_process_places_its_own_shards(save, way, run_processes):
    path = save(
        {"w": jnp.asarray(np.arange(96, dtype=np.float32).reshape(8, 12))}, way=way
    )
    for out, _ in run_processes(PROGRAM, path, num_devices=2):
        assert "loaded" in out
