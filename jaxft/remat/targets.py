"""Devices to compile for, here or not, and what the compiler says of a program.

World: device. Floor: `remat`. Read `jaxft/memory_plan.py`, its user, after this file.

`tpu:v5e:4x4` needs the TPU compiler (`libtpu`) and no TPU; `gpu:h100:8` the CUDA
plug-in and no GPU; `here` takes what JAX finds.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxft import records
from jaxft.config import ConfigError

# What the compiler lets a program have of each kind, as its own refusals say.
_TPU_BYTES = {
    "TPU v4": int(30.75 * 2**30),
    "TPU v5 lite": int(15.75 * 2**30),
    "TPU v5": int(95.74 * 2**30),
    "TPU v6 lite": int(31.25 * 2**30),
}
# FLOPs a second of a chip in bfloat16, and bytes a second between it and its host, as
# their makers publish the former and a PCIe link of 16 lanes gives the latter.
_PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA H100 80GB HBM3": 989e12,
}
_HOST_BYTES_PER_SEC = 16e9

_H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472
threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 } platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 8 }"""
_H100_BYTES = 84978434048

_NEEDED = re.compile(r"[Uu]sed ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_REQUIRED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Devices that a program is compiled for.

    Attributes:
        name: as it was given.
        devices: of JAX; not there in flesh unless the name is `here`.
        memory_bytes: what a program may have of one; None where nobody says.
        host_bytes_per_flop: what moves to the host while one FLOP is computed; 0 where
            host memory is no other memory.
        experimental: nothing of it was checked against the real thing.
    """

    name: str
    devices: Sequence[Any]
    memory_bytes: int | None
    host_bytes_per_flop: float = 0.0
    experimental: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a compiled program takes of one device.

    Attributes:
        peak_bytes: arguments, results that are not aliased, temporaries, code.
        host_bytes: arguments and temporaries in host memory.
        refused: the compiler's own words where it does not fit; `peak_bytes` is then
            what it says it would take, 0 where it does not say.
    """

    peak_bytes: int
    host_bytes: int = 0
    refused: str = ""


def find_target(name: str, *, devices: Sequence[Any] = ()) -> Target:
    """The devices that a name stands for.

    Args:
        name: `here`, `tpu:v5e:4x4`, `gpu:h100:8`.
        devices: what `here` means.

    Raises:
        ConfigError: there is no such target, or its compiler is not installed.
    """
    kind, _, rest = name.partition(":")
    if name == "here":
        return _here(devices)
    if kind == "tpu" and re.fullmatch(r"\w+:\d+(x\d+)+", rest):
        return _tpu(name, rest)
    if kind == "gpu" and (match := re.fullmatch(r"h100:(\d+)", rest)):
        return _gpu(name, int(match[1]))
    raise ConfigError(
        "", f"--target={name}: write here, tpu:v5e:4x4 (kind and shape) or gpu:h100:8"
    )


def _here(devices: Sequence[Any]) -> Target:
    # Of another process a device tells nothing.
    first = next(d for d in devices if d.process_index == jax.process_index())
    stats = first.memory_stats() or {}
    per_flop = 0.0
    if first.platform != "cpu":
        per_flop = _host_bytes_per_flop(first.device_kind)
    return Target(
        name="here",
        devices=devices,
        memory_bytes=stats.get("bytes_limit"),
        host_bytes_per_flop=per_flop,
    )


def _host_bytes_per_flop(device_kind: str) -> float:
    # Of a kind that is not in the table: as the slowest of it, that hides the most.
    return _HOST_BYTES_PER_SEC / _PEAK_FLOPS.get(device_kind, max(_PEAK_FLOPS.values()))


def _tpu(name: str, topology: str) -> Target:
    # No chip is touched: neither is one asked for, nor are others kept off.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        line = records.first_line(error)
        if "not installed" in line or ("libtpu" in line and "not" in line):
            raise ConfigError(
                "",
                f"--target={name} needs the TPU compiler: pip install 'jaxft[tpu-aot]'",
            ) from error
        raise ConfigError("", f"--target={name}: {line}") from error
    kind = described.devices[0].device_kind
    return Target(
        name=name,
        devices=described.devices,
        memory_bytes=_TPU_BYTES.get(kind),
        host_bytes_per_flop=_host_bytes_per_flop(kind),
    )


def _gpu(name: str, count: int) -> Target:
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            topology=f"1x1x{count}",
            target_config=_H100,
        )
    except Exception as error:
        version = jax.__version__
        raise ConfigError(
            "",
            f"--target={name} needs the CUDA compiler: pip install --no-deps "
            f"jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version} "
            f"({records.first_line(error)})",
        ) from error
    return Target(
        name=name,
        devices=described.devices,
        memory_bytes=_H100_BYTES,
        host_bytes_per_flop=_host_bytes_per_flop("NVIDIA H100 80GB HBM3"),
        experimental=True,
    )


def read_footprint(compiled: Any) -> Footprint:
    """What the compiler says that its program takes."""
    said = compiled.memory_analysis()
    return Footprint(
        peak_bytes=said.argument_size_in_bytes
        + said.output_size_in_bytes
        - said.alias_size_in_bytes
        + said.temp_size_in_bytes
        + said.generated_code_size_in_bytes,
        host_bytes=said.host_temp_size_in_bytes + said.host_argument_size_in_bytes,
    )


def read_refusal(error: BaseException) -> Footprint | None:
    """A compiler's "does not fit" as a footprint; None for any other error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = _NEEDED.search(text) or _REQUIRED.search(text)
    needed = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    return Footprint(peak_bytes=needed, refused=" ".join(text.split())[:300])
