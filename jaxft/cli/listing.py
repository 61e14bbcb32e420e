"""`ckpt ls` and `ckpt show`: what is there, without reading the arrays.

World: host-only. Floor: cli, below `ckpt`. Read `jaxft/cli/places.py` and
`jaxft/checkpoint/contents.py` before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from jaxft import records
from jaxft.checkpoint import decisions, layout, manifest, run_record
from jaxft.checkpoint.contents import Contents, Leaf
from jaxft.checkpoint.stored_tree import ArrayError
from jaxft.cli import places, text
from jaxft.patterns import Patterns
from jaxft.records import ExitCode

# --- ls -----------------------------------------------------------------------


def list_root(options: Any) -> int:
    """All steps of a root, and what else lies there."""
    root = places.root_at(options.where)
    found = decisions.discover(root)
    pinned = decisions.read(root).pinned
    steps = [_describe(info) for info in found.committed]
    for step in steps:
        step["pinned"] = step["step"] in pinned
    others = _others(found)
    total = _own_bytes([root])
    if options.json:
        text.print_json(
            {"root": root, "num_bytes": total, "steps": steps, "others": others}
        )
    elif not steps and not others:
        print(f"nothing in {root}")
    else:
        _print_list(root, steps, others, total)
    return ExitCode.FINISHED if steps else ExitCode.NO_CHECKPOINT


def _describe(info: records.CheckpointInfo) -> dict[str, Any]:
    """One row: what its JSON says, or why that cannot be read."""
    row: dict[str, Any] = {
        "step": info.step,
        "path": info.path,
        "time": info.commit_secs,
        "num_bytes": _own_bytes([info.path]),
        "num_linked_bytes": 0,
        "timeline": None,
        "array_layout": None,
        "codec": None,
        "healthy": None,
        "metrics": {},
        "problem": "",
    }
    try:
        record = run_record.read_record(info.path)
        row["time"] = record["time"]
        row["timeline"] = record.get("timeline", 0)
        row["metrics"] = record["metrics"]
        noted = manifest.read(info.path)
    except FileNotFoundError as error:
        is_manifest = f"/{layout.MANIFEST_ITEM}/" in str(error.filename)
        row["problem"] = "no manifest" if is_manifest else "no run record"
    except (OSError, ValueError, records.FaultError) as error:
        row["problem"] = " ".join(str(error).split())
    else:
        row["healthy"] = noted.healthy
        row["array_layout"], row["codec"] = noted.array_layout, noted.codec
        row["num_linked_bytes"] = sum(
            leaf.num_bytes for leaf in noted.leaves.values() if leaf.num_links
        )
    return row


def _others(found: layout.Discovery) -> list[dict[str, Any]]:
    """Everything that looks like a step and is no resume point."""
    named = [("abandoned", info.path) for info in found.abandoned]
    for path in found.set_aside:
        kind = "abandoned" if ".abandoned-" in os.path.basename(path) else "quarantined"
        named.append((kind, path))
    named += [("unfinished", path) for path, _ in found.unfinished]
    rows = [
        {"kind": kind, "path": path, "num_bytes": _own_bytes([path]), "reason": ""}
        for kind, path in named
    ]
    for path, reason in found.foreign:
        size = _own_bytes([path])
        row = {"kind": "foreign", "path": path, "num_bytes": size, "reason": reason}
        rows.append(row)
    return rows


def _own_bytes(paths: Iterable[str]) -> int:
    """Bytes on disk below some folders; a file with two names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in paths:
        for folder, _, files in os.walk(path):
            for file in files:
                try:
                    stat = os.lstat(os.path.join(folder, file))
                except FileNotFoundError:
                    continue
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def _print_list(
    root: str, steps: list[dict[str, Any]], others: list[dict[str, Any]], total: int
) -> None:
    head = ("step", "size", "linked", "saved", "timeline", "state", "metrics")
    rows = [
        (
            step["step"],
            text.size(step["num_bytes"]),
            f"{100 * step['num_linked_bytes'] // max(1, step['num_bytes'])} %",
            text.date(step["time"]),
            "?" if step["timeline"] is None else step["timeline"],
            _state(step),
            _metrics(step["metrics"]),
        )
        for step in steps
    ]
    if rows:
        print(text.table([head, *rows], right=(0, 1, 2, 4)))
    for other in others:
        reason = f" ({other['reason']})" if other["reason"] else ""
        print(
            f"{other['kind']}: {other['path']}, {text.size(other['num_bytes'])}{reason}"
        )
    linked = sum(step["num_linked_bytes"] for step in steps)
    print(
        f"{text.plural(len(steps), 'step')}, {text.size(total)} on disk in {root}"
        + (f"; {text.size(linked)} of the steps are links" if linked else "")
    )


