"""The placement rules of `ShardingConfig`, parsed and applied to one leaf.

World: device. Floor: `parallel`, above `mesh`. Read `jaxft/parallel/mesh.py` before
this file and `jaxft/parallel/sharding.py`, which places whole trees, after it.

    logical_rules   batch=data+fsdp, embed=fsdp, embed=tensor, stats=-
    path_rules      .*/kernel = fsdp, tensor; .*/scale = -

In both, `-` is "no mesh axis", and `a+b` one dim over two mesh axes, the first the
outer one. A leaf is placed by the first of these that speaks of it:

    1. a path rule that matches its '/'-joined path;
    2. its logical axis names, where at least one of them has a rule;
    3. automatic FSDP: its largest dim that the `fsdp` axis divides;

and is replicated otherwise. Typed keys and scalars are always replicated.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxft.config import ConfigError, ShardingConfig
from jaxft.parallel.mesh import AXES

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Mesh axes of one dim, outermost first; empty where the dim is not split.
DimAxes = tuple[str, ...]

# Logical name -> what it may lie on; the first that fits a leaf is taken.
LogicalRules = Mapping[str, tuple[DimAxes, ...]]


class PathRule(NamedTuple):
    """One path rule.

    Attributes:
        pattern: must match the whole '/'-joined path of a leaf.
        dims: mesh axes, one entry a dim; empty for "replicated, whatever the rank".
    """

    pattern: re.Pattern[str]
    dims: tuple[DimAxes, ...]


def parse_logical_rules(
    text: str, *, mesh_axes: Iterable[str] = AXES
) -> dict[str, tuple[DimAxes, ...]]:
    """Parses `sharding.logical_rules`.

    Args:
        text: `name=axes` rules, comma separated; a name may come again, with other
            axes to try.
        mesh_axes: the axis names that exist.

    Raises:
        ConfigError: a rule is malformed, repeated, or names an unknown mesh axis.
    """
    field = "sharding.logical_rules"
    rules: dict[str, tuple[DimAxes, ...]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, entry = (piece.strip() for piece in part.partition("="))
        if not equals or not re.fullmatch(r"[\w.]+", name):
            raise ConfigError(field, f"{part!r} is not of the form name=axis")
        axes = _parse_entry(entry, field=field, rule=part, mesh_axes=mesh_axes)
        if axes in rules.get(name, ()):
            raise ConfigError(field, f"{part!r} is there twice: remove one")
        rules[name] = (*rules.get(name, ()), axes)
    return rules


def parse_path_rules(
    text: str, *, mesh_axes: Iterable[str] = AXES
) -> tuple[PathRule, ...]:
    """Parses `sharding.path_rules`.

    Args:
        text: `regex = entry, entry` rules, separated by semicolons, which a regular
            expression therefore cannot contain.
        mesh_axes: the axis names that exist.

    Raises:
        ConfigError: a rule is malformed, repeated, uses a mesh axis twice, or names
            an unknown one.
    """
    field = "sharding.path_rules"
    rules: list[PathRule] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        # From the right: a regular expression may contain an equals sign.
        source, equals, entries = (piece.strip() for piece in part.rpartition("="))
        if not equals or not source:
            raise ConfigError(field, f"{part!r} is not of the form regex = axis, axis")
        try:
            pattern = re.compile(source)
        except re.error as error:
            raise ConfigError(
                field, f"{source!r} is no regular expression: {error}"
            ) from error
        if any(rule.pattern.pattern == source for rule in rules):
            raise ConfigError(field, f"{source!r} is there twice: remove one")
        dims = tuple(
            _parse_entry(entry.strip(), field=field, rule=part, mesh_axes=mesh_axes)
            for entry in entries.split(",")
        )
        flat = [axis for axes in dims for axis in axes]
        if len(set(flat)) < len(flat):
            raise ConfigError(field, f"{part!r} uses a mesh axis for two dims")
        rules.append(PathRule(pattern, () if entries == "-" else dims))
    return tuple(rules)


def _parse_entry(
    text: str, *, field: str, rule: str, mesh_axes: Iterable[str]
) -> DimAxes:
    """The mesh axes of one dim."""
    if text == "-":
        return ()
    axes = tuple(axis.strip() for axis in text.split("+"))
    known = tuple(mesh_axes)
    for axis in axes:
        if axis not in known:
            raise ConfigError(
                field,
                f"{rule!r} names the mesh axis {axis!r}: there are "
                f"{', '.join(known)}, and - for none",
            )
    if len(set(axes)) < len(axes):
        raise ConfigError(field, f"{rule!r} uses a mesh axis twice in one dim")
    return axes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one leaf goes.

    Attributes:
        sharding: its sharding; axes of size one are left out of the spec.
        reason: what decided, for people.
    """

    sharding: NamedSharding
    reason: str


