"""Config -> the parts of a run. The only place that sees the whole config.

World: device. Floor: above the rooms, below `loop`. Read `jaxft/loop.py` next, which
puts the parts in motion. Nothing here writes to the workdir or allocates the state:
whatever cannot work is found before the run touches anything.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxft import config as configs
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import CheckpointConfig, Config, ConfigError
from jaxft.data.iterator import BatchIterator
from jaxft.data.pipeline import Pipeline, heldout_batches
from jaxft.data.sources import Sources
from jaxft.models.adapters import to_model
from jaxft.parallel.facts import collect_facts
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.precision import make_precision
from jaxft.parallel.sharding import (
    batch_sharding,
    check_batch,
    explain,
    local_rows,
    plan_state_placements,
    put_batch,
)
from jaxft.records import Emit
from jaxft.train.state import StateFactory, abstract_state, make_key
from jaxft.train.step import make_eval_step, make_train_step
from jaxft.types import Batch, Model, Sums, TrainState

HostBatch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that the loop moves, introduced to each other.

    Attributes:
        config: resolved and locked.
        mesh: where the run lives.
        factory, key, shardings: make the first state.
        placements: why each leaf is where it is.
        target: the state as `ShapeDtypeStruct` with shardings.
        train_step: jitted (state, batch, control) -> (state, output).
        eval_step: jitted (state, batch) -> sums.
        iterator: local host batches in order, with a position.
        heldout: local host batches for evaluation.
        example: a local host batch of zeros, to compile for.
        place: (host batch, control) -> (batch, control word), on the devices.
        manager: the checkpoints.
        facts: what can change numbers, config fields included.
        items: what a step takes in: its unit and how many.
    """

    config: Config
    mesh: jax.sharding.Mesh
    factory: StateFactory
    key: jax.Array
    shardings: TrainState
    placements: TrainState
    target: TrainState
    train_step: jax.stages.Wrapped
    eval_step: Callable[[TrainState, Batch], Sums]
    iterator: BatchIterator
    heldout: Sequence[HostBatch]
    example: HostBatch
    place: Callable[..., tuple[Batch, jax.Array]]
    manager: CheckpointManager
    facts: dict[str, Any]
    items: tuple[str, int]

    def init_state(self) -> TrainState:
        """The state at step 0, born sharded."""
        return self.factory.init_state(self.key, shardings=self.shardings)

    def explain(self) -> str:
        """A table of every leaf: shape, spec, bytes per device, why."""
        return explain(self.target, self.placements)

    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.target.params))


def build(
    config: Config,
    *,
    workdir: str | os.PathLike[str],
    emit: Emit,
    poll: Callable[[], None] = lambda: None,
    devices: Sequence[jax.Device] | None = None,
) -> Parts:
    """Builds a run from a resolved, locked config.

    Args:
        config: the run as data.
        workdir: its folder; only named here, not touched.
        emit: where the parts report to.
        poll: called while the loop waits for input; it may raise.
        devices: the devices to use; all of them when left out.

    Raises:
        ConfigError: something cannot work; it names the config path.
    """
    mesh = make_mesh(config.mesh, devices=devices)
    precision = make_precision(config.precision)
    check_batch(
        config.data.global_batch,
        num_microbatches=config.train.num_microbatches,
        mesh=mesh,
        config=config.sharding,
    )
    rows_sharding = batch_sharding(mesh, config=config.sharding)
    rows = local_rows(rows_sharding, config.data.global_batch)
    sources = _sources(config)
    _check_vocabulary(sources, config)
    pipeline = Pipeline(sources.train, config=config.data, rows=rows)
    model = _model(config, example=_batch_shapes(sources, config.data.global_batch))
    optimizer = _optimizer(config)
    factory = StateFactory(model, optimizer, precision=precision)
    key = make_key(config.train)
    shapes = _checked("model.factory", config.model.factory, factory.plan_shapes, key)
    placements = plan_state_placements(
        shapes, mesh=mesh, config=config.sharding, axes=model.axes
    )
    shardings = jax.tree.map(lambda placement: placement.sharding, placements)
    return Parts(
        config=config,
        mesh=mesh,
        factory=factory,
        key=key,
        placements=placements,
        shardings=shardings,
        target=abstract_state(shapes, shardings=shardings),
        train_step=make_train_step(
            model.loss,
            optimizer,
            config=config.train,
            precision=precision,
            state_shardings=shardings,
        ),
        eval_step=make_eval_step(model.loss, precision=precision),
        iterator=BatchIterator(
            pipeline,
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
            poll=poll,
        ),
        heldout=_heldout(sources, config, rows=rows),
        example={
            name: np.zeros((len(rows), *row.shape), row.dtype)
            for name, row in _row_shapes(sources).items()
        },
        place=functools.partial(put_batch, sharding=rows_sharding),
        manager=_manager(config.checkpoint, workdir=workdir, emit=emit),
        facts=_facts(config, mesh=mesh, pipeline=pipeline),
        items=_items(sources, config.data.global_batch),
    )