def _state(step: dict[str, Any]) -> str:
    pinned = ", pinned" if step["pinned"] else ""
    if step["problem"]:
        return f"{step['problem']}{pinned}"
    return f"{'healthy' if step['healthy'] else 'NOT HEALTHY'}{pinned}"


def _metrics(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in metrics.items())


# --- show ---------------------------------------------------------------------


def show_step(options: Any) -> int:
    """What is in one step."""
    step = Contents(places.step_at(options.where))
    chosen = Patterns(options.match)
    leaves = [leaf for leaf in step.leaves.values() if chosen.match(leaf.path)]
    if step.manifest is None:
        step.store.open_ahead(leaf.name for leaf in leaves)
    rows = [_leaf_row(step, leaf) for leaf in leaves]
    record, noted = step.record or {}, step.manifest
    head = {
        "path": step.path,
        "step": record.get("step"),
        "time": record.get("time"),
        "timeline": record.get("timeline"),
        "array_layout": "ocdbt" if step.store.is_ocdbt else "files",
        "codec": noted.codec if noted else None,
        "healthy": noted.healthy if noted else None,
        "unhealthy": list(noted.unhealthy) if noted else [],
        "manifest": step.manifest_problem or ("there" if noted else "none"),
        "data": record.get("data"),
        "metrics": record.get("metrics"),
        "run": record.get("run"),
    }
    if options.json:
        text.print_json({**head, "leaves": rows})
        return ExitCode.FINISHED
    _print_head(head)
    _print_leaves(rows)
    return ExitCode.FINISHED


def _leaf_row(step: Contents, leaf: Leaf) -> dict[str, Any]:
    entry = leaf.entry
    row: dict[str, Any] = {
        "path": leaf.path,
        "name": leaf.name,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "type": leaf.type_text,
        "codec": step.manifest.codec if step.manifest and entry else None,
        "num_bytes": entry.num_bytes if entry else None,
        "num_chunks": entry.num_chunks if entry else None,
        "written_at": entry.written_at if entry else None,
        "num_links": entry.num_links if entry else None,
        "num_nonfinite": entry.num_nonfinite if entry else None,
        "fingerprint": str(entry.fingerprint) if entry else None,
        "text": step.texts.get(leaf.path) if not leaf.dtype else None,
        "problem": "",
    }
    if entry is None and leaf.is_stored:
        try:
            spec = step.store.spec(leaf.name)
        except ArrayError as error:
            row["problem"] = error.reason
        else:
            row["codec"] = ",".join(spec.codecs)
            row["num_chunks"] = spec.num_chunks
    return row


def _print_head(head: dict[str, Any]) -> None:
    if head["step"] is not None:
        timeline = f", timeline {head['timeline']}" if head["timeline"] else ""
        print(f"step {head['step']}{timeline}, saved {text.date(head['time'])}")
    health = {None: "no manifest: cannot be proven", True: "healthy"}.get(
        head["healthy"], f"NOT HEALTHY: {', '.join(head['unhealthy'])}"
    )
    if head["manifest"] not in ("there", "none"):
        health = head["manifest"]
    codec = f", {head['codec']}" if head["codec"] else ""
    print(f"{head['path']}: {head['array_layout']}{codec}, {health}")
    for name in ("data", "metrics"):
        if head[name]:
            print(f"{name} {json.dumps(head[name])}")


def _print_leaves(rows: list[dict[str, Any]]) -> None:
    head = ("leaf", "type", "bytes", "chunks", "codec", "written at", "fingerprint")
    lines = []
    for row in rows:
        linked = f" (linked {row['num_links']})" if row["num_links"] else ""
        written = "" if row["written_at"] is None else f"{row['written_at']}{linked}"
        last = row["problem"] or row["fingerprint"] or ""
        if row["text"] is not None:
            last = json.dumps(row["text"])
        if row["num_nonfinite"]:
            last += f" ({row['num_nonfinite']} not finite)"
        lines.append(
            (
                row["path"],
                row["type"],
                "" if row["num_bytes"] is None else text.size(row["num_bytes"]),
                "" if row["num_chunks"] is None else row["num_chunks"],
                row["codec"] or "",
                written,
                last,
            )
        )
    if lines:
        print(text.table([head, *lines], right=(2, 3)))
    total = sum(row["num_bytes"] or 0 for row in rows)
    size = f", {text.size(total)}" if total else ""
    print(f"{text.plural(len(rows), 'leaf')}{size}")
