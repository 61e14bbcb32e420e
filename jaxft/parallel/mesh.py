"""The device mesh: how many devices lie along `data`, `fsdp` and `tensor`.

World: device. Floor: `parallel`, above `types`. Read `jaxft/config.py`
(`MeshConfig`) before this file and `jaxft/parallel/sharding.py` after it.

The only place of the package that may ask JAX for all devices, and only as a
default: after a slice is lost, that list still names the dead ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxft import records
from jaxft.config import ConfigError, MeshConfig

# Outermost first: neighbours along `tensor` are the nearest devices, those along
# `data` the farthest, as the traffic on the axes wants it.
AXES = ("data", "fsdp", "tensor")

# What JAX raises for a shape that the chips' wiring cannot take.
_UNFIT = (ValueError, NotImplementedError, AssertionError)


def make_mesh(
    config: MeshConfig | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Lays the devices out along `AXES`, all of them of type `Auto`.

    Args:
        config: sizes of the axes; None means all devices along `data`.
        devices: the devices to use, in this order where the hardware names no
            better one; None means all that JAX sees.

    Returns:
        A mesh with the axes `AXES`, axes of size one included. The size of an axis
        is its size over slices (`dcn_*`) times its size within a slice.

    Raises:
        ConfigError: the sizes do not fit the devices, or JAX finds none.
    """
    config = MeshConfig() if config is None else config
    devices = _all_devices() if devices is None else list(devices)
    used = _choose_devices(config, devices=devices)
    within, over = plan_axes(config, num_devices=len(used))
    grid = _arrange(used, within=within, over=over)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe_mesh(mesh: Mesh) -> dict[str, Any]:
    """What of a mesh can change numbers, as JSON values for the run record."""
    first = mesh.devices.flat[0]
    return {
        "axes": list(mesh.axis_names),
        "shape": list(mesh.devices.shape),
        "platform": first.platform,
        "device_kind": first.device_kind,
        "num_devices": mesh.devices.size,
    }


def plan_axes(
    config: MeshConfig, *, num_devices: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of `AXES` within a slice and over slices, with the -1 filled in.

    Raises:
        ConfigError: a size is impossible, or the product is not `num_devices`.
    """
    fields = [*AXES, *(f"dcn_{axis}" for axis in AXES)]
    sizes = {field: getattr(config, field) for field in fields}
    for field, size in sizes.items():
        if size == 0 or size < -1:
            raise ConfigError(f"mesh.{field}", f"must be positive or -1, is {size}")
    open_fields = [field for field, size in sizes.items() if size == -1]
    if len(open_fields) > 1:
        raise ConfigError(
            f"mesh.{open_fields[1]}",
            f"is -1 and so is mesh.{open_fields[0]}: only one can fill up",
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(
        str(size) for field, size in sizes.items() if field in AXES or size != 1
    )
    if open_fields:
        if num_devices % fixed:
            raise ConfigError(
                f"mesh.{open_fields[0]}",
                f"cannot fill up {product}: {fixed} does not divide "
                f"{num_devices} devices",
            )
        sizes[open_fields[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ConfigError(
            "mesh.data",
            f"{product} axes need {fixed} of {num_devices} devices: set "
            + (f"mesh.num_devices={fixed} or " if fixed < num_devices else "")
            + "mesh.data=-1",
        )
    values = tuple(sizes.values())
    return values[: len(AXES)], values[len(AXES) :]


def _all_devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except RuntimeError as error:
        # A plug-in without its hardware, or JAX_PLATFORMS names what is not here.
        raise ConfigError(
            "mesh", f"JAX finds no usable device: {records.first_line(error)}"
        ) from error


def _choose_devices(
    config: MeshConfig, *, devices: Sequence[jax.Device]
) -> list[jax.Device]:
    """The first `num_devices`, provided that no process is left without one."""
    count = config.num_devices
    if count == 0 and devices:
        return list(devices)
    if not 0 < count <= len(devices):
        raise ConfigError(
            "mesh.num_devices", f"asks for {count} of {len(devices)} devices"
        )
    used = list(devices[:count])
    processes = {device.process_index for device in devices}
    if idle := processes - {device.process_index for device in used}:
        raise ConfigError(
            "mesh.num_devices",
            f"{count} of {len(devices)} devices leave process {min(idle)} without "
            "one: start fewer processes",
        )
    return used


def _arrange(
    devices: Sequence[jax.Device], *, within: tuple[int, ...], over: tuple[int, ...]
) -> np.ndarray:
    """The devices as an array of one dim an axis."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    if math.prod(over) > 1:
        return _arrange_slices(devices, slices=slices, within=within, over=over)
    if devices[0].platform == "tpu" and len(slices) == 1:
        try:
            return mesh_utils.create_device_mesh(
                within, devices, allow_split_physical_axes=True
            )
        except _UNFIT as error:
            raise ConfigError(
                "mesh.data",
                f"{within} does not fit the chips: {records.first_line(error)}",
            ) from error
    # Devices come ordered by process, so that the inner axes stay within a host.
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(within)


def _arrange_slices(
    devices: Sequence[jax.Device],
    *,
    slices: set[int | None],
    within: tuple[int, ...],
    over: tuple[int, ...],
) -> np.ndarray:
    """One block a slice, so that only the `dcn_*` axes cross the network."""
    split = next(number for number, size in enumerate(over) if size > 1)
    field = f"mesh.dcn_{AXES[split]}"
    if None in slices:
        raise ConfigError(
            field,
            f"needs several slices, but {devices[0].device_kind!r} devices have no "
            "slice_index: set it to 1",
        )
    if len(slices) != math.prod(over):
        raise ConfigError(
            field,
            f"the dcn_* sizes ask for {math.prod(over)} slices, the devices lie in "
            f"{len(slices)}",
        )
    try:
        return mesh_utils.create_hybrid_device_mesh(
            within, over, devices, allow_split_physical_axes=True
        )
    except _UNFIT as error:
        raise ConfigError(
            field,
            f"{within} in each of {len(slices)} slices does not fit: "
            f"{records.first_line(error)}",
        ) from error
