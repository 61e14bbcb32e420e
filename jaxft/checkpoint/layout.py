"""What a checkpoint root holds, by name: steps, leaves, the run record, discovery.

World: host-only. Floor: the lowest of `checkpoint`, beside `policies`. Read
`jaxft/records.py` before and `jaxft/checkpoint/leaves.py` after.

    <root>/<step>/                            a committed step, a plain Orbax step
        state/                                the arrays
        run/metadata                          the run record: one JSON object
    <root>/<step>.orbax-checkpoint-tmp*       unfinished: a save or a deletion
    <root>/<step>.quarantined-<n>             was unreadable; never deleted by us
    <root>/<step>.abandoned-t<t>              of an older timeline

A step becomes one by a single rename, so its name is its commit mark; everything
here reads the store and never a memory of intentions.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxft import records

FORMAT_NAME = "jaxft-checkpoint"
FORMAT_VERSION = 1

STATE_ITEM = "state"
RUN_ITEM = "run"
RECORD_FILE = "metadata"
TMP_MARK = ".orbax-checkpoint-tmp"

MAX_NAME_BYTES = 200
_MAX_LOOKS = 100

_STEP = re.compile(r"0|[1-9]\d*")
_UNFINISHED = re.compile(rf"(0|[1-9]\d*){re.escape(TMP_MARK)}.*")
_SET_ASIDE = re.compile(r"(0|[1-9]\d*)\.(quarantined-\d+|abandoned-t\d+)")


class LeafError(ValueError):
    """A leaf that cannot be stored under its path; nothing was written."""


class RecordError(ValueError):
    """A run record that cannot be understood: the step is damaged."""


# --- leaf names ---------------------------------------------------------------


def leaf_names(paths: Iterable[Sequence[str]]) -> dict[str, str]:
    """Leaf path -> the name it is stored under, both unique.

    Args:
        paths: the key segments of every leaf, outermost first.

    Returns:
        `a/b` -> `a.b`, in the given order. The name is the one that Orbax derives
        from the same segments.

    Raises:
        LeafError: two leaves share a name, or one cannot be a file name.
    """
    names: dict[str, str] = {}
    owners: dict[str, Sequence[str]] = {}
    for segments in paths:
        path, name = "/".join(segments), ".".join(segments)
        _check_name(name, segments)
        for taken in (path, name):
            other = owners.setdefault(taken, segments)
            if other is not segments:
                raise LeafError(
                    f"leaves {list(other)} and {list(segments)} would both be "
                    f"stored as {taken!r}: rename one of the keys"
                )
        names[path] = name
    stored = set(names.values())
    for path, name in names.items():
        for cut in [i for i, letter in enumerate(name) if letter == "/"]:
            if name[:cut] in stored:
                raise LeafError(
                    f"leaf {path!r} would be stored inside leaf {name[:cut]!r}: "
                    "rename one of the keys"
                )
    return names


def _check_name(name: str, segments: Sequence[str]) -> None:
    """Refuses what no file system takes, or what would leave the folder."""
    size = len(name.encode(errors="surrogatepass"))
    if size > MAX_NAME_BYTES:
        raise LeafError(
            f"leaf {list(segments)} needs a name of {size} bytes, "
            f"at most {MAX_NAME_BYTES} work: shorten its keys"
        )
    parts = name.split("/")
    bad = any(part in ("", ".", "..") for part in parts)
    if bad or not all(segments) or "\0" in name or not name.isprintable():
        raise LeafError(
            f"leaf {list(segments)} cannot be a file name: empty, dot-only and "
            "unprintable keys are refused"
        )


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
) -> dict[str, Any]:
    """The run record of one step, detached from its arguments.

    Args:
        step: finished step attempts.
        time_secs: seconds since the epoch.
        state: the tree of `str(LeafSpec)`, nested in dicts and lists.
        data: the data position.
        run: whatever else the run wants back; tuples come back as lists.
        metrics: name -> value; values that are not finite are stored as text.

    Raises:
        TypeError: a value is not JSON.
        ValueError: a number in `data` or `run` is not finite.
    """
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    return {
        "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
        "step": step,
        "timeline": 0,
        "time": time_secs,
        "data": _json_value(data or {}, "data"),
        "run": _json_value(run or {}, "run"),
        "metrics": {
            name: value if math.isfinite(value) else str(value)
            for name, value in numbers.items()
        },
        "state": state,
    }


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
    file = pathlib.Path(path, RUN_ITEM, RECORD_FILE)
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
        raise records.FaultError(
            records.Fault(kind=records.FaultKind.CONFIG, evidence=text)
        )
    for name, kinds in _RECORD_TYPES.items():
        if type(record.get(name)) not in kinds:
            raise RecordError(f"{file} has no {name} that can be understood")
    try:
        record["metrics"] = {name: float(x) for name, x in record["metrics"].items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{file} has metrics that are no numbers") from error
    return record


# --- discovery ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discovery:
    """What one look at a root found.

    Attributes:
        committed: the steps, ascending; readable or not is for the reader to find.
        foreign: (path, reason) of what is named like a step and is none of ours.
        unfinished: (path, step) of what an interrupted save or deletion left.
        set_aside: paths of quarantined and abandoned steps.
    """

    committed: tuple[records.CheckpointInfo, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    unfinished: tuple[tuple[str, int], ...] = ()
    set_aside: tuple[str, ...] = ()

    @property
    def steps(self) -> list[int]:
        """Labels of the committed steps, ascending."""
        return [info.step for info in self.committed]


def absolute_root(root: str | os.PathLike[str]) -> str:
    """The root as an absolute path, `~` expanded: safe against a later chdir.

    Raises:
        ValueError: it is empty or an address of remote storage.
    """
    text = os.fspath(root)
    if not text or "://" in text:
        raise ValueError(f"checkpoint root {text!r} is not a local folder")
    return os.path.abspath(os.path.expanduser(text))


def step_path(root: str, step: int) -> str:
    """The folder of a committed step."""
    return os.path.join(root, str(step))


def discover(root: str | os.PathLike[str]) -> Discovery:
    """Looks at the names in `root`, and at nothing inside the arrays.

    Raises:
        FaultError: kind CONFIG: `root` is there but is no folder that may be read. An
            absent root is an empty one.
        OSError: `root` cannot be read for another reason.
    """
    found = Discovery()
    for _ in range(_MAX_LOOKS):
        try:
            names = sorted(os.listdir(root))
        except FileNotFoundError as error:
            if os.path.islink(root):  # to a place that is not mounted, say
                raise unreadable(root, str(error.strerror)) from error
            return Discovery()
        except (PermissionError, NotADirectoryError) as error:
            raise unreadable(root, str(error.strerror)) from error
        found, is_steady = _sort(os.path.abspath(root), names)
        # One listing can miss a step that is renamed while it goes on, and see the
        # one before it only after its deletion has begun.
        if is_steady and names == sorted(os.listdir(root)):
            break
    return found


def unreadable(path: str | os.PathLike[str], reason: str) -> records.FaultError:
    """A refusal that leaves the store alone: a person can put it right."""
    hint = "make it readable or use another folder; nothing was changed"
    text = f"checkpoints cannot be read: {os.fspath(path)}: {reason}; {hint}"
    return records.FaultError(
        records.Fault(kind=records.FaultKind.CONFIG, evidence=text)
    )


def _sort(root: str, names: Sequence[str]) -> tuple[Discovery, bool]:
    """What the names are, and whether all of them were still there to be looked at."""
    committed, foreign, unfinished, set_aside = [], [], [], []
    is_steady = True
    for name in names:
        path = os.path.join(root, name)
        if _STEP.fullmatch(name):
            info = _look(path)
            if isinstance(info, records.CheckpointInfo):
                committed.append(info)
            elif os.path.lexists(path):
                foreign.append((path, info))
            else:
                is_steady = False
        elif match := _UNFINISHED.fullmatch(name):
            unfinished.append((path, int(match[1])))
        elif _SET_ASIDE.fullmatch(name):
            set_aside.append(path)
    found = Discovery(
        committed=tuple(sorted(committed, key=lambda info: info.step)),
        foreign=tuple(foreign),
        unfinished=tuple(unfinished),
        set_aside=tuple(set_aside),
    )
    return found, is_steady


def _look(path: str) -> records.CheckpointInfo | str:
    """Facts of a step folder, or why a folder with a step's name is none."""
    changed = 0.0
    try:
        changed = os.stat(os.path.join(path, RUN_ITEM)).st_mtime
    except FileNotFoundError:
        if not _had_run_item(path):
            return f"it has no {RUN_ITEM} folder"
    except NotADirectoryError:
        return "not a folder"
    except OSError:
        pass  # It is there and cannot be read: that is for the reader to tell.
    return records.CheckpointInfo(
        step=int(os.path.basename(path)), path=path, commit_secs=changed
    )


