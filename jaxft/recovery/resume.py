"""May this run go on from that checkpoint? A pure comparison of facts.

World: host-only. Floor: a peer of `checkpoint` and `train`. Read `jaxft/worker.py`,
which asks, next.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from jaxft.config import ConfigError

_ABSENT = "(absent)"


def check_resume(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, allow: str
) -> dict[str, list[Any]]:
    """Compares what can change numbers with what the checkpoint was made under.

    Args:
        saved: facts in the checkpoint's run record.
        now: facts of this run.
        allow: names or patterns (`optimizer.*`), comma separated, that may differ.

    Returns:
        Name -> [saved, now] of the allowed differences.

    Raises:
        ConfigError: something else differs; one line with all of it.
    """
    changes = {
        name: [saved.get(name, _ABSENT), now.get(name, _ABSENT)]
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name, _ABSENT) != now.get(name, _ABSENT)
    }
    patterns = [pattern.strip() for pattern in allow.split(",") if pattern.strip()]
    refused = {
        name: pair
        for name, pair in changes.items()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    if refused:
        listed = "; ".join(
            f"{name}: {_short(old)} -> {_short(new)}"
            for name, (old, new) in refused.items()
        )
        raise ConfigError(
            "resume.allow",
            f"the checkpoint was made under other settings ({listed}); put them "
            f"back, choose another workdir, or accept other numbers with "
            f"--config.resume.allow={','.join(refused)}",
        )
    return changes


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
