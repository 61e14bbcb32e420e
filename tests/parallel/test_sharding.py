"""Every leaf of trees, states and batches: where it goes, why, and how many bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxft.config import ConfigError, MeshConfig, ShardingConfig
from jaxft.parallel.mesh import AXES, make_mesh
from jaxft.parallel.sharding import (
    explain,
    plan_placements,
    plan_shardings,
    plan_state_placements,
)
from jaxft.types import TrainState

pytestmark = pytest.mark.device

P = PartitionSpec


def _mesh(data, fsdp, tensor):
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


def _leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _transformer(layers=4, width=64, heads=4, kv=2, head=16, mlp=176, vocab=256):
    shapes = {
        "embed": _leaf(vocab, width),
        "layers": {
            "norm": _leaf(layers, width),
            "q": _leaf(layers, width, heads, head),
            "kv": _leaf(layers, 2, width, kv, head),
            "out": _leaf(layers, heads, head, width),
            "up": _leaf(layers, width, mlp),
            "down": _leaf(layers, mlp, width),
        },
        "final": _leaf(width),
    }
    axes = {
        "embed": ("vocab", "embed"),
        "layers": {
            "norm": ("layers", "embed"),
            "q": ("layers", "embed", "heads", "head_dim"),
            "kv": ("layers", None, "embed", "kv_heads", "head_dim"),
            "out": ("layers", "heads", "head_dim", "embed"),
            "up": ("layers", "embed", "mlp"),
            "down": ("layers", "mlp", "embed"),
        },
        "final": None,
    }
    return shapes, axes


def _specs(shardings):
    flat = jax.tree_util.tree_flatten_with_path(shardings)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec
        for path, sharding in flat
    }


def test_every_leaf_of_an_annotated_transformer():
    shapes, axes = _transformer()
    specs = _specs(plan_shardings(shapes, mesh=_mesh(2, 2, 2), axes=axes))
    assert specs == {
        "embed": P("tensor", "fsdp"),
        "layers/norm": P(None, "fsdp"),
        "layers/q": P(None, "fsdp", "tensor"),
        "layers/kv": P(None, None, "fsdp", "tensor"),
        "layers/out": P(None, "tensor", None, "fsdp"),
        "layers/up": P(None, "fsdp", "tensor"),
        "layers/down": P(None, "tensor", "fsdp"),
        "final": P(),
    }


def test_axes_of_one_device_are_left_out():
    shapes, axes = _transformer()
    specs = _specs(plan_shardings(shapes, mesh=_mesh(8, 1, 1), axes=axes))
    assert set(specs.values()) == {P()}
    specs = _specs(plan_shardings(shapes, mesh=_mesh(1, 8, 1), axes=axes))
    assert specs["embed"] == P(None, "fsdp")
    assert specs["layers/up"] == P(None, "fsdp")


def test_every_leaf_without_annotation_is_sharded_by_size():
    shapes, _ = _transformer()
    specs = _specs(plan_shardings(shapes, mesh=_mesh(1, 8, 1)))
    assert specs == {
        "embed": P("fsdp"),
        "layers/norm": P(),  # 256 elements
        "layers/q": P(None, "fsdp"),
        "layers/kv": P(None, None, "fsdp"),
        "layers/out": P(None, None, None, "fsdp"),
        "layers/up": P(None, None, "fsdp"),
        "layers/down": P(None, "fsdp"),
        "final": P(),
    }


def test_automatic_fsdp_prefers_the_last_of_equals_and_skips_what_does_not_divide():
    config = ShardingConfig(min_shard_elements=0)
    shapes = {
        "square": _leaf(64, 64),
        "odd": _leaf(1001, 16),
        "none": _leaf(7, 9),
        "empty": _leaf(0, 8),
        "scalar": _leaf(),
    }
    placements = plan_placements(shapes, mesh=_mesh(1, 8, 1), config=config)
    assert {name: p.sharding.spec for name, p in placements.items()} == {
        "square": P(None, "fsdp"),
        "odd": P(None, "fsdp"),
        "none": P(),
        "empty": P(),
        "scalar": P(),
    }
    assert placements["none"].reason == "replicated: nothing divides by 8"
    assert placements["empty"].reason == "replicated: too small"
    assert placements["scalar"].reason == "scalar"


def test_the_first_logical_rule_that_fits_wins():
    mesh = _mesh(2, 2, 2)
    config = ShardingConfig(
        logical_rules="a=fsdp+tensor, a=fsdp, b=fsdp, b=tensor, b=-, stop=-"
    )
    shapes = {
        "both": _leaf(8, 6),  # a takes both axes, so b has none left
        "second": _leaf(6, 6),  # 6 does not split over four
        "indivisible": _leaf(6, 5),
        "stopped": _leaf(64, 64),  # a rule spoke: no automatic FSDP
        "unknown": _leaf(64, 64),  # no rule spoke
    }
    axes = {
        "both": ("a", "b"),
        "second": ("a", "b"),
        "indivisible": ("a", "b"),
        "stopped": ("stop", None),
        "unknown": ("nobody", None),
    }
    placements = plan_placements(shapes, mesh=mesh, config=config, axes=axes)
    assert {name: p.sharding.spec for name, p in placements.items()} == {
        "both": P(("fsdp", "tensor")),
        "second": P("fsdp", "tensor"),
        "indivisible": P("fsdp"),
        "stopped": P(),
        "unknown": P(None, "fsdp"),
    }
    assert placements["second"].reason == "logical (a, b)"
    assert placements["stopped"].reason == "logical (stop, -)"
    assert placements["unknown"].reason == "automatic fsdp"


def test_path_rules_win_over_names_and_size():
    shapes, axes = _transformer()
    config = ShardingConfig(
        path_rules="layers/(up|down) = -, data+fsdp, tensor; .*/q = -; embed = -, data"
    )
    placements = plan_placements(shapes, mesh=_mesh(2, 2, 2), config=config, axes=axes)
    assert placements["layers"]["up"].sharding.spec == P(
        None, ("data", "fsdp"), "tensor"
    )
    assert placements["layers"]["q"].sharding.spec == P()
    assert placements["embed"].sharding.spec == P(None, "data")
    assert placements["embed"].reason == "path rule 'embed'"
    # Others as before.
    assert placements["layers"]["kv"].reason.startswith("logical")


def test_rules_that_split_nothing_on_this_mesh_give_way():
    config = ShardingConfig(
        logical_rules="a=tensor+data, b=tensor, b=fsdp, c=-, c=fsdp"
    )
    shapes = {"ab": _leaf(8, 8), "c": _leaf(64, 128)}
    axes = {"ab": ("a", "b"), "c": ("c", None)}
    for sizes, ab in [((2, 4, 1), P("data", "fsdp")), ((1, 4, 2), P("tensor", "fsdp"))]:
        shardings = plan_shardings(shapes, mesh=_mesh(*sizes), config=config, axes=axes)
        assert shardings["ab"].spec == ab
        assert shardings["c"].spec == P()


def test_a_path_rule_speaks_of_whole_paths():
    config = ShardingConfig(path_rules="w = tensor, -")
    shapes = {"w": _leaf(8, 8), "w2": _leaf(8, 8), "a": {"w": _leaf(8, 8)}}
    specs = _specs(plan_shardings(shapes, mesh=_mesh(1, 4, 2), config=config))
    assert specs == {"w": P("tensor"), "w2": P(), "a/w": P()}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (".*/kernle = -, fsdp", "matches none of 8 leaves, whose first is 'embed'"),
        ("embed = fsdp", "has 1 entries, but 'embed' is of shape (256, 64)"),
        ("final = data+fsdp+tensor; layers/norm = fsdp, data+tensor", None),
        ("layers/kv = data+fsdp, -, -, -, -", None),
        ("layers/kv = -, data+fsdp, -, -, -", "splits 2 of 'layers/kv'"),
        ("q = fsdp, -", "matches none"),  # the whole path, not its end
    ],
)
def test_path_rules_that_cannot_be_obeyed(rule, words):
    shapes, _ = _transformer()
    config = ShardingConfig(path_rules=rule)
    if words is None:
        plan_shardings(shapes, mesh=_mesh(2, 2, 2), config=config)
        return
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        plan_shardings(shapes, mesh=_mesh(2, 2, 2), config=config)
    assert caught.value.path == "sharding.path_rules"


@pytest.mark.parametrize(
    "axes",
    [
        {"w": ("embed",)},
        {"w": "embed"},
        {"v": ("embed", "mlp")},
        {"w": ("embed", "mlp"), "b": None},
        {},
    ],
)
def test_axes_that_do_not_fit_the_tree(axes):
    with pytest.raises(ConfigError, match=r"Model\.axes") as caught:
        plan_shardings({"w": _leaf(8, 8)}, mesh=_mesh(8, 1, 1), axes=axes)
    assert caught.value.path == "model.factory"
    assert "\n" not in str(caught.value)


def test_mixed_trees_and_leaves_with_or_without_shardings():
    """What a leaf already has, a sharding or none, does not matter."""
    mesh = _mesh(1, 8, 1)
    tree = {
        "sharded": jax.device_put(
            jnp.ones((64, 128)), NamedSharding(mesh, P("fsdp", None))
        ),
        "replicated": jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P())),
        "abstract": _leaf(64, 128),
        "numpy": np.ones((64, 128), np.float32),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 8192),
        "number": 3,
        "none": None,
        "list": [_leaf(8192), (), {}],
    }
    shardings = plan_shardings(tree, mesh=mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    for name in ("sharded", "replicated", "abstract", "numpy"):
        assert shardings[name].spec == P(None, "fsdp"), name
    for name in ("key", "keys", "number"):
        assert shardings[name].spec == P(), name
    assert shardings["list"][0].spec == P("fsdp")
    concrete = {k: v for k, v in tree.items() if k not in ("abstract", "list")}
    placed = jax.device_put(concrete, {k: shardings[k] for k in concrete})
    assert placed["keys"].sharding.is_fully_replicated


def test_planning_needs_no_devices():
    shapes, axes = _transformer(width=1024, mlp=4096)
    mesh = AbstractMesh((16, 64, 2), AXES)
    shardings = plan_shardings(shapes, mesh=mesh, axes=axes)
    assert shardings["layers"]["up"].spec == P(None, "fsdp", "tensor")
    text = explain(shapes, shardings)
    assert "fsdp, tensor" in text
    (total,) = re.findall(r"([\d,]+) bytes per device", text)
    all_bytes = 4 * sum(x.size for x in jax.tree.leaves(shapes))
    assert int(total.replace(",", "")) < all_bytes / 64


def test_a_mesh_of_ones_own():
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    config = ShardingConfig(logical_rules="mlp=model, embed=tensor, embed=fsdp")
    specs = plan_shardings(
        {"w": _leaf(8, 6)}, mesh=mesh, config=config, axes={"w": ("embed", "mlp")}
    )
    # There is no tensor axis, so the first rule of embed gives way.
    assert specs["w"].spec == P("fsdp", "model")


def _state(params, optimizer, *, extra=None):
    def init():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return TrainState(
            step=jnp.int32(0),
            num_skipped=jnp.int32(0),
            params=zeros,
            opt_state=optimizer.init(zeros),
            rng=jax.random.key(0),
            extra=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), extra or {}),
        )

    return init


_OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(jnp.ndim, p)),
        optax.scale_by_schedule(optax.constant_schedule(1.0)),
    ),
    "masked": optax.masked(
        optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "multi_steps": optax.MultiSteps(
        optax.adam(1e-3), every_k_schedule=4
    ).gradient_transformation(),
    "partition": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
        lambda p: {k: "a" if k == "layers" else "b" for k in p},
    ),
    "finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_what_mirrors_a_parameter_lies_where_it_lies(name):
    params, axes = _transformer()
    mesh = _mesh(2, 2, 2)
    shapes = jax.eval_shape(_state(params, _OPTIMIZERS[name]))
    placements = plan_state_placements(shapes, mesh=mesh, axes=axes)
    wanted = _specs(plan_shardings(params, mesh=mesh, axes=axes))
    seen = 0
    for path, placement in jax.tree_util.tree_flatten_with_path(placements.opt_state)[
        0
    ]:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        mirrored = [param for param in wanted if text.endswith(param)]
        if mirrored:
            assert placement.sharding.spec == wanted[max(mirrored, key=len)], text
            assert placement.reason == f"like params/{max(mirrored, key=len)}"
            seen += 1
        else:
            assert placement.sharding.spec == P(), text
    assert seen >= 6
    assert (placements.step.reason, placements.rng.reason) == ("scalar", "typed key")


def test_factored_moments_go_their_own_way():
    params = {"layers": {"w": _leaf(256, 512)}, "w": _leaf(256)}
    shapes = jax.eval_shape(_state(params, optax.adafactor(1e-3)))
    config = ShardingConfig(min_shard_elements=300, path_rules=".*/w = tensor, -")
    placements = plan_state_placements(shapes, mesh=_mesh(1, 4, 2), config=config)
    flat = jax.tree_util.tree_flatten_with_path(
        (shapes.opt_state, placements.opt_state)
    )
    half = len(flat[0]) // 2
    reasons = {}
    for (path, leaf), (_, placement) in zip(
        flat[0][:half], flat[0][half:], strict=True
    ):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        reasons[text.split("/", 1)[1], leaf.shape] = placement.reason
    by_shape = {
        shape: reason for (text, shape), reason in reasons.items() if "layers/w" in text
    }
    # Rows of layers/w have the shape of the other parameter, w, and are not its.
    assert by_shape[(256,)] == "replicated: too small"
    assert by_shape[(512,)] == "automatic fsdp"


def _state_shardings(shapes, *, mesh, axes=None):
    placements = plan_state_placements(shapes, mesh=mesh, axes=axes)
    return jax.tree.map(lambda placement: placement.sharding, placements)


def test_averages_in_extra_mirror_and_statistics_do_not():
    params, axes = _transformer()
    extra = {"ema": params, "batch_stats": {"mean": _leaf(64), "big": _leaf(8192)}}
    shapes = jax.eval_shape(_state(params, optax.sgd(1e-2), extra=extra))
    mesh = _mesh(2, 2, 2)
    state = _state_shardings(shapes, mesh=mesh, axes=axes)
    assert _specs(state.extra["ema"]) == _specs(state.params)
    assert state.extra["batch_stats"]["mean"].spec == P()
    assert state.extra["batch_stats"]["big"].spec == P("fsdp")


def test_the_plan_of_a_state_has_its_structure_even_for_one_bare_parameter():
    init = _state(_leaf(8, 1024), optax.adam(1e-3))
    shapes = jax.eval_shape(init)
    shardings = _state_shardings(shapes, mesh=_mesh(1, 8, 1))
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)
    assert shardings.opt_state[0].mu.spec == P(None, "fsdp")
    state = jax.jit(init, out_shardings=shardings)()
    assert state.params.addressable_shards[0].data.shape == (8, 128)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_bytes_on_each_device_are_what_explain_says(sizes):
    params, axes = _transformer()
    init = _state(params, optax.adamw(1e-3), extra={"seen": _leaf(8192)})
    shapes = jax.eval_shape(init)
    placements = plan_state_placements(shapes, mesh=_mesh(*sizes), axes=axes)
    shardings = jax.tree.map(lambda p: p.sharding, placements)
    state = jax.jit(init, out_shardings=shardings)()
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(state):
        data = jax.random.key_data(leaf) if leaf is state.rng else leaf
        for shard in data.addressable_shards:
            held[shard.device] += shard.data.nbytes
    (each,) = set(held.values())
    text = explain(shapes, placements)
    assert f"{each:,} bytes per device" in text.splitlines()[-1]
    column = [line.split() for line in text.splitlines()[1:-1]]
    assert len(column) == len(jax.tree.leaves(shapes))
    for leaf, line in zip(jax.tree.leaves(state), text.splitlines()[1:-1], strict=True):
        data = jax.random.key_data(leaf) if leaf is state.rng else leaf
        nbytes = data.addressable_shards[0].data.nbytes
        assert f" {nbytes:,}  " in line, line


def test_explain_reads_as_a_table():
    shapes, axes = _transformer()
    config = ShardingConfig(path_rules="layers/down = -, tensor, -")
    placements = plan_placements(shapes, mesh=_mesh(1, 4, 2), config=config, axes=axes)
    lines = explain(shapes, placements).splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "spec", "bytes/device", "why"]
    by_leaf = {line.split()[0]: re.split(r"  +", line) for line in lines[1:-1]}
    assert by_leaf["embed"][1:4] == ["256x64", "float32", "tensor, fsdp"]
    assert by_leaf["embed"][4:] == ["8,192", "logical (vocab, embed)"]
    assert by_leaf["final"][-1] == "replicated: too small"
    assert by_leaf["layers/down"][3:5] == ["-, tensor, -", "90,112"]
    assert by_leaf["layers/down"][5] == "path rule 'layers/down'"
    assert lines[-1].startswith("8 leaves: ")


def test_explain_takes_the_shardings_of_live_arrays():
    mesh = _mesh(2, 4, 1)
    tree = {
        "x": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("fsdp"))),
        "y": jax.device_put(jnp.ones(8), jax.devices()[0]),
    }
    text = explain(tree, jax.tree.map(lambda x: x.sharding, tree))
    assert "fsdp, -" in text
    assert "SingleDeviceSharding" in text
    assert "given" in text
