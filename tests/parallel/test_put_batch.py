"""Batches and control words: rows, contents, placement, one transfer, processes."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxft.config import ConfigError, MeshConfig, ShardingConfig
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.sharding import (
    batch_sharding,
    check_batch,
    local_rows,
    put_batch,
)

pytestmark = pytest.mark.device

P = PartitionSpec


def _rows(count, first=0):
    index = np.arange(first, first + count)
    return {
        "inputs": np.repeat(index[:, None], 5, axis=1).astype(np.int32),
        "weights": index.astype(np.float32),
    }


@pytest.mark.parametrize(
    ("sizes", "spec", "shard_rows"),
    [
        ((8, 1, 1), P("data"), 2),
        ((1, 8, 1), P("fsdp"), 2),
        ((2, 2, 2), P(("data", "fsdp")), 4),
        ((1, 1, 8), P(), 16),
    ],
)
def test_contents_and_placement(sizes, spec, shard_rows):
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
    sharding = batch_sharding(mesh)
    assert sharding.spec == spec
    rows = _rows(16)
    batch, control = put_batch(rows, sharding=sharding, control=5)
    for name, array in batch.items():
        assert array.sharding == sharding
        assert array.dtype == rows[name].dtype
        np.testing.assert_array_equal(array, rows[name])
        for shard in array.addressable_shards:
            assert shard.data.shape[0] == shard_rows
            np.testing.assert_array_equal(shard.data, rows[name][shard.index])
    assert control.shape == (8,)
    assert control.dtype == jnp.int32
    assert {shard.data.shape for shard in control.addressable_shards} == {(1,)}
    np.testing.assert_array_equal(control, np.full(8, 5))


def test_local_rows_of_one_process_are_all_rows():
    sharding = batch_sharding(make_mesh(MeshConfig(fsdp=2, tensor=2)))
    assert local_rows(sharding, 12) == list(range(12))
    unsplit = batch_sharding(make_mesh(MeshConfig(data=1, tensor=-1)))
    assert local_rows(unsplit, 3) == [0, 1, 2]


def test_a_batch_rule_of_ones_own():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    config = ShardingConfig(logical_rules="batch=data")
    assert batch_sharding(mesh, config=config).spec == P("data")
    with pytest.raises(ConfigError, match="no rule for 'batch'"):
        batch_sharding(mesh, config=ShardingConfig(logical_rules="embed=fsdp"))


def test_the_global_batch_must_split_equally():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    check_batch(12, num_microbatches=3, mesh=mesh)
    with pytest.raises(ConfigError) as caught:
        check_batch(30, num_microbatches=3, mesh=mesh)
    assert caught.value.path == "data.global_batch"
    assert caught.value.problem == (
        "30 rows do not split over 4 batch shards x 3 microbatches: "
        "use a multiple of 12"
    )


@pytest.mark.parametrize(
    ("rows", "global_batch", "words"),
    [
        ({"a": np.ones(8), "b": np.ones(16)}, None, "equal numbers of rows"),
        ({"a": np.ones(8)}, 16, "holds 16 of 16 rows, got 8"),
        ({"a": np.float32(1)}, None, "no rows"),
        ({}, None, "no rows"),
    ],
)
def test_wrong_numbers_of_rows(rows, global_batch, words):
    sharding = batch_sharding(make_mesh())
    with pytest.raises(ValueError, match=words):
        put_batch(rows, sharding=sharding, global_batch=global_batch)


def test_a_step_takes_batch_after_batch_without_compiling_again():
    sharding = batch_sharding(make_mesh(MeshConfig(fsdp=4)))

    @jax.jit
    def step(batch, control):
        return batch["weights"].sum(), control.max()

    for number in range(4):
        batch, control = put_batch(
            _rows(16, first=number), sharding=sharding, control=number
        )
        total, word = step(batch, control)
        assert float(total) == sum(range(number, number + 16))
        assert int(word) == number
    assert step._cache_size() == 1


@pytest.mark.parametrize("num_devices", [1, 8])
def test_placing_a_batch_costs_far_less_than_a_step(num_devices, full):
    """About 0.1 ms; the bound leaves room for a loaded machine."""
    sharding = batch_sharding(make_mesh(MeshConfig(num_devices=num_devices)))
    rows = _rows(32)
    times = []
    for _ in range(2000 if full else 200):
        start = time.perf_counter()
        put_batch(rows, sharding=sharding)
        times.append(time.perf_counter() - start)
    assert np.quantile(times, 0.2) < 1e-3


_WORKER = """
import json, sys
import jax
jax.distributed.initialize(
    sys.argv[1], 2, int(sys.argv[2]),
    cluster_detection_method="deactivate",
    coordinator_bind_address=sys.argv[1],
)
import numpy as np
from jaxft.config import MeshConfig
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.sharding import batch_sharding, local_rows, put_batch
me = jax.process_index()
out = {}
# By process, across processes (each holds every other row), and all rows on both.
meshes = {
    "contiguous": make_mesh(MeshConfig(fsdp=2)),
    "interleaved": make_mesh(
        devices=[jax.devices()[i] for i in (0, 2, 1, 3)]
    ),
    "shared": make_mesh(MeshConfig(data=1, tensor=4)),
}
for name, mesh in meshes.items():
    sharding = batch_sharding(mesh)
    rows = local_rows(sharding, 8)
    values = np.array(rows, np.float32)[:, None] * np.ones((1, 3), np.float32)
    batch, control = put_batch({"x": values}, sharding=sharding, control=me + 1)
    again, _ = put_batch({"x": values}, sharding=sharding, global_batch=8)
    assert again["x"].shape == batch["x"].shape == (8, 3)
    whole = jax.jit(lambda x: x + 0, out_shardings=jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()))
    out[name] = {
        "rows": rows,
        "column": np.asarray(whole(batch["x"]).addressable_data(0))[:, 1].tolist(),
        "control": np.asarray(whole(control).addressable_data(0)).tolist(),
    }
print("RESULT " + json.dumps(out), flush=True)
"""


@pytest.mark.multiprocess
def test_two_processes_put_their_own_rows(run_processes):
    results = []
    for out, err in run_processes(_WORKER, num_devices=2):
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        assert lines, err
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    first, second = results
    assert first["contiguous"]["rows"] == [0, 1, 2, 3]
    assert second["contiguous"]["rows"] == [4, 5, 6, 7]
    assert first["interleaved"]["rows"] == [0, 1, 4, 5]
    assert second["interleaved"]["rows"] == [2, 3, 6, 7]
    assert first["shared"]["rows"] == second["shared"]["rows"] == list(range(8))
    for result in results:
        for name, seen in result.items():
            assert seen["column"] == list(range(8)), name
        assert result["contiguous"]["control"] == [1, 1, 2, 2]
        assert result["interleaved"]["control"] == [1, 2, 1, 2]
