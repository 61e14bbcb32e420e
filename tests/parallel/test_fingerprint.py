"""Fingerprints on the devices: equal to those in NumPy wherever an array lies."""

import json
import re
import threading
import time

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxft.fingerprints import ArrayDigester, combine, digest_array
from jaxft.parallel import fingerprint
from jaxft.parallel.fingerprint import start_digests
from jaxft.parallel.partial_sums import block_sums, partial_sums

pytestmark = pytest.mark.device

P = PartitionSpec
DTYPES = [
    "bool",
    "int2",
    "uint2",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
# One of each way to words and to nan; the others are slow.
SOME_DTYPES = [
    "bool",
    "int2",
    "uint4",
    "int8",
    "int64",
    "float4_e2m1fn",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SPECS = [P(), P("d"), P(None, "f"), P("d", "f"), P(("d", "f")), P("f", "d")]


def _mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("d", "f"), axis_types=(kind,) * 2)


def _random(shape, dtype, seed=0):
    """Random bits: nan, infinities and both zeros among them."""
    dtype = np.dtype(dtype)
    data = np.random.default_rng(seed).integers(
        0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8
    )
    if dtype == np.bool_:
        data &= 1
    elif str(dtype) in ("int2", "uint2"):
        data &= 3
    elif str(dtype) in ("int4", "uint4", "float4_e2m1fn"):
        data &= 15
    return data.view(dtype).reshape(shape)


def _put(array, sharding):
    with jax.enable_x64(True):
        return jax.device_put(array, sharding)


def _digest(array):
    return start_digests({"leaf": array}).result()["leaf"]


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_each_dtype_is_as_in_numpy(dtype):
    array = _random((8, 16), dtype)
    places = [jax.devices()[3]]
    if dtype in ("uint4", "bfloat16", "complex128"):
        places.append(NamedSharding(_mesh(), P("f", "d")))
    for place in places:
        assert _digest(_put(array, place)) == digest_array(array)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_as_in_numpy_under_each_sharding(dtype, spec, kind):
    array = _random((8, 16, 3), dtype)
    placed = _put(array, NamedSharding(_mesh(kind), spec))
    assert _digest(placed) == digest_array(array)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_sum_over_the_parts_of_each_sharding_is_the_whole(spec):
    array = _random((8, 16), "float32")
    placed = _put(array, NamedSharding(_mesh(AxisType.Explicit), spec))
    pending = start_digests({"leaf": placed})
    assert pending.result() == {"leaf": digest_array(array)}
    parts = []
    for shard in placed.addressable_shards:
        if shard.replica_id == 0:
            digester = ArrayDigester(array.shape, array.dtype)
            first = [part.start or 0 for part in shard.index]
            digester.add(np.asarray(shard.data), offsets=first)
            parts.append(digester.partial())
    assert sorted(pending.partials()["leaf"]) == sorted(parts)
    assert combine(parts) == digest_array(array)


@pytest.mark.parametrize("shape", [(), (0, 8), (1,), (5, 1, 3)], ids=str)
def test_scalars_and_empty_and_odd_shapes(shape):
    array = _random(shape, "float32")
    mesh = NamedSharding(_mesh(), P())
    for placed in (jnp.asarray(array), _put(array, mesh)):
        assert _digest(placed) == digest_array(array)


def test_a_dim_of_no_elements_may_be_split():
    placed = _put(np.zeros((0, 8), np.float32), NamedSharding(_mesh(), P(None, "f")))
    assert str(_digest(placed).fingerprint) == "0" * 16


def test_weak_and_uncommitted_values_are_what_they_hold():
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    assert not weak.committed
    strong = jnp.ones((), jnp.float32)
    leaves = {"weak": weak, "strong": strong * 1.5}
    digests = start_digests(leaves).result()
    assert set(digests.values()) == {digest_array(np.float32(1.5))}


@pytest.mark.parametrize("place", [P(), P("f")], ids=str)
def test_typed_keys_are_their_data(place):
    keys = jax.random.split(jax.random.key(1), 8)
    want = digest_array(np.asarray(jax.random.key_data(keys)))
    placed = jax.device_put(keys, NamedSharding(_mesh(), place))
    assert _digest(keys) == _digest(placed) == want
    key = jax.random.key(2)
    assert _digest(key) == digest_array(np.asarray(jax.random.key_data(key)))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_arrays_in_host_memory(kind):
    array = _random((8, 16), "float32")
    one = SingleDeviceSharding(jax.devices()[1], memory_kind=kind)
    eight = NamedSharding(_mesh(), P("f"), memory_kind=kind)
    for sharding in (one, eight):
        placed = _put(array, sharding)
        assert placed.sharding.memory_kind == kind
        assert _digest(placed) == digest_array(array)


@pytest.mark.parametrize("replicated", [False, True])
def test_a_sharding_without_a_mesh(replicated):
    array = _random((8, 16), "float32")
    named = NamedSharding(_mesh(), P() if replicated else P(None, "d"))
    # What a jitted function returns whose outputs fit no mesh; no public name.
    from jax._src.sharding_impls import GSPMDSharding  # noqa: TID251

    sharding = GSPMDSharding(
        tuple(named.mesh.devices.flat), named._to_xla_hlo_sharding(2)
    )
    placed = jax.device_put(array, sharding)
    assert not isinstance(placed.sharding, NamedSharding)
    pending = start_digests({"leaf": placed})
    assert pending.result() == {"leaf": digest_array(array)}
    assert len(pending.partials()["leaf"]) == (1 if replicated else 2)


def test_the_mesh_of_the_caller_does_not_matter():
    array = _random((8, 16), "float32")
    leaves = {
        "auto": _put(array, NamedSharding(_mesh(), P("d"))),
        "explicit": _put(array, NamedSharding(_mesh(AxisType.Explicit), P("d"))),
        "alone": _put(array, jax.devices()[5]),
    }
    want = dict.fromkeys(leaves, digest_array(array))
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(kind,))):
            assert start_digests(leaves).result() == want


