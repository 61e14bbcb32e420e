"""What a checkpoint root holds, by name: steps, leaves, discovery.

World: host-only. Floor: the lowest of `checkpoint`, beside `policies`. Read
`jaxft/records.py` before and `jaxft/checkpoint/leaves.py` after.

    <root>/<step>/                            a committed step, a plain Orbax step
        state/                                the arrays
        run/metadata                          the run record: one JSON object
    <root>/<step>.orbax-checkpoint-tmp*       unfinished: a save or a deletion
    <root>/<step>.quarantined-<n>             was unreadable; never deleted by us
    <root>/<step>.abandoned-t<t>              of an older timeline
    <root>/decisions/<n>.json                 see `jaxft/checkpoint/decisions.py`

A step becomes one by a single rename, so its name is its commit mark; everything
here reads the store and never a memory of intentions.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Sequence

from jaxft import durable, records

STATE_ITEM = "state"
RUN_ITEM = "run"
MANIFEST_ITEM = "manifest"
# Where Orbax says of each item what reads it; a folder that it does not know there
# would be an error to it.
ORBAX_NOTES = "_CHECKPOINT_METADATA"
TMP_MARK = ".orbax-checkpoint-tmp"
# A whole step, until its rename.
SEALED = f"{TMP_MARK}-sealed"

MAX_NAME_BYTES = 200
_MAX_LOOKS = 100

# `s3:/bucket` is meant to be one, too.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|.*://")
_STEP = re.compile(r"0|[1-9]\d*")
_UNFINISHED = re.compile(rf"(0|[1-9]\d*){re.escape(TMP_MARK)}.*")
_SET_ASIDE = re.compile(r"(0|[1-9]\d*)\.(quarantined-\d+|abandoned-t\d+)")


class LeafError(ValueError):
    """A leaf that cannot be stored under its path; nothing was written."""


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


# --- discovery ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discovery:
    """What one look at a root found.

    Attributes:
        committed: the steps, ascending; readable or not is for the reader to find.
        foreign: (path, reason) of what is named like a step and is none of ours.
        unfinished: (path, step) of what an interrupted save or deletion left.
        set_aside: paths of quarantined and abandoned steps.
        abandoned: steps that a rollback took out and that still have their names; only
            `decisions.discover` tells them from the committed ones.
    """

    committed: tuple[records.CheckpointInfo, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    unfinished: tuple[tuple[str, int], ...] = ()
    set_aside: tuple[str, ...] = ()
    abandoned: tuple[records.CheckpointInfo, ...] = ()

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
    if not text or _ADDRESS.match(text):
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
    return records.fault_error(records.FaultKind.CONFIG, text)


def _sort(root: str, names: Sequence[str]) -> tuple[Discovery, bool]:
    """What the names are, and whether all of them were still there to be looked at."""
    committed, foreign, unfinished, set_aside = [], [], [], []
    is_steady = True
    for name in names:
        path = f"{root}/{name}"
        if _STEP.fullmatch(name):
            info = _look(path, int(name))
            if isinstance(info, records.CheckpointInfo):
                committed.append(info)
            elif f"{name}{SEALED}" in names and _is_copy(path, f"{path}{SEALED}"):
                # Ours, in a folder of an object store, where a rename copies.
                unfinished.append((path, int(name)))
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


def _is_copy(path: str, sealed: str) -> bool:
    """Whether all that is in a folder is in the sealed one, too: nobody else's."""
    if not os.path.isdir(path):
        return False
    for folder, _, files in os.walk(path):
        twin = os.path.join(sealed, os.path.relpath(folder, path))
        if not all(os.path.lexists(os.path.join(twin, file)) for file in files):
            return False
    return True


def _look(path: str, step: int) -> records.CheckpointInfo | str:
    """Facts of a step folder, or why a folder with a step's name is none."""
    changed = 0.0
    try:
        changed = os.stat(f"{path}/{RUN_ITEM}").st_mtime
    except FileNotFoundError:
        if not _had_run_item(path):
            return f"it has no {RUN_ITEM} folder"
    except NotADirectoryError:
        return "not a folder"
    except OSError:
        pass  # It is there and cannot be read: that is for the reader to tell.
    return records.CheckpointInfo(step=step, path=path, commit_secs=changed)


def _had_run_item(path: str) -> bool:
    """Whether Orbax's own notes say that there was a run record: ours, damaged."""
    try:
        notes = json.loads(pathlib.Path(path, ORBAX_NOTES).read_bytes())
        return RUN_ITEM in notes["item_handlers"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def count_bytes(path: str | os.PathLike[str]) -> int:
    """Size of all files under `path`; what vanishes or cannot be read is not in it."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue
    return total


# --- durable changes of names -------------------------------------------------


def check_writable(root: str) -> None:
    """Asks, without a try, whether a save could make its folders.

    Raises:
        OSError: it could not.
    """
    folder = root
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is no folder that can be written"
        if os.path.isdir(folder) and os.statvfs(folder).f_flag & os.ST_RDONLY:
            cause = OSError(errno.EROFS, os.strerror(errno.EROFS))
            raise OSError(f"{text}: {cause.strerror}") from cause
        raise OSError(text)


def try_folders(step_path: str, items: Iterable[str]) -> None:
    """Makes the folders that a step needs and takes them away again.

    Raises:
        OSError: it could not.
    """
    root, name = os.path.split(step_path)
    with tempfile.TemporaryDirectory(dir=root, prefix=f"{name}{TMP_MARK}-") as folder:
        for item in items:
            os.mkdir(os.path.join(folder, item))


def quarantine(path: str) -> str:
    """Renames a step aside, durably, and returns where it is now."""
    for number in range(1, 1_000_000):
        aside = f"{path}.quarantined-{number}"
        if not os.path.lexists(aside):
            return _rename(path, aside)
    raise OSError(errno.EEXIST, "too many quarantined steps", path)


def abandon(path: str, *, timeline: int) -> str:
    """Renames aside a step that a rollback took out; where it is now."""
    aside = f"{path}.abandoned-t{timeline}"
    # A copy of it, put back by hand: it is not of any use, but nothing is lost.
    return quarantine(path) if os.path.lexists(aside) else _rename(path, aside)


def _rename(path: str, aside: str) -> str:
    os.rename(path, aside)
    durable.sync_folder(os.path.dirname(path))
    return aside
