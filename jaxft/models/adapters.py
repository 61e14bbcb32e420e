"""Turns anybody's model into pure functions over trees: `jaxft.types.Model`.

World: device. Floor: beside its peers, above `types`. Read `jaxft/types.py` before
this file and `jaxft/train/step.py`, which sees nothing but a `Model`, after it.

Three doors: plain functions, a Linen module, a builder of an NNX module. All random
numbers of a step follow from the key it is given, so that a restarted step repeats
itself; nothing random stays in the state. Making an adapter allocates nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jaxft.config import ConfigError
from jaxft.types import Batch, Model, PyTree, Sums, Variables

# (outputs of the model, batch) -> sums.
OutputLoss = Callable[[Any, Batch], Sums]

# Name -> shape and dtype of one small batch.
Example = Mapping[str, jax.ShapeDtypeStruct]

_ACCEPTED = (
    "a jaxft.types.Model, a flax.linen.Module, or a function of nnx.Rngs that "
    "builds a flax.nnx.Module"
)


def to_model(made: Any, loss: OutputLoss | None, *, example: Example) -> Model:
    """What a `model.factory` returned, as a `Model`.

    Args:
        made: a `Model`, a Linen module, or a builder of an NNX module.
        loss: what `loss.factory` returned; None if it is empty.
        example: shapes of one batch, for a Linen module's initialisation.

    Raises:
        ConfigError: `made` is none of these, or the loss is missing or one too many.
    """
    if isinstance(made, Model):
        if loss is not None:
            raise ConfigError(
                "loss.factory", "the model brings its own loss: set loss.factory=''"
            )
        return made
    is_linen = isinstance(made, nn.Module)
    if isinstance(made, nnx.Module) or not (is_linen or callable(made)):
        what = f"a {type(made).__module__}.{type(made).__qualname__}"
        raise ConfigError("model.factory", f"returned {what}; accepted: {_ACCEPTED}")
    if loss is None:
        raise ConfigError("loss.factory", "is empty, and the model brings no loss")
    if is_linen:
        return from_linen(made, loss, example=example)
    return from_nnx(made, loss)


def from_functions(
    init: Callable[[jax.Array], PyTree],
    loss: Callable[..., Any],
    *,
    axes: PyTree | None = None,
) -> Model:
    """Two plain functions.

    Args:
        init: typed key -> tree of parameters.
        loss: (params, batch, rng) -> `Sums` or one (sum, weight) pair; it may also
            take `train=`, a bool.
        axes: logical axis names, as `Model.axes`.
    """
    mode = _mode_argument(loss)

    def init_variables(key: jax.Array) -> Variables:
        return Variables(init(key), {})

    def compute(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        return _checked(loss(params, batch, rng, **mode(train))), extra

    return Model(init_variables, compute, axes)


def from_linen(
    module: nn.Module,
    loss: OutputLoss,
    *,
    example: Example,
    inputs: Sequence[str] = ("inputs",),
    rngs: Sequence[str] = ("dropout",),
) -> Model:
    """A Linen module and a loss of its outputs.

    The collection `params` is trained; every other collection (`batch_stats`) is the
    model's `extra`, updated in training. If the module's `__call__` takes `train` or
    `deterministic`, it is told.

    Args:
        module: an unbound module.
        loss: (outputs, batch) -> sums.
        example: shapes of one batch.
        inputs: the batch entries that the module is called with, in order.
        rngs: names of the random streams that it draws from in a step.

    Raises:
        ConfigError: the batch lacks an input.
    """
    mode = _mode_argument(type(module).__call__)

    def init_boxed(key: jax.Array) -> Mapping[str, PyTree]:
        shapes = _pick(example, inputs)
        arrays = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        streams = _streams(jax.random.fold_in(key, 1), rngs)
        return module.init({"params": key, **streams}, *arrays, **mode(False))

    def init(key: jax.Array) -> Variables:
        collections = dict(_unbox(init_boxed(key)))
        return Variables(collections.pop("params", {}), collections)

    def compute(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        variables = {"params": params, **extra}
        arrays = _pick(batch, inputs)
        streams = _streams(rng, rngs)
        if not (train and extra):
            outputs = module.apply(variables, *arrays, rngs=streams, **mode(train))
            return _checked(loss(outputs, batch)), extra
        outputs, updated = module.apply(
            variables, *arrays, rngs=streams, mutable=list(extra), **mode(train)
        )
        return _checked(loss(outputs, batch)), {**extra, **updated}

    boxed = jax.eval_shape(init_boxed, _abstract_key())
    specs = nn.get_partition_spec(boxed).get("params", {})
    return Model(init, compute, _names(specs))


def from_nnx(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: OutputLoss,
    *,
    inputs: Sequence[str] = ("inputs",),
) -> Model:
    """A builder of an NNX module and a loss of its outputs.

    `nnx.Param` variables are trained; every other variable (`nnx.BatchStat`) is the
    model's `extra`, updated in training. Random streams (`nnx.RngState`) are no part
    of the state: each step seeds all of them anew from its own key. The module is in
    `train()` or `eval()` mode; if its `__call__` takes `train` or `deterministic`, it
    is told as well. Both trees are plain dicts; a list has int keys.

    Args:
        build: makes the module. Flax places nothing meanwhile, mesh or no mesh.
        loss: (outputs, batch) -> sums.
        inputs: the batch entries that the module is called with, in order.

    Raises:
        ConfigError: `build` does not return an NNX module, or the batch lacks an
            input.
    """

    def make(key: jax.Array) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            return build(nnx.Rngs(key))

    def shapes(key: jax.Array) -> tuple[nnx.State, nnx.State, nnx.State]:
        module = make(key)
        if not isinstance(module, nnx.Module):
            raise ConfigError(
                "model.factory",
                f"its builder returned a {type(module).__qualname__}, not an "
                "flax.nnx.Module",
            )
        graphdefs.append(nnx.graphdef(module))
        return _split_nnx(module)

    # The static half of a module is not an array: it leaves the abstract call here.
    graphdefs: list[Any] = []
    params_like, extra_like, rng_like = jax.eval_shape(shapes, _abstract_key())
    graphdef = graphdefs[0]

    def init(key: jax.Array) -> Variables:
        params, extra, _ = _split_nnx(make(key))
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(extra))

    def compute(
        params: PyTree, extra: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Sums, PyTree]:
        states = (
            _fill(params_like, params),
            _fill(extra_like, extra),
            _seed_streams(rng_like, rng),
        )
        module = nnx.merge(graphdef, *states)
        (module.train if train else module.eval)()
        mode = _mode_argument(type(module).__call__)
        sums = _checked(loss(module(*_pick(batch, inputs), **mode(train)), batch))
        if not train:
            return sums, extra
        return sums, nnx.to_pure_dict(_split_nnx(module)[1])

    return Model(
        init, compute, _names(nnx.to_pure_dict(nnx.get_partition_spec(params_like)))
    )


def _split_nnx(module: nnx.Module) -> tuple[nnx.State, nnx.State, nnx.State]:
    """Parameters, extra and random streams; what a call sowed is dropped."""
    _, params, streams, _, extra = nnx.split(
        module, nnx.Param, nnx.RngState, nnx.Intermediate, ...
    )
    return params, extra, streams


def _fill(like: nnx.State, values: PyTree) -> nnx.State:
    """A new state of the form of `like` that holds `values`, a plain dict."""
    state = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(state, values)
    return state


def _seed_streams(like: nnx.State, rng: jax.Array) -> nnx.State:
    """Every stream its own key, derived from `rng`, and a count of zero.

    `nnx.reseed` would give all streams of one name the same key, and so two dropout
    layers the same mask.
    """
    flat = []
    for index, (path, leaf) in enumerate(nnx.to_flat_state(like)):
        value = leaf.get_value()
        if isinstance(leaf, nnx.RngKey):
            key = jax.random.fold_in(rng, index)
            seed = jax.random.split(key, value.shape) if value.shape else key
        else:
            seed = jnp.zeros(value.shape, value.dtype)
        flat.append((path, leaf.replace(seed)))
    return nnx.from_flat_state(flat)


def _streams(rng: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(rng, i) for i, name in enumerate(names)}


def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def _unbox(tree: PyTree) -> PyTree:
    """Linen's boxes opened, without the placement that their own `unbox` does."""
    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    return jax.tree.map(
        lambda leaf: leaf.value if is_box(leaf) else leaf, tree, is_leaf=is_box
    )


