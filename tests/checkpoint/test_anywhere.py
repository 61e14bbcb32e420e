"""A checkpoint of any processes and devices is restored by any others, bit for bit."""

import json

import pytest

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]

# Each hop restores what the one before it has saved, looks at every bit of what it
# holds, and saves it under another mesh.
PROGRAM = """
import faulthandler, json, pathlib, re, sys
faulthandler.dump_traceback_later(100, exit=True)
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

root, hop, num, address, index = sys.argv[1:]
hop, num, index = int(hop), int(num), int(index)
if num > 1:
    jax.distributed.initialize(address, num, index)
from jaxft.checkpoint.manager import CheckpointManager

rng = np.random.default_rng(hop)  # The same in all processes.
devices = rng.permutation(np.array(jax.devices()))
split = 2 ** rng.integers(devices.size.bit_length())
mesh = Mesh(devices.reshape(-1, split), ("a", "b"))
values = np.random.default_rng(0)
values = {
    "rows": values.normal(size=(2048, 1024)).astype(np.float32),
    "w": values.normal(size=(32, 48)).astype(np.float32),
    "h": values.normal(size=(16, 32)).astype(ml_dtypes.bfloat16),
    "u": values.integers(0, 16, (16, 16)).astype(ml_dtypes.uint4),
    "same": values.normal(size=(7,)).astype(np.float32),
}
specs = [("a", "b"), ("b", "a"), ("a",), (None, ("a", "b")), ()]
places = {
    name: PartitionSpec(*specs[rng.integers(len(specs))]) for name in ("w", "h", "u")
} | {"rows": PartitionSpec(("a", "b")), "same": PartitionSpec()}
places = {name: NamedSharding(mesh, place) for name, place in places.items()}

def read_bytes():
    text = pathlib.Path("/proc/self/io").read_text()
    return int(re.search(r"rchar: (\\d+)", text)[1])

def check(state):
    for name, value in values.items():
        assert state[name].sharding == places[name], name
        for shard in state[name].addressable_shards:
            part = np.asarray(shard.data)
            assert part.dtype == value.dtype, name
            assert part.tobytes() == value[shard.index].tobytes(), name

with CheckpointManager(root, keep="last(9)", layout="files") as checkpoints:
    if hop:
        target = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=places[name])
            for name, value in values.items()
        }
        checkpoints.restore(target)  # The first one imports as well.
        before = read_bytes()
        restored = checkpoints.restore(target)
        num_read = read_bytes() - before
        assert restored.step == hop - 1
        state = restored.state
    else:
        num_read = 0
        state = {
            name: jax.make_array_from_callback(
                value.shape, places[name], lambda box, value=value: value[box]
            )
            for name, value in values.items()
        }
    check(state)
    assert checkpoints.save(hop, state, force=True)
print(json.dumps(num_read))
"""

ROWS_BYTES = 2048 * 1024 * 4


CHAIN = [(2, 1), (1, 16), (4, 2), (1, 1), (2, 4), (4, 1), (2, 2)]


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(CHAIN[:2], id="two processes to sixteen devices"),
        pytest.param(CHAIN, id="chain", marks=pytest.mark.slow),
    ],
)
def test_any_processes_and_devices(tmp_path, run_processes, shapes):
    for number, (num_processes, num_devices) in enumerate(shapes):
        ends = run_processes(
            PROGRAM,
            *(tmp_path, number, num_processes),
            num_processes=num_processes,
            num_devices=num_devices,
        )
        read = [json.loads(out.splitlines()[-1]) for out, _ in ends]
        if number:
            # The large leaf is split over all: each reads its own rows of it, besides
            # what is small.
            assert max(read) <= ROWS_BYTES / num_processes + 2**20, (number, read)
            assert sum(read) >= ROWS_BYTES, (number, read)
