"""Which files make up a text corpus, what is in them, which are held out.

World: host-only (standard library). Floor: `data`. Read `jaxft/data/sources.py`,
which cuts the text into rows, after it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pathlib
from collections.abc import Mapping

from jaxft.config import ConfigError

# Not the library's own text: tests, what others installed, what a build left.
_LEFT_OUT_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idle_test",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
    }
)


def find_stdlib(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Relative posix name -> source file of the standard library, sorted by name."""
    files = {}
    for folder, folders, names in os.walk(root):
        # Pruned here: site-packages alone can hold ten times as many files.
        folders[:] = [
            name
            for name in folders
            if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            # _sysconfigdata_*.py is written by the build and full of its paths.
            if name.endswith(".py") and not name.startswith("_sysconfigdata_"):
                path = pathlib.Path(folder, name)
                files[path.relative_to(root).as_posix()] = path
    return dict(sorted(files.items()))


def find_text(path: str) -> dict[str, pathlib.Path]:
    """Name -> file that the glob matches, sorted by name.

    Names are relative to the folder that all files share, so that a corpus that was
    moved as a whole is still the same corpus.
    """
    pattern = os.path.expanduser(path)
    if os.path.isdir(pattern):
        example = os.path.join(path, "**", "*.txt")
        raise ConfigError(
            "data.path", f"{path!r} is a folder; give a glob, e.g. {example!r}"
        )
    # A file is taken at its word: its name may hold characters of a glob.
    exact = os.path.isfile(pattern)
    matches = [pattern] if exact else glob.glob(pattern, recursive=True)
    files = [pathlib.Path(os.path.abspath(m)) for m in matches if os.path.isfile(m)]
    if not files:
        raise ConfigError(
            "data.path", f"{path!r} matches no file (read from {os.getcwd()!r})"
        )
    root = os.path.commonpath([file.parent for file in files])
    return dict(sorted((file.relative_to(root).as_posix(), file) for file in files))


def read_files(files: Mapping[str, pathlib.Path], *, setting: str) -> dict[str, bytes]:
    """Name -> content, in the order of `files`.

    Args:
        files: name -> file.
        setting: config path to name when a file cannot be read.

    Raises:
        ConfigError: a file cannot be read.
    """
    texts = {}
    for name, file in files.items():
        try:
            texts[name] = file.read_bytes()
        except OSError as error:
            raise ConfigError(
                setting, f"cannot read {str(file)!r}: {error.strerror}"
            ) from error
    return texts


def plan_holdout(sizes: Mapping[str, int], *, fraction: float) -> frozenset[str]:
    """Names of the files to hold out as a whole.

    Args:
        sizes: name -> bytes.
        fraction: share of all bytes that the files may have together.

    Returns:
        Files in the order of a hash of their names, each that still fits; empty where
        less than half of the share can be filled with whole files.
    """
    share = fraction * sum(sizes.values())
    room, held = share, set()
    for name in sorted(sizes, key=_hash):
        if sizes[name] <= room:
            room -= sizes[name]
            held.add(name)
    return frozenset(held) if room <= share / 2 else frozenset()


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
