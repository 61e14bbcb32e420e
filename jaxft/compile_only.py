"""Plans and compiles a run for devices that need not be here, and prints a table.

World: host-only until it compiles. Floor: beside `worker`, below `main` and `cli`.
Read `jaxft/memory_record.py` next.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

from jaxft.config import Config


def compile_run(config: Config, target: str, workdir: pathlib.Path) -> str:
    """Compiles a run for a target; its plan, where it chose one, stays in the workdir.

    Returns:
        The table.
    """
    planning = load_planning(target)
    record = importlib.import_module("jaxft.memory_record")
    silent = lambda _kind, /, **_fields: None
    found = record.find_plan(config, workdir=workdir, emit=silent, target_name=target)
    if found is None:
        return table(planning.plan_for(config, target))
    if found.is_new:
        found.write(workdir)
    return table(found.content["report"])


def load_planning(target: str) -> Any:
    """The module that plans; it brings jax, told before it loads what it may touch."""
    if target != "here":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # By name: the toolbox itself starts without jax.
    return importlib.import_module("jaxft.memory_plan")


def table(found: dict[str, Any]) -> str:
    """A report of `jaxft.memory_plan.plan_for`, for people."""
    rows = [["layers", "policy", "kept", "on host", "recomputed"]]
    rows += [
        [
            group["layers"],
            group["policy"],
            _mib(group["kept_bytes"]),
            _mib(group["host_bytes"]),
            f"{group['recompute_percent']:.1f} %",
        ]
        for group in found["groups"]
    ]
    memory = found["memory_bytes"]
    share = f", {100 * found['peak_bytes'] / memory:.0f} % of it" if memory else ""
    lines = [
        f"target     {found['target']}, {found['num_devices']} x {found['device']}"
        + (", experimental: not checked against hardware" * found["experimental"]),
        f"memory     {_mib(memory) if memory else 'unknown'} a device",
        f"peak       {_mib(found['peak_bytes'])} compiled{share}; "
        f"{_mib(found['host_bytes'])} on the host",
        f"recomputed {found['recompute_percent']:.1f} % of the layers' forward pass",
        f"compiles   {len(found['trials'])} in {found['secs']:.0f} s",
        "",
        *_aligned(rows),
    ]
    if found["collectives"]:
        table_rows = [["collective", "a step", "bytes a device"]]
        table_rows += [
            [c["kind"], str(c["count"]), _mib(c["num_bytes"])]
            for c in found["collectives"]
        ]
        lines += ["", *_aligned(table_rows)]
    return "\n".join([*lines, "", f"remat.plan = {found['plan']!r}"])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
