"""Every kind of leaf, through a real save and restore."""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import struct
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxft.checkpoint import layout, leaf_requests, leaves, manager

pytestmark = pytest.mark.device

Point = collections.namedtuple("Point", ["x", "y"])
Nothing = collections.namedtuple("Nothing", [])

DTYPES = [
    *("bool", "int4", "uint4", "int2", "uint2", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
]
IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


class Node(struct.PyTreeNode):
    a: jax.Array
    b: tuple


def _bits(dtype, shape, seed=0):
    """An array of random bits: negative values, NaN and infinities among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
        every = np.arange(16 if "4" in dtype.name else 4, dtype=np.uint8)
        every = every.astype(ml_dtypes.uint4 if "4" in dtype.name else ml_dtypes.uint2)
        return rng.choice(every, shape).view(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape).copy()


def _raw(leaf):
    if isinstance(leaf, jax.Array) and leaves.is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(saved),
        jax.tree.leaves(restored),
        strict=True,
    )
    for (path, a), b in pairs:
        assert type(a) is type(b), path
        if isinstance(a, jax.Array | np.ndarray | np.generic):
            assert a.dtype == b.dtype, path
            assert a.shape == b.shape, path
            assert _raw(a) == _raw(b), path
        else:
            assert a == b, path
        if isinstance(a, jax.Array):
            assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
            assert a.committed == b.committed, path
            if a.committed:
                assert a.sharding == b.sharding, path


def _trip(root, state, target=None):
    # Of bits that are no numbers as well.
    with manager.CheckpointManager(root, health="") as checkpoints:
        assert checkpoints.save(1, state)
        checkpoints.wait()
        return checkpoints.restore(state if target is None else target).state


def test_every_dtype_keeps_its_bits(tmp_path):
    host = {name: _bits(name, (3, 5), seed) for seed, name in enumerate(DTYPES)}
    state = {
        "jax": {name: jnp.asarray(value) for name, value in host.items()},
        "numpy": host | {n: _bits(n, (2,)) for n in ("float64", "int64", "complex128")},
        "scalar": {name: value[0, 0] for name, value in host.items()},
        "zero_dim": {name: jnp.asarray(value[0, 0]) for name, value in host.items()},
        "none": {name: jnp.zeros((3, 0), name) for name in DTYPES},
        "numpy_none": {name: np.zeros((0,), name) for name in DTYPES},
    }
    assert_same(_trip(tmp_path, state), state)


@pytest.mark.parametrize("shape", [(), (8,), (8, 2)])
def test_typed_keys_keep_implementation_and_stream(tmp_path, shape):
    mesh = jax.make_mesh((8,), ("data",))
    spec = PartitionSpec("data") if shape else PartitionSpec()
    state = {"legacy": jax.random.PRNGKey(3)}
    for impl in IMPLS:
        keys = jax.random.key(7, impl=impl)
        keys = jax.random.split(keys, shape) if shape else keys
        state[impl] = keys
        state[f"{impl}_sharded"] = jax.device_put(keys, NamedSharding(mesh, spec))
    restored = _trip(tmp_path, state)
    assert_same(restored, state)
    for impl in IMPLS:
        key = restored[impl].reshape(-1)[0] if shape else restored[impl]
        other = state[impl].reshape(-1)[0] if shape else state[impl]
        assert jax.random.bits(key) == jax.random.bits(other)


def test_a_known_tree_is_encoded_as_a_new_one(monkeypatch):
    state = {
        "z": {"b": jnp.ones(3, jnp.bfloat16), "a": [jnp.arange(4), None]},
        "key": jax.random.key(1),
        "weak": jnp.asarray(2.0),
        "opt": optax.adam(1e-3).init({"w": jnp.zeros((2, 3))}),
        "last": (jnp.zeros((), bool),),
    }
    known = leaves.encode(state), leaves.encode(state)
    assert leaves._known_plan(*jax.tree.flatten(state)) is not None
    monkeypatch.setattr(leaves, "_known_plan", lambda *_: None)
    stored, types = leaves.encode(state)
    for other_stored, other_types in known:
        assert other_types == types
        assert jax.tree.structure(other_stored) == jax.tree.structure(stored)
        pairs = zip(jax.tree.leaves(other_stored), jax.tree.leaves(stored), strict=True)
        assert all(one is other for one, other in pairs)


@pytest.mark.parametrize(
    "leaf", [1, jnp.zeros((0, 2)), jnp.ones(2, jnp.uint4), np.ones(2), "text"]
)
def test_a_tree_with_a_leaf_to_look_at_is_never_known(leaf):
    state = {"a": jnp.ones(2), "b": leaf}
    assert leaves._known_plan(*jax.tree.flatten(state)) is None


def test_a_deleted_leaf_of_a_known_tree_is_seen():
    state = {"a": jnp.ones(2)}
    leaves.encode(state)
    state["a"].delete()
    with pytest.raises(layout.LeafError, match="deleted"):
        leaves.encode(state)


def test_python_values_and_containers_come_back(tmp_path):
    state = {
        "values": [
            None,
            5,
            -(2**63),
            1.5,
            float("-inf"),
            True,
            False,
            "",
            "h\u00e9 \n~/",
        ],
        "empty": {"a": {}, "b": [], "c": (), "d": Nothing(), "e": [{}, None, ((),)]},
        "point": Point(x=np.float32(2), y=np.bool_(True)),
        "node": Node(a=jnp.ones(2), b=(1, (jnp.zeros(()),))),
        "ints": {3: jnp.ones(1), 10: {0: 4}},
        "slash": {"linear/w": jnp.ones(2)},
        "weak": [jnp.asarray(3), jnp.asarray(0.1), jnp.asarray(1j)],
        "strong": jnp.float32(0.1),
    }
    assert_same(_trip(tmp_path, state), state)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.multi_transform(
            {"x": optax.adam(1e-3), "y": optax.identity()}, {"w": "x", "b": "y"}
        ),
    ],
    ids=["adamw", "chain", "masked", "multi_steps", "inject", "multi_transform"],
)
def test_optimizer_states_come_back(tmp_path, tx):
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.zeros(2)}
    state = {"params": params, "opt": tx.init(params)}
    assert_same(_trip(tmp_path, state), state)


def test_all_kinds_of_one_random_tree(tmp_path, full):
    for seed in range(20 if full else 3):
        rng = np.random.default_rng(seed)
        state = {"root": _random_tree(rng, depth=4), "x": 1}
        assert_same(_trip(tmp_path / str(seed), state), state)


def _random_tree(rng, *, depth):
    kind = rng.integers(0, 10 if depth else 6)
    seed = int(rng.integers(1 << 30))
    shape = tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 4)))
    if kind == 0:
        return jnp.asarray(_bits(DTYPES[seed % len(DTYPES)], shape, seed))
    if kind == 1:
        return _bits(DTYPES[seed % len(DTYPES)], shape, seed)
    if kind == 2:
        return [None, seed, seed / 7, bool(seed % 2), f"s{seed}"][seed % 5]
    if kind == 3:
        return jax.random.key(seed, impl=IMPLS[seed % 3])
    if kind in (4, 5):
        return [{}, [], (), Nothing(), optax.EmptyState()][seed % 5]
    below = [_random_tree(rng, depth=depth - 1) for _ in range(rng.integers(0, 4))]
    if kind == 6:
        return {f"k{i}": leaf for i, leaf in enumerate(below)}
    if kind == 7:
        return dict(enumerate(below))
    return below if kind == 8 else tuple(below)


class Odd(int):
    pass


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (object(), "builtins.object"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
        (Odd(3), "Odd"),
        (2**63, "64 bits"),
        (len, "function"),
        (np.array(["text"]), "<U4"),
        (np.array([object()]), "object"),
        (np.str_("text"), "<U4"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.ma.zeros(2), "MaskedArray"),
        (jnp.full((2,), 1.0), "weakly typed"),
        (jax.random.split(jax.random.key(0), 0), "no random keys"),
        ("\ud800", "UTF-8"),
    ],
    # Not the values: an address would differ between the test processes.
    ids=range(16),
)
def test_the_rest_is_refused_with_its_path_and_nothing_is_written(
    tmp_path, leaf, reason
):
    checkpoints = manager.CheckpointManager(tmp_path / "root")
    with pytest.raises(layout.LeafError, match="a/1") as error:
        checkpoints.save(1, {"a": [0, leaf]})
    assert reason in str(error.value)
    assert not (tmp_path / "root").exists()


def test_keys_that_collide_or_do_not_fit_are_refused(tmp_path):
    checkpoints = manager.CheckpointManager(tmp_path / "root")
    one = jnp.ones(1)
    for state in (
        {"a.b": one, "a": {"b": one}},
        {"a/b": one, "a": {"b": one}},
        {"a": {1.5: one}},
        {"a": {("x",): one}},
        {"x" * 300: one},
        {"..": one},
        {"a~b": "text"},
        one,
        {},
        {"a": None},
    ):
        with pytest.raises(layout.LeafError):
            checkpoints.save(1, state)
    assert not (tmp_path / "root").exists()


def test_donated_and_traced_leaves_are_refused(tmp_path):
    checkpoints = manager.CheckpointManager(tmp_path / "root")
    donated = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    with pytest.raises(layout.LeafError, match="leaf w is deleted"):
        checkpoints.save(1, {"w": donated})
    with pytest.raises(layout.LeafError, match="leaf w is traced"):
        jax.jit(lambda x: checkpoints.save(1, {"w": x}))(jnp.ones(3))


def test_a_target_of_shapes_decides_the_placement(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    other = jax.make_mesh((2,), ("c",), devices=jax.devices()[:2])
    w = jax.device_put(
        jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("a", "b"))
    )
    saved = {"w": w, "k": jax.random.key(2), "n": np.arange(3, dtype=np.int32)}
    target = {
        "w": jax.ShapeDtypeStruct(
            (8, 8), jnp.float32, sharding=NamedSharding(other, PartitionSpec(None, "c"))
        ),
        "k": jax.eval_shape(lambda: jax.random.key(0)),
        "n": jax.ShapeDtypeStruct((3,), jnp.int32),
    }
    restored = _trip(tmp_path, saved, target)
    replicated = NamedSharding(other, PartitionSpec())
    assert restored["w"].sharding == target["w"].sharding
    assert restored["k"].sharding == replicated
    assert restored["n"].sharding == replicated
    assert _raw(restored["w"]) == _raw(w)
    assert _raw(restored["k"]) == _raw(saved["k"])
    assert np.array_equal(restored["n"], saved["n"])


def test_without_any_sharding_leaves_are_uncommitted(tmp_path):
    saved = {
        "w": jax.device_put(jnp.ones(3), SingleDeviceSharding(jax.devices()[5])),
        "k": jax.random.key(2),
    }
    restored = _trip(tmp_path, saved, jax.eval_shape(lambda: saved))
    assert not restored["w"].committed
    assert not restored["k"].committed


def test_a_mismatch_lists_every_path(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    saved = {"a": jnp.ones(3), "b": jnp.ones(4), "c": 1, "d": jnp.ones(6), "e": 1.0}
    target = {
        "a": jnp.ones(3, jnp.bfloat16),
        "b": jnp.ones(5),
        "c": jnp.int32(1),
        "d": jax.ShapeDtypeStruct(
            (6,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
        ),
        "f": jnp.ones(1),
    }
    with pytest.raises(leaf_requests.TargetMismatchError) as error:
        _trip(tmp_path, saved, target)
    problems = "\n".join(error.value.problems)
    assert "a: stored array float32[3], wanted array bfloat16[3]" in problems
    assert "b: stored array float32[4], wanted array float32[5]" in problems
    assert "c: stored int, wanted" in problems
    assert "d: stored array float32[6] cannot be placed" in problems
    assert "e: not in the target" in problems
    assert "f: not in the checkpoint" in problems
    assert error.value.fault.exit_code == 78
    assert (tmp_path / "1").is_dir()


_WIDE = {
    "numpy": np.arange(3.0),
    "integers": np.arange(3),
    "complex": np.ones((2, 2), np.complex128),
    "empty": np.ones((0, 2)),
}


@pytest.mark.parametrize("kind", _WIDE)
@pytest.mark.parametrize("is_placed", [False, True])
def test_a_64_bit_leaf_is_not_narrowed_but_refused(tmp_path, kind, is_placed):
    value = _WIDE[kind]
    sharding = SingleDeviceSharding(jax.devices()[0]) if is_placed else None
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    with pytest.raises(leaf_requests.TargetMismatchError) as error:
        _trip(tmp_path, {"w": value}, {"w": struct})
    (problem,) = error.value.problems
    assert f"w: stored numpy {value.dtype}" in problem
    assert "jax_enable_x64" in problem
    with manager.CheckpointManager(tmp_path) as saved:
        restored = saved.restore({"w": np.zeros_like(value)}).state["w"]
        assert restored.tobytes() == value.tobytes()
        with jax.enable_x64(True):
            restored = saved.restore({"w": struct}).state["w"]
    assert isinstance(restored, jax.Array)
    assert np.asarray(restored).tobytes() == value.tobytes()


def test_a_64_bit_number_is_not_narrowed_but_refused(tmp_path):
    """As the step of a Flax TrainState that was trained with 64 bits."""
    with jax.enable_x64(True), manager.CheckpointManager(tmp_path) as saved:
        saved.save(1, {"count": jnp.asarray(2**40 + 1)})
    with manager.CheckpointManager(tmp_path) as saved:
        with pytest.raises(leaf_requests.TargetMismatchError, match="jax_enable_x64"):
            saved.restore({"count": 0})
        assert saved.steps() == [1]


def test_a_key_of_another_implementation_is_a_mismatch(tmp_path):
    with pytest.raises(leaf_requests.TargetMismatchError, match="key<rbg>"):
        _trip(
            tmp_path,
            {"k": jax.random.key(1, impl="rbg")},
            {"k": jax.random.key(1)},
        )


def test_a_flax_train_state_comes_back_into_a_fresh_one(tmp_path):
    """Its step is an int until the first update, and a weak scalar from then on."""
    tx = optax.adam(1e-2)

    def fresh():
        params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
        return train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    update = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    state = update(update(fresh()))
    with manager.CheckpointManager(tmp_path) as saved:
        saved.save(2, state)
        restored = saved.restore(fresh()).state
    assert int(restored.step) == 2
    assert restored.step.weak_type
    again, straight = update(restored), update(state)
    assert update._cache_size() == 2  # of an int, of a weak scalar: none for ours
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(straight), strict=True):
        np.testing.assert_array_equal(a, b)