def _names(specs: PyTree) -> PyTree | None:
    """Partition specs as `Model.axes`; None if no leaf has names."""
    is_spec = lambda leaf: leaf is None or isinstance(leaf, jax.P)
    if not any(jax.tree.leaves(specs, is_leaf=is_spec)):
        return None
    name = lambda spec: tuple(spec) if spec else None
    return jax.tree.map(name, specs, is_leaf=is_spec)


def _mode_argument(function: Callable[..., Any]) -> Callable[[bool], dict[str, Any]]:
    """How a function is told whether it trains: `train=`, `deterministic=`, or not."""
    parameters = inspect.signature(function).parameters
    if "train" in parameters:
        return lambda train: {"train": train}
    if "deterministic" in parameters:
        return lambda train: {"deterministic": not train}
    return lambda _: {}


def _pick(batch: Mapping[str, Any], inputs: Sequence[str]) -> list[Any]:
    for name in inputs:
        if name not in batch:
            raise ConfigError(
                "model.factory",
                f"the model reads {name!r}, the batch has {', '.join(sorted(batch))}",
            )
    return [batch[name] for name in inputs]


def _checked(sums: Any) -> Sums:
    """What a loss returned, as float32 scalars by name.

    Raises:
        ConfigError: it is neither sums with a `loss` nor one (sum, weight) pair.
    """
    if isinstance(sums, tuple) and len(sums) == 2:
        sums = {"loss": sums}
    pairs = sums if isinstance(sums, Mapping) else {}
    right = "loss" in pairs and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(jnp.ndim(value) == 0 for value in pair)
        for pair in pairs.values()
    )
    if not right:
        raise ConfigError(
            "loss.factory",
            "the loss must return (sum, weight), or name -> (sum, weight) with "
            "'loss' among the names; all of them scalars",
        )
    return {
        name: (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))
        for name, (total, weight) in pairs.items()
    }
