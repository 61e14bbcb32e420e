"""The door to JAX's rule that process 0 alone writes to the persistent compile cache.

World: device. Floor: below `compile_cache`, which opens and closes it.

On TPU and GPU one entry serves all processes. On CPU the key of a program that spans
processes differs in each, so that after a restart all but process 0 would compile
anew, and process 0 would wait for them. There is no setting for it, and
`jax.experimental.serialize_executable` would serve single programs under keys of our
own, which would have to know all that JAX puts into its.
"""

from __future__ import annotations

from typing import Any

# JAX asks this module which process it is before it writes, and nowhere lets itself
# be told; tests/parallel/test_cache_writers.py fails when it moves.
from jax._src import compiler  # noqa: TID251


class EveryoneWrites:
    """While on, this process writes what it compiles, whichever process it is.

    To be used where each process has a folder of its own.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def turn_on(self) -> str:
        """Says why where JAX has changed; then it keeps its rule."""
        real = getattr(compiler, "distributed", None)
        if not hasattr(getattr(real, "global_state", None), "process_id"):
            return "this JAX lets process 0 alone write to its compile cache"
        self._before = real
        # It stands for a module, which no type of ours is.
        compiler.distributed = _AsProcessZero(real)  # pyrefly: ignore[bad-assignment]
        return ""

    def turn_off(self) -> None:
        """Gives JAX its rule back; twice is fine."""
        if self._before is not None:
            compiler.distributed = self._before
            self._before = None


class _AsProcessZero:
    """JAX's view of its processes, where its compiler takes this one for the first.

    On CPU the compiler asks for the number for nothing else: the rest is of GPUs and
    of binaries that processes share.
    """

    process_id = 0

    def __init__(self, real: Any):
        self._real = real

    @property
    def global_state(self) -> _AsProcessZero:
        return _AsProcessZero(self._real.global_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