def test_values_that_are_neither_finite_are_counted_by_element():
    values = [1.0, np.nan, np.inf, -np.inf, -np.nan, 0.0, 3e38, 1e-40]
    leaves = {
        "float": np.array(values, np.float32),
        "bfloat": np.array(values[:7], ml_dtypes.bfloat16),
        "complex": np.array([complex(np.nan, np.inf), 1, complex(0, np.nan)]),
        "int": np.arange(8),
    }
    with jax.enable_x64(True):
        placed = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    digests = start_digests(placed).result()
    found = {name: digest.num_nonfinite for name, digest in digests.items()}
    assert found == {"float": 4, "bfloat": 4, "complex": 2, "int": 0}


# --- groups -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num_leaves", "num_groups"),
    [((16, 128), 70, 2), ((1024, 64), 16, 2)],
    ids=["stacked", "apart"],
)
def test_equal_leaves_share_programs_and_keep_their_names(
    shape, num_leaves, num_groups
):
    leaves = {
        str(number): jnp.full(shape, number, jnp.float32)
        for number in range(num_leaves)
    }
    pending = start_digests(leaves)
    assert len(pending._groups) == num_groups
    want = {name: digest_array(np.asarray(leaf)) for name, leaf in leaves.items()}
    digests = pending.result()
    assert digests == want
    assert list(digests) == list(leaves)


def test_digests_are_given_for_the_names_asked_in_their_order():
    leaves = {name: jnp.arange(size) for size, name in enumerate("abc", 1)}
    pending = start_digests(leaves)
    want = {name: digest_array(np.asarray(leaf)) for name, leaf in leaves.items()}
    some = pending.result(["c", "a"])
    assert list(some.items()) == [("c", want["c"]), ("a", want["a"])]
    assert pending.result([]) == {}
    assert pending.result() == want
    with pytest.raises(KeyError, match="unknown"):
        pending.result(["unknown"])
    assert start_digests({}).result() == {}


def test_leaves_may_be_donated_at_once():
    array = _random((256, 1024), "float32")
    leaf = _put(array, NamedSharding(_mesh(), P("d")))
    pending = start_digests({"leaf": leaf})
    jax.jit(lambda x: x * 0, donate_argnums=0)(leaf).block_until_ready()
    assert leaf.is_deleted()
    assert pending.result() == {"leaf": digest_array(array)}


def test_nothing_is_moved_to_the_devices_or_read_by_the_way():
    leaf = _put(_random((8, 16), "float32"), NamedSharding(_mesh(), P("d")))
    key = jax.random.key(0)
    with jax.transfer_guard("disallow"):
        start_digests({"leaf": leaf, "key": key}).result()


def test_a_program_has_no_collective():
    for spec in SPECS[::2]:
        leaf = _put(_random((8, 16), "float32"), NamedSharding(_mesh(), spec))
        ((kind, part),) = fingerprint._parts(leaf)
        text = fingerprint._program(kind).lower([part]).compile().as_text()
        assert "reduce" in text
        assert not re.findall(r"all-\w+|collective-\w+|reduce-scatter", text)


def test_replicas_that_differ_are_named():
    sharding = NamedSharding(_mesh(), P("d"))
    array = _random((8, 16), "float32")
    shards = [
        jax.device_put(array[index], device)
        for device, index in sharding.devices_indices_map(array.shape).items()
    ]
    good = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    shards[6] = shards[6].at[1, 2].add(1)
    bad = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    pending = start_digests({"good": good, "bad": bad, "whole": jnp.arange(3)})
    assert pending.differing_replicas() == ["bad"]


# --- large arrays -------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ((3 << 20, 1 << 20), (5000, 77)),
        ((3 << 20, 1 << 20), (4094, (1 << 20) - 6)),
        ((7, 1 << 31, 16), (2, (1 << 31) - 6, 10)),
        ((1 << 35,), ((1 << 33) - 3,)),
    ],
    ids=["above", "across", "three dims", "one dim"],
)
def test_indices_have_64_bits(shape, offsets):
    part = _random((4, 6, 5)[: len(shape)], "float64")
    digester = ArrayDigester(shape, part.dtype)
    digester.add(part, offsets=offsets)
    base = 0
    for offset, dim in zip(offsets, shape, strict=True):
        base = base * dim + offset
    with jax.enable_x64(True):
        sums = jax.jit(lambda x, base: partial_sums(x, base=base, shape=shape))(
            [part[None]], np.uint64(base)
        )
    assert tuple(sums[0].tolist()) == digester.partial()