def _had_run_item(path: str) -> bool:
    """Whether Orbax's own notes say that there was a run record: ours, damaged."""
    try:
        notes = json.loads(pathlib.Path(path, "_CHECKPOINT_METADATA").read_bytes())
        return RUN_ITEM in notes["item_handlers"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def count_bytes(path: str | os.PathLike[str]) -> int:
    """Size of all files under `path`; files that vanish meanwhile do not count."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except FileNotFoundError:
                continue
    return total


# --- durable changes of names -------------------------------------------------


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_writable(root: str) -> None:
    """Asks, without a try, whether a save could make its folders.

    Raises:
        OSError: it could not.
    """
    folder = root
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} is no folder that can be written")


def make_root(root: str) -> None:
    """Creates the root and makes every new name on the way durable."""
    missing = []
    folder = pathlib.Path(root)
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    os.makedirs(root, exist_ok=True)
    for new in reversed(missing):
        sync_folder(new.parent)


def quarantine(path: str) -> str:
    """Renames a step aside, durably, and returns where it is now."""
    root, name = os.path.split(path)
    for number in range(1, 1_000_000):
        aside = os.path.join(root, f"{name}.quarantined-{number}")
        if os.path.lexists(aside):
            continue
        os.rename(path, aside)
        sync_folder(root)
        return aside
    raise OSError(errno.EEXIST, "too many quarantined steps", path)
