"""The parameters of another checkpoint that a run begins with: checked, then loaded.

World: device. Floor: a peer of `build`, below `worker`. Read
`jaxft/checkpoint/foreign.py` before and `jaxft/worker.py` after.

Every mistake in `init.*` that names, types and shapes can tell is found before the run
touches anything, and is one line that names the setting which would allow it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

from jaxft import patterns
from jaxft.checkpoint import foreign, foreign_fit, foreign_source, leaf_requests
from jaxft.config import ConfigError, InitConfig
from jaxft.records import Emit, FaultError, FaultKind
from jaxft.train.step import TrainStep

PyTree = Any

_MAX_SHOWN = 5


def check(chosen: InitConfig, params: PyTree) -> None:
    """Refuses what could not be loaded; reads no values.

    Args:
        chosen: what to begin with.
        params: the parameters as `jax.ShapeDtypeStruct`.

    Raises:
        ConfigError: there is no such checkpoint, it does not fit, or a glob or a rule
            fits nothing.
    """
    rules = rename_rules(chosen.rename)
    source = _open(chosen.checkpoint)
    _check_globs("init.paths", chosen.paths, source.segments)
    try:
        names = foreign.name_params(source, paths=chosen.paths, rename=rules)
    except FaultError as error:
        there = _listed(source.segments)
        path = "init.rename" if rules else "init.paths"
        raise ConfigError(path, f"{_one_line(error)}; it holds {there}") from error
    wanted = foreign_fit.by_path(params)
    _check_globs("init.optional", chosen.optional, wanted)
    _check_globs("init.allow_cast", chosen.allow_cast, wanted)
    options = foreign_fit.Options(
        optional=chosen.optional, allow_cast=chosen.allow_cast, strict=True
    )
    try:
        found = foreign_fit.compare(source, names, wanted, options=options)
    except (FaultError, OSError) as error:
        raise ConfigError("init.checkpoint", _one_line(error)) from error
    if text := _tell(found.differences):
        problem = f"{source.path} does not fit the parameters: {text}"
        raise ConfigError("init.checkpoint", problem)


def load(chosen: InitConfig, step: TrainStep, *, emit: Emit) -> PyTree:
    """The parameters, placed; what is optional and not stored is fresh.

    Raises:
        ConfigError: see `check`; or an integer does not fit its dtype.
        FaultError: what is stored is damaged.
        OSError: it cannot be read.
    """
    # Only where one may stay must there be a fresh one.
    target = step.init().params if chosen.optional else step.abstract_state.params
    try:
        return foreign.init_params(
            os.path.expanduser(chosen.checkpoint),
            target,
            paths=chosen.paths,
            rename=rename_rules(chosen.rename),
            optional=chosen.optional,
            allow_cast=chosen.allow_cast,
            emit=emit,
        ).tree
    except leaf_requests.TargetMismatchError as error:
        raise ConfigError("init.checkpoint", _listed(error.problems)) from error
    except FaultError as error:
        if error.fault.kind is not FaultKind.CONFIG:
            raise
        raise ConfigError("init.checkpoint", _one_line(error)) from error


def rename_rules(text: str) -> dict[str, str]:
    """Reads `stored = wanted, other = another`.

    Raises:
        ConfigError: it is something else.
    """
    rules = {}
    for rule in filter(None, (part.strip() for part in text.split(","))):
        old, equals, new = (side.strip() for side in rule.partition("="))
        if not equals:
            problem = f"{rule!r} is no rule: write stored = wanted"
            raise ConfigError("init.rename", problem)
        rules[old] = new
    return rules


def _open(address: str) -> foreign_source.ForeignSource:
    path = os.path.expanduser(address)
    if "://" not in path and not os.path.exists(path):
        raise ConfigError("init.checkpoint", f"{address} is not there")
    try:
        return foreign_source.ForeignSource(path)
    except (FaultError, OSError) as error:
        raise ConfigError("init.checkpoint", _one_line(error)) from error


def _check_globs(setting: str, text: str, paths: Collection[str]) -> None:
    """A glob that fits nothing was meant to fit something."""
    for glob in filter(None, (part.strip() for part in text.split(","))):
        if not patterns.Patterns(glob.lstrip("!")).select(paths):
            raise ConfigError(setting, f"{glob!r} fits none of {_listed(paths)}")


def _tell(found: foreign_fit.Differences) -> str:
    """What differs, and what would allow it; empty for nothing."""
    parts = []
    if found.missing:
        listed = _listed(found.missing)
        parts.append(f"not stored: {listed} (init.optional lets them stay fresh)")
    if found.unexpected:
        listed = _listed(found.unexpected)
        hint = "init.rename gives them other names, init.paths leaves them out"
        parts.append(f"stored, but no parameters: {listed} ({hint})")
    if found.casts:
        listed = _listed(
            f"{name} ({text.partition(':')[0]})" for name, text in found.casts.items()
        )
        parts.append(f"of another dtype: {listed} (init.allow_cast allows it)")
    if found.others:
        listed = _listed(f"{name}: {text}" for name, text in found.others.items())
        hint = "init.paths without them and init.optional let them stay fresh"
        parts.append(f"{listed} ({hint})")
    return "; ".join(parts)


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    rest = len(words) - _MAX_SHOWN
    shown = ", ".join(words[:_MAX_SHOWN])
    return f"{shown} ... and {rest} more" if rest > 0 else shown


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
