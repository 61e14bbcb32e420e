"""One example in Linen, NNX and plain functions; modes, randomness, refusals."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxft.config import ConfigError
from jaxft.models.adapters import from_functions, from_linen, from_nnx, to_model
from jaxft.models.losses import squared_sums
from jaxft.types import Model

pytestmark = pytest.mark.device

IN, HIDDEN, OUT = 6, 16, 3
EXAMPLE = {
    "inputs": jax.ShapeDtypeStruct((2, IN), jnp.float32),
    "targets": jax.ShapeDtypeStruct((2, OUT), jnp.float32),
}


def output_loss(outputs, batch):
    return squared_sums(outputs, batch["targets"])


def make_batch(seed=0, rows=8):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, IN)).astype(np.float32)
    return {"inputs": inputs, "targets": np.sin(inputs[:, :OUT] * 2)}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("i", "o"))
        x = jnp.tanh(nn.Dense(HIDDEN, kernel_init=init)(x))
        return nn.Dense(OUT)(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("i", "o"))
        self.layers = nnx.List(
            [
                nnx.Linear(IN, HIDDEN, rngs=rngs, kernel_init=init),
                nnx.Linear(HIDDEN, OUT, rngs=rngs),
            ]
        )

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def plain_init(key):
    first, second = jax.random.split(key)
    init = jax.nn.initializers.lecun_normal()
    return {
        "w1": init(first, (IN, HIDDEN)),
        "b1": jnp.zeros(HIDDEN),
        "w2": init(second, (HIDDEN, OUT)),
        "b2": jnp.zeros(OUT),
    }


def plain_loss(params, batch, rng):
    x = jnp.tanh(batch["inputs"] @ params["w1"] + params["b1"][None])
    return output_loss(x @ params["w2"] + params["b2"][None], batch)


def losses_of(model: Model, params, num_steps=5):
    optimizer = optax.adam(1e-2)

    def compute(params, extra, batch):
        sums, extra = model.loss(params, extra, batch, jax.random.key(0), train=True)
        return sums["loss"][0] / sums["loss"][1], extra

    @jax.jit
    def step(params, extra, opt_state, batch):
        (loss, extra), grads = jax.value_and_grad(compute, has_aux=True)(
            params, extra, batch
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), extra, opt_state, loss

    extra, opt_state, losses = {}, optimizer.init(params), []
    for seed in range(num_steps):
        params, extra, opt_state, loss = step(
            params, extra, opt_state, make_batch(seed)
        )
        losses.append(float(loss))
    return losses


def test_the_same_example_three_times():
    linen = from_linen(LinenNet(), output_loss, example=EXAMPLE)
    plain = from_functions(plain_init, plain_loss)
    net = from_nnx(NNXNet, output_loss)
    params = jax.jit(plain.init)(jax.random.key(0)).params
    first = {"kernel": params["w1"], "bias": params["b1"]}
    second = {"kernel": params["w2"], "bias": params["b2"]}
    losses = losses_of(plain, params)
    assert losses[-1] < losses[0]
    assert losses_of(linen, {"Dense_0": first, "Dense_1": second}) == losses
    assert losses_of(net, {"layers": {0: first, 1: second}}) == losses


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (
            lambda: from_linen(LinenNet(), output_loss, example=EXAMPLE),
            {
                "Dense_0": {"kernel": ("i", "o"), "bias": None},
                "Dense_1": {"kernel": None, "bias": None},
            },
        ),
        (
            lambda: from_nnx(NNXNet, output_loss),
            {
                "layers": {
                    0: {"kernel": ("i", "o"), "bias": None},
                    1: {"kernel": None, "bias": None},
                }
            },
        ),
    ],
    ids=["linen", "nnx"],
)
@pytest.mark.parametrize("in_mesh", [False, True])
def test_trees_and_axes(model, axes, in_mesh):
    """Logical names come out as they are; no mesh is needed, none gets in the way."""
    made = model()
    assert made.axes == axes
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    init = jax.jit(made.init)
    if in_mesh:
        with jax.set_mesh(mesh):
            variables = init(jax.random.key(0))
            made.loss(*variables, make_batch(), jax.random.key(1), train=True)
    else:
        variables = init(jax.random.key(0))
    is_names = lambda leaf: leaf is None or isinstance(leaf, tuple)
    shape = jax.tree.structure(variables.params)
    assert jax.tree.structure(made.axes, is_leaf=is_names) == shape
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(variables))
    assert variables.extra == {}


def test_making_an_adapter_allocates_nothing():
    gc.collect()
    before = len(jax.live_arrays())
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = (
        from_nnx(NNXNet, output_loss),
        from_linen(LinenNet(), output_loss, example=EXAMPLE),
    )
    assert len(jax.live_arrays()) == before
    for model in made:
        jax.eval_shape(model.init, key)
    assert len(jax.live_arrays()) == before


class LinenStats(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(OUT)(x))


class NNXStats(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(IN, momentum=0.5, rngs=rngs)
        self.dense = nnx.Linear(IN, OUT, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(self.norm(x)))


STATS = {
    "linen": lambda: from_linen(LinenStats(), output_loss, example=EXAMPLE),
    "nnx": lambda: from_nnx(NNXStats, output_loss),
}


@pytest.mark.parametrize("kind", STATS)
def test_batch_statistics_are_extra(kind):
    model = STATS[kind]()
    params, extra = model.init(jax.random.key(0))
    batch = make_batch()
    sums, new = model.loss(params, extra, batch, jax.random.key(1), train=True)
    assert jax.tree.structure(new) == jax.tree.structure(extra)
    means = [leaf for leaf in jax.tree.leaves(new) if np.any(leaf != 0)]
    np.testing.assert_allclose(
        means[0], 0.5 * batch["inputs"].mean(axis=0), rtol=1e-4, atol=1e-6
    )
    # Evaluation reads them and leaves them, and drops nothing.
    results = [
        model.loss(params, new, batch, jax.random.key(seed), train=False)
        for seed in (1, 2)
    ]
    assert float(results[0][0]["loss"][0]) == float(results[1][0]["loss"][0])
    assert results[0][1] is new
    assert float(sums["loss"][0]) != float(results[0][0]["loss"][0])


@pytest.mark.parametrize("kind", STATS)
def test_dropout_follows_from_the_steps_key_alone(kind):
    model = STATS[kind]()
    params, extra = model.init(jax.random.key(0))
    loss = jax.jit(
        lambda extra, key: model.loss(params, extra, make_batch(), key, train=True)
    )
    first, new = loss(extra, jax.random.key(1))
    assert loss(extra, jax.random.key(1))[0] == first
    # Nothing random went into the state that the next step starts from.
    assert loss(new, jax.random.key(1))[0] == first
    assert loss(extra, jax.random.key(2))[0] != first
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, extra, new))}
    assert dtypes == {jnp.dtype("float32")}


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return x * self.one


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_a_call_sows_stays_out_of_the_state():
    model = from_nnx(Sows, lambda outputs, batch: {"loss": (outputs.sum(), 1.0)})
    params, extra = model.init(jax.random.key(0))
    _, new = model.loss(params, extra, make_batch(), jax.random.key(0), train=True)
    assert extra == new == {}


class Told(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x, *, deterministic):
        return x * self.one * (1 if deterministic else 2)


def test_a_call_that_asks_for_the_mode_is_told():
    model = from_nnx(Told, lambda outputs, batch: {"loss": (outputs.sum(), 1.0)})
    variables = model.init(jax.random.key(0))
    batch = {"inputs": np.ones(3, np.float32)}
    for train, total in ((True, 6.0), (False, 3.0)):
        sums, _ = model.loss(*variables, batch, jax.random.key(0), train=train)
        assert float(sums["loss"][0]) == total


class TwoDrops(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Param(jnp.ones(()))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        make = lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))
        self.stack = nnx.vmap(make)(jax.random.split(rngs.params(), 2))

    def __call__(self, x):
        run = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))
        rows = [self.first(x), self.second(x), *run(self.stack, x)]
        return jnp.stack(rows) * self.one


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_every_dropout_has_a_mask_of_its_own(impl):
    masks = []

    def loss(outputs, batch):
        masks.extend(np.asarray(outputs) != 0)
        return {"loss": (jnp.sum(outputs), 1.0)}

    model = from_nnx(TwoDrops, loss)
    params, extra = model.init(jax.random.key(0, impl=impl))
    batch = {"inputs": np.ones((64,), np.float32)}
    model.loss(params, extra, batch, jax.random.key(1, impl=impl), train=True)
    assert len(masks) == 4
    assert len({mask.tobytes() for mask in masks}) == 4


def test_plain_functions_may_return_one_pair_and_take_the_mode():
    def loss(params, batch, rng, *, train):
        return jnp.sum(params * batch["inputs"]) * (2 if train else 1), 4

    model = from_functions(lambda key: jnp.ones(()), loss)
    params, extra = model.init(jax.random.key(0))
    batch = {"inputs": jnp.ones(3)}
    for train, total in ((True, 6.0), (False, 3.0)):
        sums, _ = model.loss(params, extra, batch, jax.random.key(0), train=train)
        assert [float(value) for value in sums["loss"]] == [total, 4.0]
        assert {value.dtype for value in sums["loss"]} == {jnp.dtype("float32")}
    assert model.axes is None


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(()),
        {"nll": (np.ones(()), 1.0)},
        {"loss": np.ones(())},
        {"loss": (np.ones(3), 1.0)},
        (np.ones(3), 3.0),
        None,
    ],
)
def test_a_loss_that_returns_something_else_is_refused(bad):
    model = from_functions(lambda key: jnp.ones(()), lambda *args: bad)
    with pytest.raises(ConfigError, match="the loss must return") as caught:
        model.loss(jnp.ones(()), {}, {}, jax.random.key(0), train=True)
    assert caught.value.path == "loss.factory"


def test_to_model_takes_what_it_says():
    ready = from_functions(plain_init, plain_loss)
    assert to_model(ready, None, example=EXAMPLE) is ready
    for made in (LinenNet(), NNXNet, lambda rngs: NNXNet(rngs)):
        model = to_model(made, output_loss, example=EXAMPLE)
        assert len(jax.tree.leaves(model.init(jax.random.key(0)).params)) == 4


@pytest.mark.parametrize(
    ("made", "loss", "path", "says"),
    [
        (from_functions(plain_init, plain_loss), output_loss, "loss.factory", "own"),
        (LinenNet(), None, "loss.factory", "brings no loss"),
        (NNXNet, None, "loss.factory", "brings no loss"),
        (None, output_loss, "model.factory", "returned a builtins.NoneType"),
        ((plain_init, plain_loss), None, "model.factory", "builtins.tuple; accepted"),
        (lambda rngs: 3, output_loss, "model.factory", "builder returned a int"),
    ],
)
def test_to_model_refuses_in_one_line(made, loss, path, says):
    with pytest.raises(ConfigError) as caught:
        to_model(made, loss, example=EXAMPLE)
    assert caught.value.path == path
    assert says in caught.value.problem
    assert "\n" not in str(caught.value)


def test_a_finished_nnx_module_is_refused():
    with nnx.use_eager_sharding(False):
        module = NNXNet(nnx.Rngs(0))
    with pytest.raises(ConfigError, match="NNXNet; accepted"):
        to_model(module, output_loss, example=EXAMPLE)


def test_a_missing_batch_entry_is_named():
    model = from_nnx(NNXNet, output_loss, inputs=("image",))
    params, extra = model.init(jax.random.key(0))
    with pytest.raises(ConfigError, match="reads 'image', the batch has inputs, targ"):
        model.loss(params, extra, make_batch(), jax.random.key(0), train=True)
    with pytest.raises(ConfigError, match="reads 'image'"):
        from_linen(LinenNet(), output_loss, example=EXAMPLE, inputs=("image",))
