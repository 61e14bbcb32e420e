"""What the backward pass keeps: `jaxft.remat.wrap` for the layers of any model."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["wrap"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("jaxft.remat.wrapping"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
