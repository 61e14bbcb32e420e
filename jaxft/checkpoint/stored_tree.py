"""What Orbax notes beside the arrays of an item: the tree, its names, its keys.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/array_store.py` next.

    <item>/_METADATA                      keys, kind and name of every leaf; the layout
    <item>/_strings.json                  the leaves that are text
    <item>/array_metadatas/process_<n>    which arrays are data of typed random keys
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

TREE_FILE = "_METADATA"
TEXT_FILE = "_strings.json"

_FILE_IN_ERROR = re.compile(r'local file "([^"]*)"')


class ArrayError(ValueError):
    """Stored arrays, or what describes them, that are damaged or not there.

    Attributes:
        leaf: path of the leaf; empty where it is about all of them.
        reason: what is wrong, naming the chunk where it is one.
        file: the file that is to blame, where it is known.
    """

    def __init__(self, leaf: str, reason: str):
        super().__init__(f"leaf {leaf}: {reason}" if leaf else reason)
        self.leaf = leaf
        self.reason = reason
        named = _FILE_IN_ERROR.findall(reason)
        self.file = named[-1] if named else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """One leaf of the stored tree.

    Attributes:
        segments: its keys, outermost first, as text.
        is_index: for each key, whether it is a position in a sequence.
        name: what its array is stored as.
        kind: what it was: `jax.Array`, `np.ndarray`, `scalar`, `string`; `None`,
            `Dict`, `List` and the like for what has nothing on disk.
        key_impl: of typed random keys, whose array is their key data.
    """

    segments: tuple[str, ...]
    is_index: tuple[bool, ...]
    name: str
    kind: str
    key_impl: str = ""

    @property
    def path(self) -> str:
        """Keys joined by slashes."""
        return "/".join(self.segments)

    @property
    def has_array(self) -> bool:
        """Whether there is an array to read."""
        return self.kind in ("jax.Array", "np.ndarray", "scalar")


def read_json(folder: str, name: str) -> dict[str, Any]:
    """A JSON object beside the arrays.

    Raises:
        ArrayError: it is missing or damaged.
        OSError: it cannot be read.
    """
    file = os.path.join(folder, name)
    try:
        value = json.loads(pathlib.Path(file).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArrayError("", f"{file} is missing") from error
    except (ValueError, RecursionError) as error:
        raise ArrayError("", f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArrayError("", f"{file} holds no JSON object")
    return value


def parse(notes: Mapping[str, Any], *, folder: str) -> dict[str, StoredLeaf]:
    """Leaf path -> leaf, in the order of the tree.

    Args:
        notes: what stands in `TREE_FILE`.
        folder: the item.

    Raises:
        ArrayError: they are damaged.
        OSError: they cannot be read.
    """
    key_impls = _key_impls(folder)
    try:
        return _parse_tree(notes, key_impls)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        file = os.path.join(folder, TREE_FILE)
        raise ArrayError("", f"{file} cannot be understood: {error!r}") from error


def _parse_tree(
    notes: Mapping[str, Any], key_impls: Mapping[str, str]
) -> dict[str, StoredLeaf]:
    """Leaf path -> leaf, of Orbax's notes."""
    found: dict[str, StoredLeaf] = {}
    for entry in notes["tree_metadata"].values():
        keys = entry["key_metadata"]
        segments = tuple(str(key["key"]) for key in keys)
        name = ".".join(segments)
        leaf = StoredLeaf(
            segments=segments,
            is_index=tuple(key["key_type"] == 1 for key in keys),
            name=name,
            kind=str(entry["value_metadata"]["value_type"]),
            key_impl=key_impls.get(name, ""),
        )
        if (other := found.setdefault(leaf.path, leaf)) is not leaf:
            raise ValueError(
                f"leaves {list(other.segments)} and {list(segments)} have the same path"
            )
    return found


def _key_impls(folder: str) -> dict[str, str]:
    """Name -> implementation of typed random keys."""
    found = {}
    for file in sorted(pathlib.Path(folder, "array_metadatas").glob("process_*")):
        notes = read_json(str(file.parent), file.name)
        try:
            for entry in notes["array_metadatas"]:
                array = entry["array_metadata"]
                if impl := (array.get("ext_metadata") or {}).get("random_key_impl"):
                    found[array["param_name"]] = str(impl)
        except (KeyError, TypeError, AttributeError) as error:
            raise ArrayError("", f"{file} cannot be understood: {error!r}") from error
    return found
