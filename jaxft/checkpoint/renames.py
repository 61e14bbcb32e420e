"""Leaf paths under other names: what a tree was called, what it is called now.

World: host-only. Floor: the lowest of `checkpoint`. Read `jaxft/patterns.py` before.

`{"params/Dense_0": "dense"}` moves a leaf or all below it; `{"": "params"}` moves
everything down and `{"params": ""}` up. `*` (within one key) and `**` (across them)
stand for what the same one on the other side does: `{"**/kernel": "**/w/value"}`.
The first rule that fits a path is the one that is applied, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_WILD = re.compile(r"\*\*|\*")


class RenameError(ValueError):
    """Rules that cannot be meant as they are written."""


def rename_paths(paths: Iterable[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Path -> its new name, which is unique.

    Args:
        paths: of the leaves.
        rules: old -> new.

    Raises:
        RenameError: a rule fits no path, its sides have different wildcards, or two
            paths would have the same name.
    """
    compiled = {old: _regex(old, new) for old, new in rules.items()}
    used: set[str] = set()
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for path in paths:
        names[path] = path
        for old, regex in compiled.items():
            if match := regex.fullmatch(path):
                used.add(old)
                names[path] = _fill(rules[old], match)
                break
        name = names[path]
        if not name:
            raise RenameError(f"{path} would have no name left")
        if (other := owners.setdefault(name, path)) != path:
            raise RenameError(f"{other} and {path} would both be called {name}")
    if unused := [old for old in rules if old not in used]:
        raise RenameError(f"no stored leaf fits the rename rule {unused[0]!r}")
    return names


def _regex(old: str, new: str) -> re.Pattern[str]:
    """What an old side stands for: a leaf, or all below a place in the tree."""
    wild = _WILD.findall(old)
    if _WILD.findall(new) != wild:
        raise RenameError(
            f"the rename rule {old!r}: {new!r} needs the same wildcards in the same "
            "order on both sides"
        )
    words = {"**": "(.*)", "*": "([^/]*)"}
    parts = re.split(r"(\*\*|\*)", old.strip("/"))
    text = "".join(words.get(part) or re.escape(part) for part in parts)
    if not text:
        return re.compile(r"(?P<rest>.+)")
    return re.compile(rf"{text}(?:/(?P<rest>.+))?")


def _fill(new: str, match: re.Match[str]) -> str:
    """The new side with what its wildcards stand for."""
    rest = match.groupdict().get("rest")
    found = iter(match.groups())
    filled = _WILD.sub(lambda _: next(found), new.strip("/"))
    return "/".join(part for part in (filled, rest) if part)
