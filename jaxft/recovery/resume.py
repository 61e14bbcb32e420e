"""May this run go on from that checkpoint? A pure comparison of facts.

World: host-only. Floor: a peer of `checkpoint` and `train`. Read `jaxft/worker.py`,
which asks, next.
"""

from __future__ import annotations

import difflib
import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft.config import ConfigError

# What says where arrays lie: of no matter where sums have one order on any mesh.
_PLACING = (
    "num_processes",
    "mesh.axes",
    "mesh.shape",
    "mesh.data",
    "mesh.fsdp",
    "mesh.dcn_*",
    "mesh.num_devices",
    "sharding",
)
_ABSENT = "(absent)"
_SHOWN = 40


def check_resume(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    allow: str,
    fixed_order: bool = False,
) -> dict[str, list[Any]]:
    """Compares what can change numbers with what the checkpoint was made under.

    Args:
        saved: facts in the checkpoint's run record.
        now: facts of this run.
        allow: what may differ, comma separated: names (`optimizer.b1`, `jax`), whole
            sections (`optimizer`) or patterns (`optimizer.b*`).
        fixed_order: the run's sums have one order on any number of devices
            (`train.virtual_shards`): where its arrays lie may differ.

    Returns:
        Name -> [saved, now] of the allowed differences.

    Raises:
        ConfigError: something else differs, one line with all of it; or a part of
            `allow` names no fact.
    """
    names = sorted(saved.keys() | now.keys())
    allowed = [part.strip() for part in allow.split(",") if part.strip()]
    for part in allowed:
        if not any(_covers(part, name) for name in names):
            raise ConfigError("resume.allow", _names_nothing(part, names))
    placing = _PLACING if fixed_order else ()
    changes = {
        name: [saved.get(name, _ABSENT), now.get(name, _ABSENT)]
        for name in names
        if saved.get(name, _ABSENT) != now.get(name, _ABSENT)
    }
    refused = {
        name: pair
        for name, pair in changes.items()
        if not any(_covers(part, name) for part in (*allowed, *placing))
    }
    if refused:
        listed = "; ".join(_difference(name, *pair) for name, pair in refused.items())
        flag = shlex.quote(f"--config.resume.allow={','.join([*allowed, *refused])}")
        raise ConfigError(
            "resume.allow",
            f"the checkpoint was made under other settings ({listed}); put them "
            f"back, choose another workdir, or accept other numbers with {flag}",
        )
    return changes


def _covers(part: str, name: str) -> bool:
    inside = name == part or name.startswith(f"{part}.")
    return inside or fnmatch.fnmatchcase(name, part)


def _names_nothing(part: str, names: Sequence[str]) -> str:
    sections = {name.rpartition(".")[0] for name in names} - {""}
    known = sorted({*names, *sections})
    close = difflib.get_close_matches(part.removeprefix("config."), known, n=3)
    tops = sorted({name.partition(".")[0] for name in names})
    hint = f"did you mean {' or '.join(close)}?" if close else ", ".join(tops)
    return f"{part!r} names nothing that a resume compares; {hint}"


def _difference(name: str, old: Any, new: Any) -> str:
    """One fact that differs, long values cut to where they do."""
    before, after = (" ".join(str(value).split()) for value in (old, new))
    if max(len(before), len(after)) > _SHOWN:
        pairs = enumerate(zip(before, after, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
        start = max(same - _SHOWN // 4, 0)
        before, after = _cut(before, start), _cut(after, start)
    text = f"{name}: {before} -> {after}"
    if name == "optimizer.decay_steps" and old != _ABSENT:
        keep = f"--config.optimizer.decay_steps={old}"
        text += (
            f" (follows train.num_steps unless set; keep the old schedule with {keep})"
        )
    return text


def _cut(text: str, start: int) -> str:
    part = text[start : start + _SHOWN]
    end = "..." if start + _SHOWN < len(text) else ""
    return f"{'...' if start else ''}{part}{end}"
