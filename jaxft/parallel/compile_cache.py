"""The persistent compile cache in the workdir; a help, never a condition.

World: device. Floor: below the eight rooms. JAX itself treats an entry that it
cannot read or write as a miss and warns. What is left to do here: choose the folder,
so that no program compiled for another machine is ever found; go on without a cache
where the folder cannot be had; turn it off or start a new one when the supervisor
suspects it.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib

import jax
import jax.monitoring

from jaxft.parallel.facts import cpu_features
from jaxft.records import Emit

_HIT = "/jax/compilation_cache/cache_hits"


class CompileCache:
    """Switches JAX's persistent cache on for this process.

    Args:
        root: folder of all caches of the run.
        mode: `keep` uses what is there, `off` compiles anew, `fresh` starts an empty
            folder and leaves the old one for inspection.
        emit: where an unusable folder is reported.

    Attributes:
        num_hits: programs that came from the cache so far.
    """

    def __init__(self, root: str | os.PathLike[str], *, mode: str, emit: Emit):
        self.num_hits = 0
        self._root = pathlib.Path(root)
        self._mode = mode
        self._emit = emit

    def enable(self, *, device: jax.Device) -> str:
        """Points JAX at the folder for `device`; says why where that fails."""
        if self._mode == "off":
            jax.config.update("jax_enable_compilation_cache", False)
            return ""
        folder = self._root / cache_name(device)
        try:
            if self._mode == "fresh" and folder.exists():
                folder.rename(folder.with_name(f"{folder.name}.old-{os.getpid()}"))
            _prove_writable(folder)
        except OSError as error:
            self._emit("cache_unusable", path=str(folder), reason=str(error))
            return str(error)
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.monitoring.register_event_listener(self._count)
        return ""

    def _count(self, event: str, **_: str | int) -> None:
        self.num_hits += event == _HIT


def cache_name(device: jax.Device) -> str:
    """Folder name: backend, version and CPU features, all that a program needs."""
    version = importlib.metadata.version("jaxlib")
    kind = device.device_kind.replace(" ", "_").replace("/", "_")
    return f"{device.platform}-{kind}-jaxlib{version}-{cpu_features()}"


def _prove_writable(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{os.getpid()}"
    probe.write_bytes(b"x")
    probe.unlink()
