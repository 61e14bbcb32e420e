"""jaxft: fault-tolerant training for JAX and Flax.

Nothing is imported until a name is used, so that host-only programs (the
supervisor, the command line) never load jax.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOMES = {
    "CheckpointManager": "jaxft.checkpoint.manager",
    "Config": "jaxft.config",
    "ConfigError": "jaxft.settings",
    "EventLog": "jaxft.events",
    "ExitCode": "jaxft.records",
    "Experience": "jaxft.intervals",
    "Fault": "jaxft.records",
    "FaultError": "jaxft.records",
    "Mirror": "jaxft.checkpoint.mirror",
    "Model": "jaxft.types",
    "StepMeter": "jaxft.metrics.meters",
    "StepOutput": "jaxft.types",
    "TimeLimits": "jaxft.limits",
    "TrainState": "jaxft.types",
    "Watchdog": "jaxft.faults.watchdog",
    "account_of_workdir": "jaxft.goodput.account",
    "constrain_rows": "jaxft.parallel.activations",
    "explain": "jaxft.parallel.sharding",
    "from_functions": "jaxft.models.adapters",
    "from_linen": "jaxft.models.adapters",
    "from_nnx": "jaxft.models.adapters",
    "load": "jaxft.checkpoint.foreign",
    "make_mesh": "jaxft.parallel.mesh",
    "make_train_step": "jaxft.train.step",
    "plan_placements": "jaxft.parallel.sharding",
    "plan_shardings": "jaxft.parallel.sharding",
    "put_batch": "jaxft.parallel.sharding",
    "run": "jaxft.notebook",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
