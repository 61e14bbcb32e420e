"""Any checkpoint, whole or in part, under any names, into any placement."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import (
    decisions,
    foreign,
    layout,
    leaf_requests,
    manager,
    manifest,
)

pytestmark = pytest.mark.device
ROOT = pathlib.Path(__file__).parents[3]


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))


def _structs(tree, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def _mesh(*shape):
    return jax.make_mesh(
        shape, ("x", "y")[: len(shape)], (jax.sharding.AxisType.Auto,) * len(shape)
    )


def test_to_numpy_without_knowing_the_tree(stored, same):
    path, state, _ = stored
    events = Events()
    loaded = foreign.load(path, emit=events)
    tree = loaded.tree
    assert same(tree["params"], jax.tree.map(np.asarray, state["params"]))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(tree["params"]))
    assert tree["opt"]["1"]["count"] == 7
    assert same(tree["opt"]["0"], jax.tree.map(np.asarray, state["opt"][0]))
    assert loaded.num_bytes == sum(x.nbytes for x in jax.tree.leaves(state))
    ((kind, fields),) = events
    assert kind == "load"
    assert fields["num_leaves"] == len(jax.tree.leaves(state))


def test_into_a_target_as_fresh_ones_are(stored, same):
    path, state, _ = stored
    mesh = _mesh(4, 2)
    split = jax.sharding.NamedSharding(mesh, jax.P("x"))
    target = _structs(state)
    target["params"] = _structs(state["params"], split)
    loaded = foreign.load(path, target)
    assert same(loaded.tree, state)
    for leaf in jax.tree.leaves(loaded.tree["params"]):
        assert leaf.sharding == split
    assert (loaded.missing, loaded.unexpected, loaded.cast) == ((), (), {})


@pytest.mark.parametrize("memory_bytes", [1, 150, 2**20])
def test_shards_fill_from_parts_of_any_size(stored, same, memory_bytes):
    path, state, _ = stored
    mesh = _mesh(2, 4)
    specs = {"kernel": jax.P("y", "x"), "bias": jax.P("y")}
    target = {
        name: {
            part: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=jax.sharding.NamedSharding(mesh, specs[part]),
            )
            for part, leaf in layer.items()
        }
        for name, layer in state["params"].items()
    }
    loaded = foreign.load(
        path,
        target,
        paths="params/**",
        rename={"params": ""},
        memory_bytes=memory_bytes,
    )
    assert same(loaded.tree, state["params"])
    kernel = loaded.tree["Dense_0"]["kernel"]
    assert kernel.sharding.spec == jax.P("y", "x")
    assert kernel.addressable_shards[0].data.shape == (2, 8)


def test_a_part_reads_nothing_else(state, save, same, remove_others):
    for way in ("files-zarr2", "files-zarr3"):
        path = save(state, way=way, name=way)
        assert remove_others(path, "params.Dense_0")
        loaded = foreign.load(path, paths="params/Dense_0/**")
        assert same(
            loaded.tree["params"]["Dense_0"],
            jax.tree.map(np.asarray, state["params"]["Dense_0"]),
        )
        with pytest.raises(records.FaultError, match="Dense_1"):
            foreign.load(path, paths="params/**")


_COUNT = """
import sys
from jaxft.checkpoint import foreign_source
def count():
    lines = open("/proc/self/io").read().split()
    return int(lines[lines.index("rchar:") + 1])
