"""The persistent compile cache in the workdir; a help, never a condition.

World: device. Floor: below the eight rooms. Read `jaxft/parallel/cache_writers.py`
before and `jaxft/worker.py`, which owns one, after this file.

JAX itself treats an entry that it
cannot read or write as a miss and warns. What is left to do here: choose the folder,
so that no program compiled for another machine is ever found; go on without a cache
where the folder cannot be had; turn it off or start a new one when the supervisor
suspects it; and remove an entry that was torn, which JAX would keep for ever.

A job of several processes has one folder, which process 0 writes and all read. On
CPU, where no entry serves two processes, each other one has its own beside it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import os
import pathlib
import re
import warnings
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from jaxft.parallel.cache_writers import EveryoneWrites
from jaxft.parallel.facts import cpu_features
from jaxft.records import Emit

_HIT = "/jax/compilation_cache/cache_hits"
# The texts of JAX's warnings: there is no other sign of a broken entry.
_TROUBLE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)",
    re.DOTALL,
)
_SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


class CompileCache:
    """Switches JAX's persistent cache on for this process, until `close`.

    JAX has one cache a process, so one of these is on at most: `enable` closes
    another one.

    Args:
        root: folder of all caches of the run.
        mode: `keep` uses what is there, `off` compiles anew, `fresh` starts an empty
            folder and leaves the old one for inspection.
        emit: where an unusable folder or entry is reported.

    Attributes:
        num_hits: programs that came from the cache so far.
    """

    _enabled: CompileCache | None = None

    def __init__(self, root: str | os.PathLike[str], *, mode: str, emit: Emit):
        self.num_hits = 0
        self._root = pathlib.Path(root)
        self._mode = mode
        self._emit = emit
        self._folder = self._root
        self._everyone = EveryoneWrites()
        self._before: dict[str, Any] = {}
        self._filter: Any = None
        self._show_others = warnings.showwarning

    def enable(self, *, device: jax.Device) -> str:
        """Points JAX at the folder for `device`; says why where that fails.

        Where there are several processes they are connected already.
        """
        if CompileCache._enabled is not None:
            CompileCache._enabled.close()
        self._folder = self._root / cache_name(device)
        if jax.process_index() > 0:
            self._join(device.platform)
        problem = "" if self._mode == "off" else self._prepare()
        self._before = {name: getattr(jax.config, name) for name in _SETTINGS}
        is_on = self._mode != "off" and not problem
        values = (True, str(self._folder), 0.0, -1) if is_on else (False,)
        if is_on and device.platform != "gpu":
            # JAX hashes the folder of the GPU's autotuning cache with each program:
            # a workdir that was moved, or is mounted elsewhere, would compile anew.
            values = (*values, "none")
        for name, value in zip(_SETTINGS, values, strict=False):
            jax.config.update(name, value)
        # JAX keeps the first folder that it was given until told to look again.
        compilation_cache.reset_cache()
        if is_on:
            self._catch_warnings()
        CompileCache._enabled = self
        return problem

    def close(self) -> None:
        """Gives the process back the settings that it had; twice is fine."""
        if CompileCache._enabled is not self:
            return
        CompileCache._enabled = None
        self._everyone.turn_off()
        for name, value in self._before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if warnings.showwarning == self._show:
            warnings.showwarning = self._show_others
        filters: Any = warnings.filters
        if self._filter in filters:
            filters.remove(self._filter)

    def _join(self, platform: str) -> None:
        """Chooses a folder as one of the processes that are not the first."""
        if platform != "cpu":
            if self._mode == "fresh":
                self._mode = "off"  # Process 0 moves the old one aside, at some time.
            return
        if problem := self._everyone.turn_on():
            self._emit("cache_unusable", path=str(self._folder), reason=problem)
            return
        # Beside that of process 0, which may move its own at any time.
        name = f"{self._folder.name}-process{jax.process_index()}"
        self._folder = self._folder.with_name(name)

    def _prepare(self) -> str:
        """Makes the folder; says why where that fails."""
        folder = self._folder
        try:
            if self._mode == "fresh" and folder.exists():
                folder.rename(folder.with_name(f"{folder.name}.old-{os.getpid()}"))
            _prove_writable(folder)
        except OSError as error:
            self._emit("cache_unusable", path=str(folder), reason=str(error))
            return str(error)
        return ""

    def _catch_warnings(self) -> None:
        # Whatever the program does with warnings: as an error it would end the run.
        warnings.filterwarnings("always", message="Error .* compilation cache entry")
        self._filter = warnings.filters[0]
        self._show_others = warnings.showwarning
        warnings.showwarning = self._show

    def _show(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """Turns JAX's warning into an event, and clears the way for a good entry."""
        if (match := _TROUBLE.match(str(message))) is None:
            self._show_others(message, *args, **kwargs)
            return
        action, program, reason = match.groups()
        # JAX never replaces an entry, and does not say which of the program's it was.
        for entry in self._folder.glob(f"{glob.escape(program)}-*"):
            with contextlib.suppress(OSError):
                entry.unlink()
        reason = f"{action} an entry of {program}: {' '.join(reason.split())[:300]}"
        self._emit("cache_unusable", path=str(self._folder), reason=reason)


def _count_hit(event: str, **_: str | int) -> None:
    if event == _HIT and (cache := CompileCache._enabled) is not None:
        cache.num_hits += 1


# Once for the process: JAX's listeners stay.
jax.monitoring.register_event_listener(_count_hit)


def cache_name(device: jax.Device) -> str:
    """Folder name: backend, versions and CPU features, all that a program needs."""
    backend = hashlib.sha256(device.client.platform_version.encode()).hexdigest()[:8]
    kind = device.device_kind.replace(" ", "_").replace("/", "_")
    versions = "-".join(
        f"{package}{importlib.metadata.version(package)}"
        for package in ("jax", "jaxlib")
    )
    return f"{device.platform}-{kind}-{versions}-{backend}-{cpu_features()}"


def _prove_writable(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{os.getpid()}"
    probe.write_bytes(b"x")
    probe.unlink()