def test_programs_are_compiled_ahead_by_another_thread():
    sharding = NamedSharding(_mesh(), P("d"))
    with jax.enable_x64(True):
        wide = jnp.arange(13)
    leaves = {
        "wide": wide,
        "key": jax.random.key(0),
        "weak": jnp.asarray(1.5),
        "many": jax.device_put(np.ones((6, 11), np.float32), sharding),
        "more": jax.device_put(np.ones((6, 11), np.float32), sharding),
        "alone": jax.device_put(np.ones(17, np.float32), jax.devices()[2]),
    }
    fingerprint._program.cache_clear()
    thread = threading.Thread(target=fingerprint.prepare(leaves))
    thread.start()
    thread.join()
    compiled = []

    def listen(name, duration_secs, **facts):
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        pending = start_digests(leaves)
        assert not [name for name in compiled if "backend_compile" in name]
        jax.jit(lambda x: x + 1)(leaves["alone"])  # what a compilation looks like
        assert [name for name in compiled if "backend_compile" in name]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert pending.result()["wide"] == digest_array(np.arange(13))


@pytest.mark.parametrize(
    ("shape", "num_elements"),
    [((64, 48), 512), ((67, 5), 50), ((3, 1, 7, 40), 90), ((100,), 16), ((1, 9), 1)],
    ids=str,
)
def test_blocks_in_a_loop_are_the_whole(shape, num_elements):
    arrays = [_random(shape, "float32", seed) for seed in range(2)]
    alone = [array[None] for array in arrays]
    for some, stacks in ((arrays, [jnp.stack(arrays)]), (arrays, alone)):
        sums = jax.jit(
            lambda x: block_sums(
                x, base=np.uint32(0), shape=shape, num_elements=num_elements
            )
        )(stacks)
        assert [combine([row]) for row in sums.tolist()] == list(
            map(digest_array, some)
        )


def test_blocks_of_a_part_of_a_large_array_are_that_part():
    shape, offsets = (3 << 20, 1 << 20), (4090, (1 << 20) - 9)
    part = _random((12, 9), "float32")
    digester = ArrayDigester(shape, part.dtype)
    digester.add(part, offsets=offsets)
    base = np.uint64(offsets[0] * shape[1] + offsets[1])
    with jax.enable_x64(True):
        sums = jax.jit(
            lambda x: block_sums(x, base=base, shape=shape, num_elements=20)
        )([part[None]])
    assert tuple(sums[0].tolist()) == digester.partial()


def test_starting_thousands_of_leaves_is_quick():
    leaves = {
        str(number): jnp.full((16, 128), number, jnp.float32) for number in range(1984)
    }
    start_digests(leaves).result()  # compiles
    times_secs = []
    for _ in range(3):
        start = time.perf_counter()
        pending = start_digests(leaves)
        times_secs.append(time.perf_counter() - start)
        pending.result()
    assert min(times_secs) < 0.3


# --- processes ----------------------------------------------------------------

PROGRAM = """
import json, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxft.parallel.fingerprint import start_digests
mesh = jax.make_mesh((2, 2), ("d", "f"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
array = np.arange(128, dtype=np.float32).reshape(8, 16)
array[0, 0] = np.nan
specs = {"rows": P("d"), "columns": P(None, "f"), "both": P("f", "d"), "all": P()}
leaves = {
    name: jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )
    for name, spec in specs.items()
}
leaves["own"] = jax.device_put(array, jax.local_devices()[1])
if sys.argv[2] == "1":
    time.sleep(2)
start = time.monotonic()
pending = start_digests(leaves)
partials = pending.partials()
secs = time.monotonic() - start
refused = []
for name in leaves:
    try:
        pending.result([name])
    except ValueError as error:
        refused.append(str(error))
print("RESULT", json.dumps([secs, partials, refused]))
"""


@pytest.mark.slow
def test_each_process_gives_its_own_parts_and_waits_for_nobody(run_processes):
    ends = run_processes(PROGRAM, num_devices=2)
    results = [json.loads(out.split("RESULT ", 1)[1]) for out, _ in ends]
    array = np.arange(128, dtype=np.float32).reshape(8, 16)
    array[0, 0] = np.nan
    shared = ["rows", "columns", "both", "all"]
    for secs, partials, refused in results:
        assert secs < 2
        assert combine(partials["own"]) == digest_array(array)
        assert refused == [
            f"other processes hold parts of leaf {name}: combine `partials`"
            for name in shared
        ]
    for name in shared:
        parts = [part for _, partials, _ in results for part in partials[name]]
        assert combine(parts) == digest_array(array)
