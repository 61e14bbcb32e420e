"""The same bits on any number of devices, and what is refused since it would not."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.config import (
    ConfigError,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ShardingConfig,
    TrainConfig,
)
from jaxft.models import mlp, transformer
from jaxft.models.adapters import from_nnx
from jaxft.parallel.mesh import make_mesh
from jaxft.train.elementwise import find_sums
from jaxft.train.optimizer import make_optimizer
from jaxft.train.shard_step import SPLIT_IS_EXACT
from jaxft.train.step import TrainStep, make_eval_step, make_train_step
from jaxft.types import Model, TrainState, Variables

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]

# (data, fsdp): one device, data parallel, split parameters, and both.
MESHES = [
    (1, 1),
    (2, 1),
    (4, 1),
    (8, 1),
    (1, 2),
    (1, 4),
    (1, 8),
    (2, 2),
    (4, 2),
    (2, 4),
]
NUM_SHARDS = 8
needs_split = pytest.mark.skipif(
    not SPLIT_IS_EXACT, reason="this jax updates parts with other bits than the whole"
)


def possible(*meshes: tuple[int, int]) -> list[tuple[int, int]]:
    """Those on which the installed jax gives the same bits."""
    return [shape for shape in meshes if SPLIT_IS_EXACT or shape[1] == 1]


def tiny(kind: str) -> Model:
    config = ModelConfig(width=32, num_layers=2, num_heads=2, num_kv_heads=2)
    config.mlp_width = 88
    if kind == "mlp":
        model = mlp.make_model(config, RematConfig())
        return from_nnx(model, mlp.softmax_loss(LossConfig()))
    remat = RematConfig(plan="names(attn,up)")
    model = transformer.make_model(config, remat)
    return from_nnx(model, transformer.next_token_loss(LossConfig()))


def noisy() -> Model:
    """Least squares with noise of each step's key on the inputs, rows weighted."""

    def init(key: jax.Array) -> Variables:
        return Variables({"w": jax.random.normal(key, (16, 24)) / 4}, {})

    def loss(params: Any, extra: Any, batch: Any, rng: Any, *, train: bool) -> Any:
        x = batch["x"]
        if train:
            x = x + jax.random.normal(rng, x.shape, x.dtype)
        error = jnp.sum((x @ params["w"] - batch["y"]) ** 2, axis=-1)
        sums = jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])
        return {"loss": sums}, extra

    return Model(init, loss)


