"""The traced step: guard, randomness, microbatches, control word, donation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxft.config import PrecisionConfig, TrainConfig
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.precision import make_precision
from jaxft.records import Control
from jaxft.train.ema import averaged_params
from jaxft.train.state import StateFactory, make_key
from jaxft.train.step import TrainStep, make_eval_step, make_train_step
from jaxft.train.update import reduce_control
from jaxft.types import Model, TrainState, Variables

pytestmark = pytest.mark.device


def linear_model(*, noise: float = 0.0) -> Model:
    """Least squares with optional noise on the inputs, counting its calls."""

    def init(key: jax.Array) -> Variables:
        w = jax.random.normal(key, (3, 2))
        return Variables({"w": w}, {"calls": jnp.int32(0)})

    def loss(params: Any, extra: Any, batch: Any, rng: Any, *, train: bool) -> Any:
        x = batch["x"]
        if train:
            x = x + noise * jax.random.normal(rng, x.shape, x.dtype)
        error = jnp.sum((x @ params["w"] - batch["y"]) ** 2, axis=-1)
        weight = batch.get("weight", jnp.ones_like(error))
        calls = extra["calls"] + jnp.int32(train)
        return {"loss": (jnp.sum(error * weight), jnp.sum(weight))}, {"calls": calls}

    return Model(init, loss)


def start(
    model: Model,
    config: TrainConfig | None = None,
    optimizer: Any = None,
    **kwargs: Any,
) -> tuple[TrainState, TrainStep]:
    step = make_train_step(
        model,
        optimizer or optax.adam(1e-2),
        mesh=make_mesh(devices=jax.devices()[:1]),
        config=config,
        precision=PrecisionConfig(**kwargs),
    )
    return step.init(), step


def batch_of(seed: int, *, rows: int = 8) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.standard_normal((rows, 3)), jnp.float32),
        "y": jnp.asarray(rng.standard_normal((rows, 2)), jnp.float32),
    }


def test_counts_and_donates() -> None:
    state, step = start(linear_model())
    old = state.params["w"]
    state, output = step(state, batch_of(0))
    assert old.is_deleted()
    assert (int(state.step), int(state.num_skipped)) == (1, 0)
    assert bool(output.finite)
    assert set(output.metrics) == {"loss", "grad_norm"}


def test_same_state_and_batch_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        state, step = start(linear_model(noise=1.0))
        for seed in range(5):
            state, _ = step(state, batch_of(seed))
        results.append(np.asarray(state.params["w"]).tobytes())
    assert results[0] == results[1]


def test_randomness_follows_the_step_not_the_call() -> None:
    state, step = start(linear_model(noise=1.0), optimizer=optax.sgd(0.0))
    losses = []
    for _ in range(3):
        state, output = step(state, batch_of(0))
        losses.append(float(output.metrics["loss"]))
    assert len(set(losses)) == 3
    again, _ = start(linear_model(noise=1.0), optimizer=optax.sgd(0.0))
    again = again.replace(step=jnp.int32(2))
    _, output = step(again, batch_of(0))
    assert float(output.metrics["loss"]) == losses[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_guard_keeps_everything_but_the_attempt(bad: float) -> None:
    state, step = start(linear_model())
    state, _ = step(state, batch_of(0))
    before = jax.device_get((state.params, state.opt_state, state.extra))
    batch = batch_of(1)
    batch["x"] = batch["x"].at[0, 0].set(bad)
    state, output = step(state, batch)
    assert not bool(output.finite)
    assert (int(state.step), int(state.num_skipped)) == (2, 1)
    after = jax.device_get((state.params, state.opt_state, state.extra))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, output = step(state, batch_of(2))
    assert bool(output.finite)
    assert int(optax.tree.get(state.opt_state, "count")) == 2


def test_without_guard_the_bad_update_is_applied() -> None:
    state, step = start(linear_model(), TrainConfig(guard=False))
    batch = batch_of(1)
    batch["x"] = batch["x"].at[0, 0].set(np.nan)
    state, output = step(state, batch)
    assert not bool(output.finite)
    assert np.isnan(np.asarray(state.params["w"])).any()


@pytest.mark.parametrize(
    "num_microbatches",
    [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 8))],
)
def test_microbatches_are_the_same_mean(num_microbatches: int) -> None:
    whole, step = start(linear_model())
    parts, split_step = start(
        linear_model(), TrainConfig(num_microbatches=num_microbatches)
    )
    # Uneven weights, also a microbatch of nothing but padding.
    weight = jnp.asarray([1, 0, 0.5, 0, 2, 0, 1, 0], jnp.float32)
    batch = batch_of(0) | {"weight": weight}
    whole, a = step(whole, batch)
    parts, b = split_step(parts, batch)
    np.testing.assert_allclose(a.metrics["loss"], b.metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(whole.params["w"], parts.params["w"], rtol=1e-5)
    assert int(parts.extra["calls"]) == num_microbatches


def test_a_batch_of_padding_is_zero_not_nan() -> None:
    state, step = start(linear_model())
    before = np.asarray(state.params["w"])
    state, output = step(state, batch_of(0) | {"weight": jnp.zeros(8)})
    assert float(output.metrics["loss"]) == 0.0
    assert bool(output.finite)
    np.testing.assert_array_equal(state.params["w"], before)


def test_bfloat16_compute_keeps_float32_parameters() -> None:
    state, step = start(linear_model(), compute_dtype="bfloat16")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    state, output = step(state, batch_of(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    assert output.metrics["loss"].dtype == jnp.float32


def test_control_word_is_an_or_over_processes() -> None:
    word = np.zeros(8, np.int32)
    word[1], word[6] = Control.STOP | Control.SAVE, Control.ERROR
    assert int(jax.jit(reduce_control)(word)) == (
        Control.STOP | Control.SAVE | Control.ERROR
    )
    step = make_train_step(linear_model(), optax.sgd(0.1))
    _, output = step(step.init(), batch_of(0), word)
    assert Control(int(output.control)) == Control.STOP | Control.SAVE | Control.ERROR


def test_eval_step_sees_no_noise_and_changes_nothing() -> None:
    model = linear_model(noise=100.0)
    state, _ = start(model)
    evaluate = make_eval_step(model.loss)
    sums = evaluate(state, batch_of(0))
    expected = np.sum((batch_of(0)["x"] @ state.params["w"] - batch_of(0)["y"]) ** 2)
    np.testing.assert_allclose(sums["loss"][0], expected, rtol=1e-5)
    assert float(sums["loss"][1]) == 8.0


def test_state_has_no_weak_types() -> None:
    def init(key: jax.Array) -> Variables:
        return Variables({"w": jnp.asarray(1.0) * 2, "b": jnp.asarray(3)}, {})

    model = linear_model()._replace(init=init)
    factory = StateFactory(
        model, optax.adam(1e-2), precision=make_precision(PrecisionConfig())
    )
    shapes = factory.plan_shapes(make_key(TrainConfig()))
    assert not [x for x in jax.tree.leaves(shapes) if getattr(x, "weak_type", False)]


def test_an_update_that_is_not_finite_is_not_applied() -> None:
    """A finite gradient is not enough: the rate may be NaN, a moment infinite."""
    rate = lambda count: jnp.where(count == 1, jnp.nan, 0.1)
    state, step = start(linear_model(), optimizer=optax.sgd(rate))
    for seed in range(3):
        state, _ = step(state, batch_of(seed))
    assert np.isfinite(np.asarray(state.params["w"])).all()
    # The count stays where the rate is NaN: the guard counts every such attempt.
    assert (int(state.step), int(state.num_skipped)) == (3, 2)


def test_clipping_bounds_the_gradient_of_any_optimizer() -> None:
    plain, _ = start(linear_model())
    state, step = start(
        linear_model(), TrainConfig(clip_norm=1e-3), optimizer=optax.sgd(1.0)
    )
    state, output = step(state, batch_of(0))
    assert float(output.metrics["grad_norm"]) > 1.0
    moved = np.asarray(state.params["w"]) - np.asarray(plain.params["w"])
    np.testing.assert_allclose(np.linalg.norm(moved), 1e-3, rtol=1e-4)


def test_a_small_gradient_is_not_clipped() -> None:
    states = []
    for clip_norm in (0.0, 1e6):
        state, step = start(linear_model(), TrainConfig(clip_norm=clip_norm))
        state, _ = step(state, batch_of(0))
        states.append(np.asarray(state.params["w"]))
    np.testing.assert_array_equal(*states)


def test_average_of_the_parameters() -> None:
    model = linear_model()
    state, step = start(model, TrainConfig(ema_decay=0.9), optimizer=optax.sgd(0.05))
    expected = np.asarray(state.params["w"])
    for seed in range(4):
        batch = batch_of(seed)
        if seed == 2:  # Guarded: the average must not move either.
            batch["x"] = batch["x"].at[0, 0].set(np.nan)
        state, _ = step(state, batch)
        if seed != 2:
            expected = 0.9 * expected + 0.1 * np.asarray(state.params["w"])
    np.testing.assert_allclose(averaged_params(state)["w"], expected, rtol=1e-6)
    sums = make_eval_step(model.loss)(state, batch_of(0))
    error = batch_of(0)["x"] @ expected - batch_of(0)["y"]
    np.testing.assert_allclose(sums["loss"][0], np.sum(error**2), rtol=1e-5)
    shardings = step.state_shardings
    assert averaged_params(shardings)["w"] == shardings.params["w"]


def test_usable_alone_on_a_mesh() -> None:
    step = make_train_step(linear_model(), optax.adam(1e-2))
    state = step.init()
    assert jax.tree.map(lambda x: x.sharding, state) == step.state_shardings
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), step.abstract_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    rows = {name: np.asarray(x) for name, x in batch_of(0).items()}
    batch, word = step.place(rows, control=Control.SAVE)
    compiled = step.lower(None, batch, word).compile()
    state, output = compiled(state, batch, word)
    assert int(output.control) == Control.SAVE
    # Host arrays, and no control word, will do as well.
    state, output = step(state, rows)
    assert int(state.step) == 2
    assert "params/w" in step.explain()


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_optimizers_that_look_at_the_loss(ema_decay: float) -> None:
    optimizer = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    )
    config = TrainConfig(ema_decay=ema_decay)
    state, step = start(linear_model(), config, optimizer=optimizer)
    for _ in range(6):
        state, output = step(state, batch_of(0))
    assert bool(output.finite)
    assert "best_value" in str(jax.tree_util.tree_flatten_with_path(state.opt_state)[0])