start = count()
source = foreign_source.ForeignSource(sys.argv[1])
assert source.read("small").tobytes() == bytes(range(200)) * 4
print(count() - start)
assert "jax" not in sys.modules
"""


@pytest.mark.parametrize("way", ["ocdbt-zarr3", "v0-manager", "ours"])
def test_a_part_of_a_database_reads_few_bytes_and_needs_no_device(save, way):
    large = np.random.default_rng(0).integers(0, 2**31, 2**21, np.int32)
    small = np.frombuffer(bytes(range(200)) * 4, np.uint8)
    path = save({"large": jnp.asarray(large), "small": jnp.asarray(small)}, way=way)
    result = subprocess.run(
        [sys.executable, "-c", _COUNT, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert 800 < int(result.stdout) < large.nbytes / 10


def test_linen_names_become_nnx_names(stored, same):
    path, state, _ = stored
    rename = {
        "params/Dense_0/*": "layers/0/*/value",
        "params/Dense_1/*": "layers/1/*/value",
    }
    layer = {"kernel": {"value": 0}, "bias": {"value": 0}}
    params = state["params"]
    target = {"layers": {0: dict(layer), 1: dict(layer)}}
    for number, name in enumerate(("Dense_0", "Dense_1")):
        target["layers"][number] = {
            part: {"value": jnp.zeros_like(leaf)} for part, leaf in params[name].items()
        }
    loaded = foreign.load(path, target, paths="params/**", rename=rename)
    for number, name in enumerate(("Dense_0", "Dense_1")):
        for part, leaf in params[name].items():
            assert same(loaded.tree["layers"][number][part]["value"], leaf)
    tree = foreign.load(path, paths="params/**", rename=rename).tree
    assert same(
        tree["layers"]["1"]["bias"]["value"], np.asarray(params["Dense_1"]["bias"])
    )


@pytest.mark.slow
def test_nnx_names_become_linen_names(save, same):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs)])

    net = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    path = save({"params": nnx.to_pure_dict(net)})
    first = nnx.to_pure_dict(net)["first"]
    second = nnx.to_pure_dict(net)["layers"][0]
    loaded = foreign.load(
        path,
        {"params": {"Dense_0": first, "Dense_1": second}},
        rename={"params/first": "params/Dense_0", "params/layers/0": "params/Dense_1"},
    )
    assert same(loaded.tree["params"]["Dense_0"], first)
    assert same(loaded.tree["params"]["Dense_1"], second)


def test_optional_paths_keep_the_targets_values(stored, same):
    path, state, _ = stored
    ema = jax.tree.map(lambda x: x + 1, state["params"])
    with pytest.raises(leaf_requests.TargetMismatchError) as info:
        foreign.load(path, state | {"ema": ema})
    assert len(info.value.problems) == 4
    assert "ema/Dense_0/bias: not in the checkpoint, and not optional" in str(
        info.value
    )
    loaded = foreign.load(path, state | {"ema": ema}, optional="ema/**")
    assert same(loaded.tree, state | {"ema": ema})
    assert len(loaded.missing) == 4
    with pytest.raises(leaf_requests.TargetMismatchError, match="has no value to keep"):
        foreign.load(path, state | {"ema": _structs(ema)}, optional="ema/**")


def test_everything_that_does_not_fit_is_listed_at_once(stored):
    path, state, _ = stored
    target = {"params": {**state["params"], "Dense_2": {"bias": jnp.zeros(3)}}}
    target["params"]["Dense_0"] = {
        "kernel": jnp.zeros((8, 15)),
        "bias": jnp.zeros(16, jnp.bfloat16),
    }
    with pytest.raises(leaf_requests.TargetMismatchError) as info:
        foreign.load(path, target)
    text = str(info.value)
    assert "params/Dense_2/bias: not in the checkpoint" in text
    assert "opt/1/count: not in the target" in text
    assert "params/Dense_0/kernel: stored array float32[8,16]" in text
    assert "params/Dense_0/bias: stored array float32[16], wanted bfloat16" in text
    assert text.count("Dense_0/bias") == 2  # once below opt


def test_not_strict_lists_what_was_left_out(stored, same):
    path, state, _ = stored
    extra = {"bias": jnp.ones(3)}
    target = {"params": {"Dense_0": state["params"]["Dense_0"], "extra": extra}}
    zeros = jax.tree.map(jnp.zeros_like, target)
    zeros["params"]["extra"] = extra
    loaded = foreign.load(path, zeros, strict=False)
    assert same(loaded.tree, target)
    assert loaded.missing == ("params/extra/bias",)
    assert "params/Dense_1/kernel" in loaded.unexpected
    assert len(loaded.unexpected) == 8


def test_casts_only_where_allowed_and_told(stored, same):
    path, state, _ = stored
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"])
    wanted = {"params": _structs(target)}
    with pytest.raises(
        leaf_requests.TargetMismatchError, match="allow the cast by name"
    ):
        foreign.load(path, wanted, paths="params/**", allow_cast="params/Dense_1/**")
    events = Events()
    loaded = foreign.load(
        path, wanted, paths="params/**", allow_cast="params/**", emit=events
    )
    assert same(loaded.tree, {"params": target})
    assert loaded.cast["params/Dense_0/bias"] == ("float32", "bfloat16")
    assert len(events[0][1]["cast"]) == 4


@pytest.mark.parametrize(
    ("stored_value", "wanted", "reason"),
    [
        (np.float32(1.5), np.int32(0), "another kind"),
        (np.arange(300, dtype=np.int32), np.zeros(300, np.int8), "cannot hold"),
        (np.int32([-1]), np.zeros(1, np.uint32), "cannot hold"),
        (np.array([True]), np.zeros(1, np.int32), "another kind"),
    ],
    ids=["float-int", "narrow", "sign", "bool"],
)
def test_a_cast_that_changes_a_number_is_refused(save, stored_value, wanted, reason):
    path = save({"a": jnp.asarray(stored_value)})
    with pytest.raises(leaf_requests.TargetMismatchError, match=reason):
        foreign.load(path, {"a": jnp.asarray(wanted)}, allow_cast="**")


@pytest.mark.parametrize("way", ["ours", "ocdbt-zarr2", "files-zarr3", "v1"])
def test_keys_numbers_and_text_come_back_as_the_target_wants(save, same, way):
    state = {
        "key": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "num": 3,
        "rate": 0.25,
        "name": "run",
        "half": jnp.arange(6, dtype=jnp.bfloat16),
    }
    path = save(state, way=way)
    tree = foreign.load(path).tree
    assert same(tree["key"], np.asarray(jax.random.key_data(state["key"])))
    assert (tree["num"], tree["rate"], tree["name"]) == (3, 0.25, "run")
    assert [type(tree[k]) for k in ("num", "rate", "name")] == [int, float, str]
    loaded = foreign.load(path, {**state, "num": 0, "rate": 0.0, "name": ""}).tree
    assert loaded["key"].dtype == state["key"].dtype
    assert same(jax.random.key_data(loaded["key"]), jax.random.key_data(state["key"]))
    assert (loaded["num"], loaded["rate"], loaded["name"]) == (3, 0.25, "run")
    # A Python number is an array of 64 bits to those who want an array.
    target = {"num": jnp.int32(0)}
    loaded = foreign.load(path, target, paths="num", allow_cast="num")
    assert same(loaded.tree, {"num": jnp.int32(3)})
    assert loaded.cast == {"num": ("int64", "int32")}


def test_dtypes_that_are_stored_as_others_come_back(save, same):
    state = {
        "u4": jnp.arange(6).astype(jnp.uint4),
        "f8": jnp.arange(6).astype(jnp.float8_e4m3),
        "i4": jnp.arange(-3, 3).astype(jnp.int4),
        "none": jnp.zeros((0, 3), jnp.float32),
        "weak": jnp.asarray(0.5),
        "complex": jnp.asarray([1j, 2, 3], jnp.complex64),
        "scalar": np.float64(0.1),
    }
    path = save(state, way="ours")
    loaded = foreign.load(path, state)
    assert same(loaded.tree, state)
    assert loaded.tree["weak"].weak_type
    tree = foreign.load(path).tree
    assert {name: str(leaf.dtype) for name, leaf in tree.items()} == {
        name: str(leaf.dtype) for name, leaf in state.items()
    }


def test_a_typo_is_an_error_that_names_the_path(stored, tmp_path):
    path, state, _ = stored
    for wrong in (tmp_path / "typo", f"{path}/typo"):
        with pytest.raises(records.FaultError, match="typo does not exist") as info:
            foreign.load(wrong, state)
        assert info.value.fault.kind is records.FaultKind.CONFIG
    with pytest.raises(records.FaultError, match="nothing to load"):
        foreign.load(tmp_path, state)
    with pytest.raises(records.FaultError, match=r"no leaf of .* fits 'weights"):
        foreign.load(path, paths="weights/**")
    with pytest.raises(records.FaultError, match=r"no stored leaf fits .*'weights'"):
        foreign.load(path, rename={"weights": "params"})
    with pytest.raises(records.FaultError, match="no local folder"):
        foreign.load("s3://bucket/run")


def test_of_a_root_the_newest_step_and_of_several_items_none(tmp_path, save, state):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "root") as theirs:
        for step in (9, 10):
            theirs.save(step, args=ocp.args.StandardSave({"a": jnp.int32(step)}))
    assert foreign.load(tmp_path / "root").tree["a"] == 10
    assert foreign.load(tmp_path / "root" / "9").tree["a"] == 9
    names = ("first", "second")
    with ocp.CheckpointManager(tmp_path / "many", item_names=names) as theirs:
        item = ocp.args.StandardSave({"a": jnp.int32(1)})
        theirs.save(1, args=ocp.args.Composite(first=item, second=item))
    with pytest.raises(records.FaultError, match="several items: first, second"):
        foreign.load(tmp_path / "many")
    assert foreign.load(tmp_path / "many" / "1" / "second").tree["a"] == 1


def test_of_a_root_of_ours_what_a_run_would_resume_from(tmp_path, save):
    root = tmp_path / "run" / "checkpoints"
    with manager.CheckpointManager(root, health="a") as ours:
        for step in (10, 20, 30):
            ours.save(step, {"a": jnp.float32(step)}, force=True)
    for path in (root, tmp_path / "run"):
        assert foreign.load(path).tree["a"] == 30
    decisions.roll_back(root, to=20, reason="test")
    # As a kill between the decision and the rename leaves it.
    (root / "30.abandoned-t0").rename(root / "30")
    for path in (root, tmp_path / "run"):
        assert foreign.load(path).tree["a"] == 20
    proven = manifest.read(root / "20")
    file = root / "20" / "manifest" / "metadata"
    changed = dataclasses.replace(proven, healthy=False, unhealthy=("a",))
    _overwrite(file, manifest.encode(changed))
    assert foreign.load(root).tree["a"] == 10
    assert foreign.load(root / "20").tree["a"] == 20  # It was asked for by name.
    layout.quarantine(str(root / "10"))
    with pytest.raises(records.FaultError, match="no step left") as info:
        foreign.load(tmp_path / "run")
    assert info.value.fault.kind is records.FaultKind.CONFIG


def _overwrite(file: pathlib.Path, data: bytes) -> None:
    file.unlink()  # it is read-only
    file.write_bytes(data)


def test_a_damaged_leaf_is_named_and_the_others_load(state, save):
    path = save(state, way="ours")
    (file,) = path.glob("state/params.Dense_0.kernel/c/0/0")
    data = bytearray(file.read_bytes())
    data[5] ^= 16
    _overwrite(file, data)
    for options in ({}, {"memory_bytes": 1}):
        with pytest.raises(records.FaultError, match=r"Dense_0\.kernel") as info:
            foreign.load(path, paths="params/**", **options)
        assert info.value.fault.kind is records.FaultKind.NO_CHECKPOINT
    foreign.load(path, paths="params/Dense_1/**")


def test_a_whole_chunk_of_another_save_is_found_by_the_fingerprint(state, save):
    path = save(state, way="ours")
    other = save(
        {"params": jax.tree.map(lambda x: x + 1, state["params"])},
        way="ours",
        name="other",
    )
    chunk = "state/params.Dense_0.bias/c/0"
    _overwrite(path / chunk, (other / chunk).read_bytes())
    sharding = jax.sharding.NamedSharding(_mesh(8), jax.P("x"))
    bias = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
    for target in (None, {"params": {"Dense_0": {"bias": bias}}}):
        for memory_bytes in (8, 2**20):
            with pytest.raises(records.FaultError, match="values have changed"):
                foreign.load(
                    path,
                    target,
                    paths="params/Dense_0/bias",
                    memory_bytes=memory_bytes,
                )


@pytest.mark.parametrize(
    "name", ["run/metadata", "state/_METADATA", "manifest/metadata"]
)
def test_notes_that_have_changed_are_no_notes(state, save, name):
    path = save(state, way="ours")
    data = (path / name).read_bytes()
    for old, new in ((b"Dense_0", b"Dense_5"), (b"[16]", b"[61]")):
        if old in data:
            _overwrite(path / name, data.replace(old, new))
    with pytest.raises(records.FaultError, match="cannot be loaded") as info:
        foreign.load(path)
    assert info.value.fault.kind is records.FaultKind.NO_CHECKPOINT


@pytest.mark.slow
def test_nnx_states_are_targets_as_they_are(save, same):
    from flax import nnx

    state = nnx.state(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    for way in ("v0-manager", "ours"):
        loaded = foreign.load(save(state, way=way, name=way), state)
        assert type(loaded.tree) is type(state)
        assert same(loaded.tree, state)


def test_init_takes_parameters_alone(stored, same):
    path, state, _ = stored
    fresh = jax.tree.map(jnp.zeros_like, state["params"])
    loaded = foreign.init_params(path, _structs(fresh))
    assert same(loaded.tree, state["params"])
    assert loaded.num_bytes == sum(x.nbytes for x in jax.tree.leaves(fresh))
    moved = {"body": fresh["Dense_0"], "head": fresh["Dense_1"]}
    loaded = foreign.init_params(
        path,
        moved,
        paths="params/Dense_0/**",
        rename={"params/Dense_0": "body"},
        optional="head/**",
    )
    assert same(
        loaded.tree, {"body": state["params"]["Dense_0"], "head": moved["head"]}
    )


def test_init_from_bare_parameters(save, state, same):
    path = save(state["params"])
    loaded = foreign.init_params(path, _structs(state["params"]))
    assert same(loaded.tree, state["params"])