def tokens(seed: int, *, rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(256, size=(rows, 17), dtype=np.int32)
    return {"inputs": drawn[:, :-1].copy(), "targets": drawn[:, 1:].copy()}


def numbers(seed: int, *, rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weight = rng.uniform(size=rows) * (np.arange(rows) % 3 > 0)
    drawn = {
        "x": rng.standard_normal((rows, 16)),
        "y": rng.standard_normal((rows, 24)),
        "weight": weight,
    }
    return {name: value.astype(np.float32) for name, value in drawn.items()}


def start(
    model: Model,
    shape: tuple[int, int],
    *,
    optimizer: Any = None,
    virtual_shards: int = NUM_SHARDS,
    compute_dtype: str = "float32",
    logical_rules: str = "",
    **settings: Any,
) -> TrainStep:
    data, fsdp = shape
    optimizer = optimizer or make_optimizer(
        OptimizerConfig(warmup_steps=3, decay_steps=100)
    )
    sharding = ShardingConfig(min_shard_elements=64)
    if logical_rules:
        sharding.logical_rules = logical_rules
    return make_train_step(
        model,
        optimizer,
        mesh=make_mesh(MeshConfig(data=data, fsdp=fsdp, num_devices=data * fsdp)),
        config=TrainConfig(virtual_shards=virtual_shards, **settings),
        precision=PrecisionConfig(compute_dtype=compute_dtype),
        sharding=sharding,
    )


def bits(tree: Any) -> list[bytes]:
    return [
        np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()
        for x in jax.tree.leaves(tree)
    ]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def follow(
    step: TrainStep, rows: Any, *, num_steps: int, state: TrainState | None = None
) -> tuple[TrainState, list[bytes]]:
    """The last state, and the bits of all that was reported."""
    state = step.init() if state is None else state
    first, told = int(state.step), []
    for seed in range(first, first + num_steps):
        batch, word = step.place(rows(seed))
        state, output = step(state, batch, word)
        told += bits((output.metrics, output.finite))
    return state, told


@pytest.mark.parametrize("kind", ["mlp", pytest.param("lm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_the_same_bits_on_every_mesh(kind: str, dtype: str, full: bool) -> None:
    some = [(1, 1), (2, 1), (2, 2), (1, 8)] if SPLIT_IS_EXACT else [(1, 1), (8, 1)]
    meshes = possible(*(MESHES if full else some))
    settings = {"clip_norm": 0.5, "ema_decay": 0.9, "compute_dtype": dtype}
    ends = {}
    for shape in meshes:
        step = start(tiny(kind), shape, **settings)
        state, told = follow(step, tokens, num_steps=20)
        ends[shape] = bits(state), told
        if shape[1] > 1:
            specs = [x.sharding.is_fully_replicated for x in jax.tree.leaves(state)]
            assert not all(specs), "nothing was split, so that nothing was tried"
    different = [shape for shape in meshes if ends[shape] != ends[meshes[0]]]
    assert not different


def test_noise_and_weights_are_those_of_the_shard_not_of_the_device() -> None:
    ends = {
        shape: follow(start(noisy(), shape), numbers, num_steps=5)
        for shape in possible((1, 1), (4, 1), (2, 4))
    }
    first = ends.pop((1, 1))
    for state, told in ends.values():
        assert (bits(state), told) == (bits(first[0]), first[1])


def test_the_mean_is_that_of_the_whole_batch() -> None:
    def loss(params: Any, extra: Any, batch: Any, rng: Any, *, train: bool) -> Any:
        return noisy().loss(params, extra, batch, rng, train=False)

    model = Model(noisy().init, loss)
    plain = start(model, (1, 1), virtual_shards=0)
    fixed = start(model, (2, 1))
    a, b = plain.init(), fixed.init()
    a, of_plain = plain(a, plain.place(numbers(0))[0])
    b, of_fixed = fixed(b, fixed.place(numbers(0))[0])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            of_plain.metrics[name], of_fixed.metrics[name], rtol=1e-6
        )
    np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-5)


def test_a_bad_row_is_guarded_against_on_every_mesh() -> None:
    ends = []
    for shape in [(1, 1), (2, 2) if SPLIT_IS_EXACT else (4, 1)]:
        step = start(noisy(), shape)
        state, _ = follow(step, numbers, num_steps=1)
        before = bits((state.params, state.opt_state))
        rows = numbers(1)
        rows["x"][5, 3] = np.nan
        state, output = step(state, *step.place(rows))
        assert not bool(output.finite)
        assert (int(state.step), int(state.num_skipped)) == (2, 1)
        assert bits((state.params, state.opt_state)) == before
        ends.append(bits(follow(step, numbers, num_steps=2, state=state)[0]))
    assert ends[0] == ends[1]


def test_control_words_of_all_devices_arrive() -> None:
    step = start(noisy(), (4, 1))
    batch, _ = step.place(numbers(0))
    _, output = step(step.init(), batch, np.asarray([0, 1, 0, 2], np.int32))
    assert int(output.control) == 3


@needs_split
def test_rows_that_every_device_of_an_axis_has() -> None:
    rules = "batch=data, vocab=tensor, embed=fsdp"
    one, told = follow(start(noisy(), (1, 1)), numbers, num_steps=3)
    step = start(noisy(), (2, 4), logical_rules=rules)
    other, told_too = follow(step, numbers, num_steps=3)
    assert (bits(one), told) == (bits(other), told_too)


def test_evaluation_gives_the_same_bits() -> None:
    ends = []
    for shape in possible((1, 1), (4, 1), (2, 4)):
        model = tiny("mlp")
        step = start(model, shape, ema_decay=0.5)
        state, _ = follow(step, tokens, num_steps=2)
        evaluate = make_eval_step(
            model.loss,
            batch_sharding=step.batch_sharding,
            virtual_shards=NUM_SHARDS,
        )
        batch, _ = step.place(tokens(9))
        compiled = evaluate.lower(state, batch).compile()
        sums = compiled(state, batch)
        ends.append(bits(sums))
        assert float(sums["loss"][1]) == 16 * 16
        # What is placed by the host is compiled for as well.
        assert bits(evaluate(state, batch)) == ends[-1]
    assert all(end == ends[0] for end in ends[1:])


@pytest.mark.parametrize(
    ("settings", "path", "text"),
    [
        ({"virtual_shards": 6}, "train.virtual_shards", "power of two"),
        ({"virtual_shards": 2}, "train.virtual_shards", "4 devices along data"),
        ({"num_microbatches": 2}, "train.num_microbatches", "set it to 1"),
    ],
)
def test_what_cannot_work_is_one_line(
    settings: dict[str, int], path: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        start(noisy(), (2, 2), **settings)
    assert error.value.path == path
    assert "\n" not in str(error.value)


def test_tensor_parallel_is_refused() -> None:
    mesh = make_mesh(MeshConfig(data=2, tensor=2, num_devices=4))
    config = TrainConfig(virtual_shards=8)
    with pytest.raises(ConfigError, match=r"mesh\.tensor=1, is 2"):
        make_train_step(noisy(), optax.sgd(0.1), mesh=mesh, config=config)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    step = start(noisy(), (2, 1))
    rows = {name: value[:12] for name, value in numbers(0).items()}
    with pytest.raises(ConfigError, match="12 rows do not split"):
        step(step.init(), *step.place(rows))


def test_batch_statistics_are_refused() -> None:
    model = noisy()
    zero = jnp.int32(0)
    counted = Model(
        lambda key: Variables(model.init(key).params, {"n": zero}), model.loss
    )
    with pytest.raises(ConfigError, match="batch statistics"):
        start(counted, (1, 1))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.adafactor(0.1, min_dim_size_to_factor=8),
        optax.lamb(0.1),
    ],
)
def test_an_optimizer_that_sums_needs_whole_parameters(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"adds up over parameters.*mesh\.fsdp=1"):
        start(noisy(), (1, 2), optimizer=optimizer)
    ends = []
    for shape in [(1, 1), (4, 1)]:
        step = start(noisy(), shape, optimizer=optimizer)
        ends.append(bits(follow(step, numbers, num_steps=3)[0]))
    assert ends[0] == ends[1]


@pytest.mark.skipif(SPLIT_IS_EXACT, reason="this jax gives the same bits")
def test_parameters_that_are_split_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"whole parameters with jax .*mesh\.fsdp=1"):
        start(noisy(), (2, 4))


@needs_split
def test_memory_that_is_not_there_is_refused() -> None:
    step = start(tiny("lm"), (1, 8))
    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(step.abstract_state.params))
    # Whole parameters and two gradients are more than this, however split the state.
    with pytest.raises(ConfigError, match=r"needs about .* MiB a device"):
        step.check_memory(3 * num_bytes - 1)
    step.check_memory(20 * num_bytes)
    step.check_memory(None)
    start(tiny("lm"), (1, 8), virtual_shards=0).check_memory(1)


def test_fewer_virtual_shards_a_device_take_less_memory() -> None:
    needed = [
        start(noisy(), (1, 1), virtual_shards=k)._jitted.needed_bytes()
        for k in (1, 8, 64)
    ]
    gradient = 4 * 16 * 24
    # By the levels of the tree, not by the shards.
    steps = [more - few for few, more in itertools.pairwise(needed)]
    assert steps == [3 * gradient, 3 * gradient]


def test_find_sums_names_what_depends_on_an_order() -> None:
    x = jnp.ones((4, 4))
    assert find_sums(lambda x: jnp.sqrt(x) * x.max() + x.T, x) == set()
    assert find_sums(lambda x: x - x.mean(), x) == {"reduce_sum"}
    assert find_sums(lambda x: x @ x, x) == {"dot_general"}
    assert find_sums(lambda x: jnp.cumsum(x, axis=0), x) == {"cumsum"}
    inside = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sum, jnp.max, x))
    assert find_sums(inside, x) == {"reduce_sum"}
    adamw = make_optimizer(OptimizerConfig(decay_steps=200))
    params = {"w": x}
    assert find_sums(adamw.update, params, adamw.init(params), params) == set()