def load_function(name: str, path: str) -> Callable[..., Any]:
    """The function that the config string `package.module:function` names.

    Raises:
        ConfigError: it cannot be imported; `path` is the config path to blame.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(path, f"{name!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(path, f"cannot import {module_name}: {error}") from error
    except Exception as error:
        raise ConfigError(path, f"importing {_blame(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(path, f"{module_name} has no function {function_name!r}")
    return function


def _call(name: str, path: str, *sections: Any) -> Any:
    return _checked(path, name, load_function(name, path), *sections)


def _checked(path: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls what a config string named; its errors become one line."""
    try:
        return function(*args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(path, _blame(name, error)) from error


def _blame(name: str, error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:300]
    place = f"{frame.filename}:{frame.lineno}"
    return f"{name} raised {type(error).__name__}: {message} ({place})"


def _sources(config: Config) -> Sources:
    made = _call(config.data.factory, "data.factory", config.data)
    if not isinstance(made, Sources):
        raise ConfigError(
            "data.factory",
            f"{config.data.factory} returned {type(made).__name__}, "
            "not a jaxft.data.sources.Sources",
        )
    return made


def _check_vocabulary(sources: Sources, config: Config) -> None:
    """An id beyond the vocabulary would train without an error, on nonsense."""
    top = getattr(sources.train, "max_token", None)
    if top is not None and top >= config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, but the corpus holds token id {top}: "
            f"set at least {top + 1}",
        )


def _model(config: Config, *, example: Mapping[str, jax.ShapeDtypeStruct]) -> Model:
    made = _call(config.model.factory, "model.factory", config.model, config.remat)
    loss = None
    if config.loss.factory:
        loss = _call(config.loss.factory, "loss.factory", config.loss)
    return _checked(
        "model.factory",
        config.model.factory,
        lambda: to_model(made, loss, example=example),
    )


def _optimizer(config: Config) -> optax.GradientTransformation:
    name = config.optimizer.factory
    made = _call(name, "optimizer.factory", config.optimizer)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            "optimizer.factory",
            f"{name} returned {type(made).__name__}, "
            "not an optax.GradientTransformation",
        )
    return made


def _manager(
    config: CheckpointConfig, *, workdir: str | os.PathLike[str], emit: Emit
) -> CheckpointManager:
    return CheckpointManager(
        pathlib.Path(workdir) / "checkpoints",
        save=config.save,
        keep=config.keep,
        timeout_secs=config.timeout_secs,
        emit=emit,
    )


def _heldout(sources: Sources, config: Config, *, rows: Any) -> Sequence[HostBatch]:
    if config.eval.every_steps == 0:
        return ()
    if sources.heldout is None:
        raise ConfigError(
            "eval.every_steps",
            "this data has no held-out part: set data.holdout_fraction, or 0 here",
        )
    return heldout_batches(
        sources.heldout,
        config=config.data,
        rows=rows,
        num_batches=config.eval.num_batches,
    )


def _facts(
    config: Config, *, mesh: jax.sharding.Mesh, pipeline: Pipeline
) -> dict[str, Any]:
    facts = configs.flatten(config, only_numbers=True)
    return facts | collect_facts(mesh) | {"corpus": pipeline.fingerprint}


def _row_shapes(sources: Sources) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in sources.train[0].items()}


def _batch_shapes(
    sources: Sources, global_batch: int
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((global_batch, *row.shape), row.dtype)
        for name, row in _row_shapes(sources).items()
    }


def _items(sources: Sources, global_batch: int) -> tuple[str, int]:
    """Token rows count in tokens, others in rows."""
    row = _row_shapes(sources).get("inputs")
    if row is not None and row.ndim == 1 and np.issubdtype(row.dtype, np.integer):
        return "tokens", global_batch * row.size
    return "rows", global_batch
