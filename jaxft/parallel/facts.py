"""What outside the config can change numbers, as plain values for the run record.

World: device. Floor: below the eight rooms. Read `jaxft/build.py` next.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
from typing import Any

import jax

from jaxft.parallel.mesh import describe_mesh

_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def collect_facts(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Versions, flags, devices and mesh of this process, JSON values only.

    A resume that differs in one of them may give other numbers; it is refused
    unless `resume.allow` names it.
    """
    described = describe_mesh(mesh)
    facts: dict[str, Any] = {
        package: importlib.metadata.version(package) for package in _PACKAGES
    }
    facts |= {name: _without_outputs(os.environ.get(name, "")) for name in _ENVIRONMENT}
    # As text: some settings are enums, and their default is None.
    facts |= {name: str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS}
    facts |= {f"mesh.{name}": value for name, value in described.items()}
    facts["backend"] = mesh.devices.flat[0].client.platform_version
    facts["num_processes"] = len({d.process_index for d in mesh.devices.flat})
    if described["platform"] == "cpu":
        # Vector width decides the order of sums: another CPU, other last bits.
        facts["cpu"] = cpu_features()
    return facts


def cpu_features() -> str:
    """A short hash of what this machine's CPU can do."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    lines = text.splitlines()
    wanted = ("flags", "Features", "model name", "CPU part")
    seen = sorted({line for line in lines if line.startswith(wanted)})
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]


def _without_outputs(flags: str) -> str:
    """Flags in a fixed order, without those for dumps and for time limits."""
    kept = [f for f in flags.split() if "dump" not in f and "timeout" not in f]
    return " ".join(sorted(kept))
