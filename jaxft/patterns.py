"""Globs over leaf paths: which leaves a setting speaks of.

World: host-only. Floor: the lowest, beside `records`.

`params/**, !params/embed`: comma separated; `*` stays within one key, `**` crosses
`/` and also stands for nothing (`params/**` holds `params` itself), `?` is one
character; a `!` in front takes away again. The last one that fits decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


class Patterns:
    """Leaf paths that a text of globs names.

    Args:
        text: the globs; an empty text names nothing.
    """

    def __init__(self, text: str):
        self.text = text
        globs = [glob.strip() for glob in text.split(",") if glob.strip()]
        self._rules = [(not g.startswith("!"), _regex(g.lstrip("!"))) for g in globs]

    def match(self, path: str) -> bool:
        """Whether a leaf path such as `params/layers/mlp/up` is named."""
        fitting = [wanted for wanted, regex in self._rules if regex.fullmatch(path)]
        return bool(fitting) and fitting[-1]

    def select(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that are named, in their order."""
        return [path for path in paths if self.match(path)]


@functools.lru_cache(maxsize=1024)
def _regex(glob: str) -> re.Pattern[str]:
    pieces = re.split(r"(/\*\*$|\*\*/|\*\*|\*|\?)", glob.strip())
    words = {
        "**/": r"(?:.*/)?",
        "**": r".*",
        "*": r"[^/]*",
        "?": r"[^/]",
        "/**": r"(?:/.*)?",
    }
    return re.compile("".join(words.get(p) or re.escape(p) for p in pieces))
