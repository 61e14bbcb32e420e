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
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxft import settings
from jaxft.checkpoint import host_memory, policies
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.checkpoint.options import MayCommit, always
from jaxft.config import Config, ConfigError, RematConfig
from jaxft.data.iterator import BatchIterator
from jaxft.data.pipeline import Pipeline, heldout_batches
from jaxft.data.sources import Sources
from jaxft.data.windows import parse_skip
from jaxft.faults.plan import PlannedFault, parse_plan, poisoned
from jaxft.faults.poison import (
    GRADIENT_FIELD,
    LOSS_FIELD,
    PoisonedBatches,
    with_factors,
)
from jaxft.goodput.experience import read_experience
from jaxft.intervals import Experience
from jaxft.models.adapters import to_model
from jaxft.parallel.facts import collect_facts
from jaxft.parallel.mesh import make_mesh
from jaxft.parallel.precision import make_precision
from jaxft.parallel.sharding import check_batch, local_rows
from jaxft.patterns import Patterns
from jaxft.records import Emit
from jaxft.train.injected import with_poison
from jaxft.train.optimizer import train_only
from jaxft.train.step import TrainStep, make_eval_step, make_train_step
from jaxft.types import Model, TrainState

HostBatch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that the loop moves, introduced to each other.

    Attributes:
        config: resolved and locked.
        train_step: see `jaxft.train.step.TrainStep`; it knows the mesh and the state.
        eval_step: jitted (state, batch) -> sums, or what stands for it.
        iterator: local host batches in order, with a position.
        heldout: local host batches for evaluation.
        example: a local host batch of zeros, to compile for.
        manager: the checkpoints.
        facts: what can change numbers, config fields included.
        items: what a step takes in: its unit and how many.
        faults: what is to happen on purpose.
    """

    config: Config
    train_step: TrainStep
    eval_step: Any
    iterator: BatchIterator
    heldout: Sequence[HostBatch]
    example: HostBatch
    manager: CheckpointManager
    facts: dict[str, Any]
    items: tuple[str, int]
    faults: tuple[PlannedFault, ...] = ()

    def num_params(self) -> int:
        """Elements of all parameters."""
        params = self.train_step.abstract_state.params
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """What of a run is compiled.

    Attributes:
        mesh: of the devices.
        row: a row of the data.
        batch: shapes of a global batch.
        model: pure functions.
        train_step: its step.
    """

    mesh: jax.sharding.Mesh
    row: Mapping[str, np.ndarray]
    batch: Mapping[str, jax.ShapeDtypeStruct]
    model: Model
    train_step: TrainStep


def build(
    config: Config,
    *,
    workdir: str | os.PathLike[str],
    emit: Emit,
    poll: Callable[[], None] = lambda: None,
    devices: Sequence[jax.Device] | None = None,
    may_commit: MayCommit = always,
    plan: str | None = None,
) -> Parts:
    """Builds a run from a resolved, locked config.

    Args:
        config: the run as data.
        workdir: its folder; only named here, not touched.
        emit: where the parts report to.
        poll: called while the loop waits for input; it may raise.
        devices: the devices to use; all of them when left out.
        may_commit: asked just before each commit; see `CheckpointManager`.
        plan: what `remat.plan` came to where it is `auto`.

    Raises:
        ConfigError: something cannot work; it names the config path.
    """
    faults = _faults(config)
    skipped = parse_skip(config.data.skip)
    sources = _sources(config)
    core = build_core(config, devices=devices, plan=plan, sources=sources)
    mesh, row, model, step = core.mesh, core.row, core.model, core.train_step
    metrics = _check_loss(model, config, state=step.abstract_state, batch=core.batch)
    step.check_memory(_memory_of_device(mesh))
    rows = local_rows(step.batch_sharding, config.data.global_batch)
    pipeline = _checked(
        "data.factory",
        config.data.factory,
        lambda: Pipeline(sources.train, config=config.data, rows=rows),
    )
    parts = {
        "config": config,
        "train_step": step,
        "eval_step": _eval_step(model, config, step=step),
        "heldout": _heldout(sources, config, rows=rows),
        "example": {
            name: np.zeros((len(rows), *x.shape), x.dtype) for name, x in row.items()
        },
        "manager": _manager(
            config, metrics=metrics, workdir=workdir, emit=emit, may_commit=may_commit
        ),
        "facts": _facts(config, mesh=mesh, pipeline=pipeline),
        "items": _items(row, config.data.global_batch),
        "faults": faults,
    }
    batches = pipeline
    if bad := poisoned(faults):
        batches = PoisonedBatches(pipeline, bad)
        parts["example"] = with_factors(parts["example"])
        parts["heldout"] = [with_factors(batch) for batch in parts["heldout"]]
    # Last: it starts threads, and nothing may be refused any more.
    iterator = BatchIterator(
        batches,
        num_threads=config.data.num_threads,
        prefetch=config.data.prefetch,
        skipped=skipped,
        poll=poll,
    )
    return Parts(iterator=iterator, **parts)


def build_core(
    config: Config,
    *,
    devices: Sequence[jax.Device] | None = None,
    plan: str | None = None,
    sources: Sources | None = None,
) -> Core:
    """Builds what is compiled: also for devices that are not here.

    Args:
        config: resolved.
        devices: real ones, or those of a topology; all when left out.
        plan: instead of `remat.plan`.
        sources: where they are made already.

    Raises:
        ConfigError: something cannot work; it names the config path.
    """
    mesh = make_mesh(config.mesh, devices=devices)
    check_batch(
        config.data.global_batch,
        num_microbatches=config.train.num_microbatches,
        mesh=mesh,
        config=config.sharding,
    )
    row = _first_row(_sources(config) if sources is None else sources, config)
    batch = {
        name: jax.ShapeDtypeStruct((config.data.global_batch, *x.shape), x.dtype)
        for name, x in row.items()
    }
    remat = config.remat
    if plan is not None:
        remat = dataclasses.replace(remat, plan=plan)
    elif remat.plan.strip() == "auto":
        raise ConfigError("remat.plan", "auto is decided by a run: name a plan here")
    model = _poisonable(_model(config, remat, example=batch), _faults(config))
    step = _train_step(model, config, mesh=mesh)
    return Core(mesh=mesh, row=row, batch=batch, model=model, train_step=step)


def _faults(config: Config) -> tuple[PlannedFault, ...]:
    return parse_plan(
        config.faults.inject,
        num_steps=config.train.num_steps,
        num_bad=config.train.max_nonfinite,
        num_high=config.rollback.spike_steps,
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
        where = "looked in the current folder and in PYTHONPATH"
        raise ConfigError(
            path, f"cannot import {module_name}: {error} ({where})"
        ) from error
    except (Exception, SystemExit) as error:
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
    except (Exception, SystemExit) as error:
        raise ConfigError(path, _blame(name, error)) from error


def _blame(name: str, error: BaseException) -> str:
    """The error, and the last place in code that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename]
    frame = (own or frames)[-1]
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
    for source in filter(lambda source: source is not None, made):
        needed = ("__len__", "__getitem__", "fingerprint")
        if missing := [name for name in needed if not hasattr(source, name)]:
            raise ConfigError(
                "data.factory",
                f"the {type(source).__name__} from {config.data.factory} has no "
                f"{', '.join(missing)}: see jaxft.data.sources.Source",
            )
    _check_vocabulary(made, config)
    return made


