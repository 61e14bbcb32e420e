"""What a path on the command line means: a workdir, a root, a step.

World: host-only. Floor: cli, the lowest. Read `jaxft/checkpoint/decisions.py` before
and `jaxft/cli/ckpt.py` after.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from jaxft import records
from jaxft.checkpoint import contents, decisions, layout, manifest
from jaxft.checkpoint.run_record import RECORD_FILE
from jaxft.checkpoint.stored_tree import TREE_FILE
from jaxft.recovery.workdir import WorkdirLock

# Any of them makes a step, so that one with a lost file still is one.
_OF_A_STEP = (
    f"{layout.STATE_ITEM}/{TREE_FILE}",
    f"{layout.RUN_ITEM}/{RECORD_FILE}",
    f"{layout.MANIFEST_ITEM}/{manifest.MANIFEST_FILE}",
    layout.ORBAX_NOTES,
    TREE_FILE,
)


def workdir_at(text: str) -> pathlib.Path:
    """The workdir that a path names.

    Raises:
        FaultError: kind CONFIG or NO_CHECKPOINT: it is no folder.
    """
    return pathlib.Path(_existing(text))


def root_at(text: str) -> str:
    """The checkpoint root that a path names: itself, or that of a workdir.

    Raises:
        FaultError: kind CONFIG or NO_CHECKPOINT: it is none.
    """
    path = _existing(text)
    if _is_step(path):
        raise _refused(f"{path} is a step: give the root that holds it")
    return contents.find_root(path)


def steps_at(text: str) -> list[str]:
    """Folders of the step that a path names, or of all committed steps of a root.

    Raises:
        FaultError: kind CONFIG or NO_CHECKPOINT: there is none.
        OSError: it cannot be read.
    """
    path = _existing(text)
    if _is_step(path):
        return [path]
    root = root_at(path)
    found = decisions.discover(root)
    if not found.committed:
        raise nothing_there(f"no committed step in {root}")
    return [info.path for info in found.committed]


def step_at(text: str) -> str:
    """Folder of the step that a path names, or of the newest one of a root.

    Raises:
        FaultError: kind CONFIG or NO_CHECKPOINT: there is none.
        OSError: it cannot be read.
    """
    return steps_at(text)[-1]


@contextlib.contextmanager
def owned(root: str) -> Iterator[None]:
    """Keeps runs out of a root while something is changed in it.

    A root below a workdir has that workdir's lock. Without one nobody can know
    whether a program saves there; then it is the caller's word that none does.

    Raises:
        FaultError: kind WORKDIR_IN_USE: a run is using it.
    """
    workdir = pathlib.Path(root).parent
    if not (workdir / "lock").is_file():
        yield
        return
    with WorkdirLock.acquire(workdir, takeover_secs=0):
        yield


def nothing_there(text: str) -> records.FaultError:
    """The answer to a question about what is not there."""
    return records.fault_error(records.FaultKind.NO_CHECKPOINT, text)


def _refused(text: str) -> records.FaultError:
    return records.fault_error(records.FaultKind.CONFIG, text)


def _existing(text: str) -> str:
    if not text or "://" in text:
        raise _refused(f"{text!r} is not a local folder")
    path = os.path.abspath(os.path.expanduser(text))
    if not os.path.exists(path):
        raise nothing_there(f"{path}: there is no such folder")
    if not os.path.isdir(path):
        raise _refused(f"{path} is not a folder")
    return path


def _is_step(path: str) -> bool:
    return any(os.path.lexists(os.path.join(path, name)) for name in _OF_A_STEP)
