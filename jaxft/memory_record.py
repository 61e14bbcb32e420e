"""The plan in force: `<workdir>/remat.json`, made once, reused, never re-made unseen.

World: device. Floor: above `memory_plan`, below `worker`. Read `jaxft/memory_plan.py`
before this file.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax

from jaxft import durable, memory_plan, settings
from jaxft.config import Config, ConfigError
from jaxft.records import Emit
from jaxft.remat.targets import Target, read_footprint

FILE = "remat.json"
_FORMAT = 1
# What a plan depends on: sections whole, and single settings of others.
_SECTIONS = ("model", "loss", "mesh", "sharding", "precision", "remat")
_SETTINGS = (
    "optimizer.factory",
    "optimizer.trainable",
    "data.factory",
    "data.global_batch",
    "data.seq_len",
    "train.num_microbatches",
    "train.ema_decay",
    "train.offload_opt_state",
)
# A real peak that is further off than this is told.
_TOLERANCE = 0.10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanInForce:
    """What `auto` came to for this run.

    Attributes:
        plan: as `remat.plan` takes it.
        content: of the file.
        is_new: whether it was decided just now, so that it must be written.
    """

    plan: str
    content: dict[str, Any]
    is_new: bool

    def write(self, workdir: pathlib.Path) -> None:
        """Replaces the file atomically.

        Raises:
            ConfigError: the workdir takes no file.
        """
        body = json.dumps(self.content, indent=1) + "\n"
        try:
            durable.replace(workdir / FILE, body.encode())
        except OSError as error:
            problem = f"{workdir / FILE} cannot be written: {error.strerror}"
            raise ConfigError("", problem) from error


def find_plan(
    config: Config, *, workdir: pathlib.Path, emit: Emit, target_name: str = "here"
) -> PlanInForce | None:
    """The plan of a run where `remat.plan` is `auto`; None where it is not.

    Reads the workdir, and writes nothing to it.

    Raises:
        ConfigError: nothing fits, or several processes have no plan yet.
    """
    if config.remat.plan.strip() != "auto":
        return None
    target = memory_plan.target_of(config, target_name)
    basis = _basis(config, target)
    saved, changes = _read(workdir / FILE, basis)
    if saved is not None and not changes:
        emit("remat_plan", plan=saved["plan"], reused=True, **_numbers(saved))
        return PlanInForce(plan=saved["plan"], content=saved, is_new=False)
    if target_name == "here" and jax.process_count() > 1:
        raise ConfigError(
            "remat.plan",
            "auto: several processes need a plan that is there: give the command "
            "once with --role=compile --target=tpu:KIND:SHAPE and the same --workdir, "
            f"which writes {FILE}, or name a plan",
        )
    if changes:
        emit("remat_replan", changes=changes)
    report = memory_plan.plan_for(config, target_name)
    content = {"format": _FORMAT, "plan": report["plan"], "basis": basis}
    content["report"] = report
    emit("remat_plan", plan=report["plan"], reused=False, **_numbers(content))
    return PlanInForce(plan=report["plan"], content=content, is_new=True)


def observe(compiled: Any) -> dict[str, int]:
    """What the compiler says of the step that runs, for the `compile` event."""
    try:
        footprint = read_footprint(compiled)
    except (AttributeError, NotImplementedError):
        return {}  # What stands for a program with virtual shards has no such thing.
    return {"peak_bytes": footprint.peak_bytes, "host_bytes": footprint.host_bytes}


def compare_peak(
    compiled_bytes: int, stats: dict[str, int] | None, *, emit: Emit
) -> None:
    """Tells the real peak where the backend reports it, and whether it is far off."""
    real = (stats or {}).get("peak_bytes_in_use")
    if not real or not compiled_bytes:
        return
    off = real / compiled_bytes - 1
    emit("memory", compiled_bytes=compiled_bytes, real_bytes=real, off=off)
    if abs(off) > _TOLERANCE:
        emit("memory_differs", compiled_bytes=compiled_bytes, real_bytes=real, off=off)


def _basis(config: Config, target: Target) -> dict[str, Any]:
    """Everything that the plan was decided on."""
    basis = {
        path: value
        for path, value in settings.flatten(config).items()
        if path.split(".")[0] in _SECTIONS or path in _SETTINGS
    }
    return basis | {
        "device": target.devices[0].device_kind,
        "num_devices": len(target.devices),
        "jax": jax.__version__,
    }


def _read(
    path: pathlib.Path, basis: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The saved decision, and what has changed since: path -> [then, now]."""
    try:
        saved = json.loads(path.read_bytes())
        is_ours = saved["format"] == _FORMAT and isinstance(saved["plan"], str)
        then = dict(saved["basis"])
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, KeyError, TypeError):
        return None, {FILE: ["unreadable", ""]}
    if not is_ours:
        return None, {FILE: ["of another format", ""]}
    paths = dict.fromkeys([*then, *basis])
    return saved, {
        name: [then.get(name), basis.get(name)]
        for name in paths
        if then.get(name) != basis.get(name)
    }


def _numbers(content: dict[str, Any]) -> dict[str, Any]:
    report = content.get("report", {})
    names = ("budget_bytes", "peak_bytes", "recompute_percent")
    numbers = {name: report.get(name) for name in names}
    return numbers | {"compiles": len(report.get("trials", ()))}