def _first_row(sources: Sources, config: Config) -> dict[str, np.ndarray]:
    """Row 0, read once: rows may be slow."""
    row = _checked("data.factory", config.data.factory, lambda: sources.train[0])
    if not isinstance(row, Mapping):
        raise ConfigError(
            "data.factory",
            f"a row of {config.data.factory} is a {type(row).__name__}, "
            "not a dict of arrays",
        )
    return {name: np.asarray(value) for name, value in row.items()}


def _check_vocabulary(sources: Sources, config: Config) -> None:
    """An id beyond the vocabulary would train without an error, on nonsense."""
    top = getattr(sources.train, "max_token", None)
    if top is not None and top >= config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, but the corpus holds token id {top}: "
            f"set at least {top + 1}",
        )


def _model(
    config: Config,
    remat: RematConfig,
    *,
    example: Mapping[str, jax.ShapeDtypeStruct],
) -> Model:
    made = _call(config.model.factory, "model.factory", config.model, remat)
    loss = None
    if config.loss.factory:
        loss = _call(config.loss.factory, "loss.factory", config.loss)
    return _checked(
        "model.factory",
        config.model.factory,
        lambda: to_model(made, loss, example=example),
    )


def _poisonable(model: Model, faults: Sequence[PlannedFault]) -> Model:
    """The model as it is, unless the plan has bad data."""
    if not poisoned(faults):
        return model
    fields = {"loss_field": LOSS_FIELD, "gradient_field": GRADIENT_FIELD}
    return model._replace(loss=with_poison(model.loss, **fields))


