"""What the backward pass keeps.

`jaxft.remat.wrap` is for models of your own. It is imported when it is used, as the
rest of this package is also for who has no jax at hand.
"""

from __future__ import annotations

from typing import Any

__all__ = ["wrap"]


def __getattr__(name: str) -> Any:
    if name == "wrap":
        from jaxft.remat.wrapping import wrap

        return wrap
    raise AttributeError(f"module 'jaxft.remat' has no attribute {name!r}")