@dataclasses.dataclass(frozen=True)
class LeafPlanner:
    """The rules of one config on one mesh.

    Attributes:
        mesh: the mesh; an axis that it lacks counts as one device.
        logical: by logical name.
        paths: in the order in which they are tried.
        min_shard_elements: automatic FSDP replicates smaller leaves.
    """

    mesh: Mesh
    logical: LogicalRules
    paths: tuple[PathRule, ...]
    min_shard_elements: int

    @classmethod
    def from_config(cls, config: ShardingConfig | None, *, mesh: Mesh) -> LeafPlanner:
        """Parses the rules; None for the default config.

        Raises:
            ConfigError: a rule is malformed.
        """
        config = ShardingConfig() if config is None else config
        known = dict.fromkeys((*AXES, *mesh.axis_names))
        return cls(
            mesh,
            parse_logical_rules(config.logical_rules, mesh_axes=known),
            parse_path_rules(config.path_rules, mesh_axes=known),
            config.min_shard_elements,
        )

    def place(self, path: str, leaf: Any, *, names: Any) -> Placement:
        """Decides on one leaf; `names` are its logical names, or None.

        Raises:
            ConfigError: a path rule cannot be obeyed, or `names` do not fit the leaf.
        """
        if (fixed := self._fixed(leaf)) is not None:
            return fixed
        for rule in self.paths:
            if rule.pattern.fullmatch(path):
                return self._by_path(path, np.shape(leaf), rule=rule)
        if names is not None:
            _check_names(path, np.shape(leaf), names=names)
            if any(name in self.logical for name in names):
                return self._by_names(np.shape(leaf), names=names)
        return self.automatic(leaf)

    def automatic(self, leaf: Any) -> Placement:
        """Automatic FSDP."""
        if (fixed := self._fixed(leaf)) is not None:
            return fixed
        shape = np.shape(leaf)
        num_shards = self.size(("fsdp",))
        if num_shards == 1:
            return self.placement((), "replicated: the fsdp axis has one device")
        if math.prod(shape) < max(self.min_shard_elements, 1):
            return self.placement((), "replicated: too small")
        fitting = [d for d, length in enumerate(shape) if length % num_shards == 0]
        if not fitting:
            return self.placement((), f"replicated: nothing divides by {num_shards}")
        # Of equals the last: rows of a row-major matrix stay whole elsewhere.
        best = max(fitting, key=lambda d: (shape[d], d))
        dims = tuple(("fsdp",) if d == best else () for d in range(len(shape)))
        return self.placement(dims, "automatic fsdp")

    def placement(self, dims: Sequence[DimAxes], reason: str) -> Placement:
        """The sharding whose dims lie on these axes."""
        entries: list[str | DimAxes | None] = []
        for axes in dims:
            real = self.real(axes)
            entries.append(real if len(real) > 1 else real[0] if real else None)
        while entries and entries[-1] is None:
            entries.pop()
        return Placement(NamedSharding(self.mesh, PartitionSpec(*entries)), reason)

    def batch_axes(self) -> DimAxes:
        """Mesh axes of a batch's rows: the first rule for `batch`.

        Raises:
            ConfigError: there is none.
        """
        if "batch" not in self.logical:
            raise ConfigError(
                "sharding.logical_rules",
                "has no rule for 'batch': say batch=data+fsdp, or batch=- to give "
                "every device all rows",
            )
        return self.logical["batch"][0]

    def size(self, axes: DimAxes) -> int:
        """Number of shards of a dim that lies on these axes."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    def real(self, axes: DimAxes) -> DimAxes:
        """Those of the axes that have more than one device."""
        return tuple(axis for axis in axes if self.size((axis,)) > 1)

    def check_matched(self, paths: Sequence[str]) -> None:
        """Refuses a path rule that speaks of nothing: most likely a typing error."""
        for rule in self.paths:
            if not any(map(rule.pattern.fullmatch, paths)):
                raise ConfigError(
                    "sharding.path_rules",
                    f"{rule.pattern.pattern!r} matches none of {len(paths)} leaves, "
                    f"whose first is {paths[0]!r}"
                    if paths
                    else "there are no leaves to match",
                )

    def _fixed(self, leaf: Any) -> Placement | None:
        """The placement of a leaf that no rule may split."""
        if _is_key(leaf):
            return self.placement((), "typed key")
        return None if np.shape(leaf) else self.placement((), "scalar")

    def _by_path(
        self, path: str, shape: tuple[int, ...], *, rule: PathRule
    ) -> Placement:
        source = rule.pattern.pattern
        if rule.dims and len(rule.dims) != len(shape):
            raise ConfigError(
                "sharding.path_rules",
                f"{source!r} has {len(rule.dims)} entries, but {path!r} is of "
                f"shape {shape}: give one a dim",
            )
        for length, axes in zip(shape, rule.dims, strict=False):
            if length % self.size(axes):
                raise ConfigError(
                    "sharding.path_rules",
                    f"{source!r} splits {length} of {path!r}, of shape {shape}, "
                    f"over {self.size(axes)} devices of {'+'.join(axes)}",
                )
        return self.placement(rule.dims, f"path rule {source!r}")

    def _by_names(self, shape: tuple[int, ...], *, names: Any) -> Placement:
        used: set[str] = set()
        dims: list[DimAxes] = []
        for length, name in zip(shape, names, strict=True):
            chosen: DimAxes = ()
            for axes in self.logical.get(name, ()):
                real = self.real(axes)
                fits = length > 0 and length % self.size(real) == 0
                # A rule that splits nothing on this mesh gives way; `-` does not.
                if not axes or (real and fits and used.isdisjoint(real)):
                    chosen = real
                    break
            used |= set(chosen)
            dims.append(chosen)
        text = ", ".join("-" if name is None else str(name) for name in names)
        return self.placement(dims, f"logical ({text})")


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _check_names(path: str, shape: tuple[int, ...], *, names: Any) -> None:
    if not isinstance(names, tuple | list) or len(names) != len(shape):
        raise ConfigError(
            "model.factory",
            f"Model.axes has {names!r} for {path!r} of shape {shape}: give a tuple "
            "of one name or None a dim",
        )