def _train_step(model: Model, config: Config, *, mesh: jax.sharding.Mesh) -> TrainStep:
    name = config.optimizer.factory
    optimizer = _call(name, "optimizer.factory", config.optimizer)
    if not isinstance(optimizer, optax.GradientTransformation):
        hint = ""
        if isinstance(optimizer, optax.MultiSteps):
            hint = ": call its gradient_transformation()"
        raise ConfigError(
            "optimizer.factory",
            f"{name} returned a {type(optimizer).__name__}, "
            f"not an optax.GradientTransformation{hint}",
        )
    trainable = Patterns(config.optimizer.trainable)
    return _checked(
        "model.factory",
        config.model.factory,
        lambda: make_train_step(
            model,
            train_only(optimizer, trainable),
            mesh=mesh,
            config=config.train,
            precision=config.precision,
            sharding=config.sharding,
        ),
    )


def _eval_step(model: Model, config: Config, *, step: TrainStep) -> Any:
    return make_eval_step(
        model.loss,
        precision=config.precision,
        batch_sharding=step.batch_sharding,
        virtual_shards=config.train.virtual_shards,
    )


def _memory_of_device(mesh: jax.sharding.Mesh) -> int | None:
    """Free bytes of a device of this process; those on a CPU share the host's."""
    local = mesh.local_devices
    if stats := local[0].memory_stats():
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    available = host_memory.available_bytes()
    return None if available is None else available // len(local)


def _check_loss(
    model: Model, config: Config, *, state: TrainState, batch: Mapping[str, Any]
) -> Collection[str]:
    """Traces the loss once, so that a mistake in it is one line at the start.

    Returns:
        The names of the metrics that it gives.
    """
    name = config.loss.factory or config.model.factory
    path = "loss.factory" if config.loss.factory else "model.factory"

    def trace() -> Any:
        loss = functools.partial(model.loss, train=True)
        params = make_precision(config.precision).cast_compute
        return jax.eval_shape(
            lambda state, batch: dict(
                loss(params(state.params), state.extra, batch, state.rng)[0]
            ),
            state,
            batch,
        )

    return _checked(path, name, trace)


def _manager(
    whole: Config,
    *,
    metrics: Collection[str],
    workdir: str | os.PathLike[str],
    emit: Emit,
    may_commit: MayCommit,
) -> CheckpointManager:
    config = whole.checkpoint
    for metric in sorted(policies.metrics_of(policies.parse_keep(config.keep))):
        if not whole.eval.every_steps:
            problem = f"{metric} is a metric of the evaluation: set eval.every_steps"
            raise ConfigError("checkpoint.keep", problem)
        if metric not in metrics:
            known = ", ".join(sorted(metrics))
            problem = f"there is no metric {metric!r}; the evaluation gives {known}"
            raise ConfigError("checkpoint.keep", problem)
    return CheckpointManager(
        pathlib.Path(workdir) / "checkpoints",
        save=config.save,
        keep=config.keep,
        timeout_secs=config.timeout_secs,
        on_save_error=config.on_save_error,
        max_failed_saves=config.max_failed_saves,
        layout=config.layout.value,
        codec=config.codec.value,
        full_every=config.full_every,
        verify=config.verify.value,
        health=config.health,
        memory_budget=config.memory_budget,
        mirror=config.mirror,
        mirror_rate=config.mirror_rate,
        experience=_experience(whole, workdir=workdir),
        clock_is_told=True,
        may_commit=may_commit,
        emit=emit,
    )


def _experience(config: Config, *, workdir: str | os.PathLike[str]) -> Experience:
    """What `auto` goes by besides its own measurements."""
    expected_hours = config.checkpoint.expected_failure_hours
    if not policies.names_auto(config.checkpoint.save):
        return Experience(expected_hours=expected_hours)
    return read_experience(
        pathlib.Path(workdir) / "events",
        expected_hours=expected_hours,
        now_secs=time.time(),
        own_pid=os.getpid(),
    ).experience


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
    facts = settings.flatten(config, only_numbers=True)
    for late in ("data.skip", "train.virtual_shards"):
        if not facts[late]:
            del facts[late]  # As in runs from before there was such a setting.
    return facts | collect_facts(mesh) | {"corpus": pipeline.fingerprint}


def _items(row: Mapping[str, np.ndarray], global_batch: int) -> tuple[str, int]:
    """Token rows count in tokens, others in rows."""
    x = row.get("inputs")
    if x is not None and x.ndim == 1 and np.issubdtype(x.dtype, np.integer):
        return "tokens", global_batch * x.size
    return "rows", global_batch
