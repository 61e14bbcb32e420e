"""The run record: what a step is, beside its arrays, in one JSON object.

World: host-only. Floor: above `layout`. Read `jaxft/checkpoint/layout.py` before and
`jaxft/checkpoint/leaves.py` after.

It holds the label, the timeline, the data position, what the run wants back, the
evaluation, and the tree of the state with the type of every leaf.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxft import records
from jaxft.checkpoint import layout

FORMAT_NAME = "jaxft-checkpoint"
FORMAT_VERSION = 1

RECORD_FILE = "metadata"


class RecordError(ValueError):
    """A run record that cannot be understood: the step is damaged."""


# --- leaf kinds ---------------------------------------------------------------


class LeafKind(enum.StrEnum):
    """What a leaf was when it was saved."""

    ARRAY = "array"
    WEAK = "weak_array"
    NUMPY = "numpy"
    NUMPY_SCALAR = "numpy_scalar"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    TEXT = "str"


PYTHON_KINDS = frozenset({LeafKind.INT, LeafKind.FLOAT, LeafKind.BOOL, LeafKind.TEXT})
_SPEC = re.compile(r"(\w+) ([\w<>]+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Type and shape of one leaf; `str()` of it is what the run record holds.

    Attributes:
        kind: what it was.
        dtype: name of its dtype, `key<...>` for typed keys; empty for Python values.
        shape: its global shape.
    """

    kind: LeafKind
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it has no element, and so nothing on disk."""
        return 0 in self.shape

    def __str__(self) -> str:
        if self.kind in PYTHON_KINDS:
            return str(self.kind)
        return f"{self.kind} {self.dtype}[{','.join(map(str, self.shape))}]"


def item_bytes(dtype: str) -> int:
    """Bytes of one element in memory; of a typed key, those of its data.

    Args:
        dtype: as in a `LeafSpec`; also empty, for Python numbers.
    """
    if dtype.startswith("key<"):
        return 16 if "rbg" in dtype else 8
    try:
        return np.dtype(dtype or "int64").itemsize
    except TypeError:
        return 1


def parse_leaf(text: str) -> LeafSpec:
    """Reads what `str` of a `LeafSpec` gave.

    Raises:
        RecordError: it is something else.
    """
    try:
        if (match := _SPEC.fullmatch(text)) is None:
            return LeafSpec(LeafKind(text))
        kind, dtype, dims = match.groups()
        return LeafSpec(
            LeafKind(kind), dtype, tuple(int(dim) for dim in dims.split(",") if dim)
        )
    except ValueError as error:
        raise RecordError(f"unknown kind of leaf {text!r}") from error


def leaf_specs(record: Mapping[str, Any]) -> dict[str, LeafSpec]:
    """Leaf path -> type and shape, of a run record."""
    specs: dict[str, LeafSpec] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, str):
            specs["/".join(path)] = parse_leaf(node)
        elif isinstance(node, dict):
            for key, child in node.items():
                walk(child, (*path, key))
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, (*path, str(index)))
        elif node is not None:
            raise RecordError(f"unknown entry {node!r} at {'/'.join(path)}")

    walk(record["state"], ())
    return specs


# --- the run record -----------------------------------------------------------


_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "timeline": (int,),
    "time": (int, float),
    "data": (dict,),
    "run": (dict,),
    "metrics": (dict,),
    "state": (dict, list),
}


def make_record(
    step: int,
    *,
    time_secs: float,
    state: Any,
    data: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    timeline: int = 0,
    has_manifest: bool = False,
) -> dict[str, Any]:
    """The run record of one step, detached from its arguments.

    Args:
        step: finished step attempts.
        time_secs: seconds since the epoch.
        state: the tree of `str(LeafSpec)`, nested in dicts and lists.
        data: the data position.
        run: whatever else the run wants back; tuples come back as lists.
        metrics: name -> value; values that are not finite are stored as text.
        timeline: rollbacks before it; see `jaxft.checkpoint.decisions`.
        has_manifest: whether the step is given a manifest: it is damaged without.

    Raises:
        TypeError: a value is not JSON.
        ValueError: a number in `data` or `run` is not finite.
    """
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    return {
        "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
        "step": step,
        "timeline": timeline,
        "time": time_secs,
        "data": _json_value(data or {}, "data"),
        "run": _json_value(run or {}, "run"),
        "metrics": {
            name: value if math.isfinite(value) else str(value)
            for name, value in numbers.items()
        },
        "state": state,
    } | ({"has_manifest": True} if has_manifest else {})


def _json_value(value: Any, path: str) -> Any:
    """A deep copy that JSON gives back as it is, but for tuples."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}: JSON holds finite numbers only")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{path} has the key {key!r}: JSON keys are text")
        return {
            key: _json_value(child, f"{path}.{key}") for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json_value(child, f"{path}[{i}]") for i, child in enumerate(value)]
    raise TypeError(
        f"{path} is a {type(value).__name__}: the run record takes None, bool, int, "
        "float, str, lists and dicts of them"
    )


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The run record of a step folder.

    Raises:
        OSError: it cannot be read.
        RecordError: it is damaged.
        FaultError: a newer jaxft wrote it (kind CONFIG).
    """
    file = pathlib.Path(path, layout.RUN_ITEM, RECORD_FILE)
    try:
        record = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is not JSON: {error}") from error
    form = record.get("format") if isinstance(record, dict) else None
    form = form if isinstance(form, dict) else {}
    version = form.get("version")
    if form.get("name") != FORMAT_NAME or type(version) is not int or version < 1:
        # A foreign record or ours with a flipped bit: nobody can tell.
        raise RecordError(f"{file} is not a run record of {FORMAT_NAME}")
    if version != FORMAT_VERSION:
        text = (
            f"{path} is written as {FORMAT_NAME} {version}, this jaxft reads "
            f"{FORMAT_NAME} {FORMAT_VERSION}: use the jaxft that wrote it"
        )
        raise records.fault_error(records.FaultKind.CONFIG, text)
    for name, kinds in _RECORD_TYPES.items():
        if type(record.get(name)) not in kinds:
            raise RecordError(f"{file} has no {name} that can be understood")
    if type(record.get("has_manifest", False)) is not bool:
        raise RecordError(f"{file} has no has_manifest that can be understood")
    try:
        record["metrics"] = {name: float(x) for name, x in record["metrics"].items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{file} has metrics that are no numbers") from error
    return record
