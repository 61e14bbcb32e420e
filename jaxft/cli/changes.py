"""`ckpt prune`, `ckpt pin` and `ckpt rollback`: what changes a root.

World: host-only. Floor: cli, below `ckpt`. Read `jaxft/cli/places.py` and
`jaxft/checkpoint/decisions.py` before.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from jaxft import durable, records
from jaxft.checkpoint import decisions, layout, manifest, verify
from jaxft.cli import places, text
from jaxft.records import ExitCode


def prune(options: Any) -> int:
    """Deletes set-aside and unfinished steps, as far as they are named."""
    root = places.root_at(options.where)
    kinds = [
        kind
        for kind in ("quarantined", "abandoned", "unfinished")
        if getattr(options, kind)
    ]
    if not kinds:
        raise _refused("name what may go: --quarantined, --abandoned or --unfinished")
    with places.owned(root):
        doomed = _doomed(root, kinds)
        if not options.dry_run:
            for one in doomed:
                _delete(root, one["path"])
    total = sum(one["num_bytes"] for one in doomed)
    if options.json:
        result = {"root": root, "deleted": doomed, "num_bytes": total}
        text.print_json({**result, "dry_run": options.dry_run})
        return ExitCode.FINISHED
    verb = "would delete" if options.dry_run else "deleted"
    for one in doomed:
        print(f"{verb} {one['path']} ({text.size(one['num_bytes'])})")
    print(f"{verb} {text.plural(len(doomed), 'folder')}, {text.size(total)}")
    return ExitCode.FINISHED


def _doomed(root: str, kinds: list[str]) -> list[dict[str, Any]]:
    found = layout.discover(root)
    paths = [
        (kind, path)
        for kind in kinds
        for path in found.set_aside
        if f".{kind}-" in os.path.basename(path)
    ]
    if "unfinished" in kinds:
        paths += [("unfinished", path) for path, _ in found.unfinished]
    return [
        {"kind": kind, "path": path, "num_bytes": layout.count_bytes(path)}
        for kind, path in paths
    ]


def _delete(root: str, path: str) -> None:
    """Deletes one entry of the root, and nothing that it links to."""
    if os.path.dirname(path) != os.path.abspath(root):
        raise _refused(f"{path} is not in {root}")
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    durable.sync_folder(root)


def roll_back(options: Any) -> int:
    """Makes an earlier step the newest one, for good."""
    root = places.root_at(options.where)
    reason = _reason(options)
    aside: list[str] = []

    def emit(kind: str, /, **fields: Any) -> None:
        if kind == "abandoned":
            aside.append(fields["path"])

    with places.owned(root):
        found = decisions.discover(root)
        if options.to in found.steps:
            _check_resume_point(layout.step_path(root, options.to))
        done = decisions.roll_back(
            root, to=options.to, reason=reason, skip=options.skip, emit=emit
        )
    if options.json:
        fields = {"from": done.origin, "to": done.to, "timeline": done.timeline}
        fields |= {"skip": done.skip, "reason": reason, "aside": aside}
        text.print_json({"root": root, **fields})
        return ExitCode.FINISHED
    print(f"{root} is back at step {done.to}, on timeline {done.timeline}")
    if done.skip:
        print(f"batches {done.skip[0]} to {done.skip[1] - 1} are left out from now on")
    for path in aside:
        print(f"kept as {path}")
    return ExitCode.FINISHED


def _check_resume_point(path: str) -> None:
    """Refuses a step from which no run could go on: the later ones would be gone.

    All of it is read, as a run would do that begins there.
    """
    progress = text.Progress(f"verifying {path}", num_bytes=_num_array_bytes(path))
    try:
        problems = verify.verify_step(path, allow_unproven=True, progress=progress.add)
    finally:
        progress.close()
    if problems:
        raise places.nothing_there(f"{path} is damaged: {problems[0]}; nothing changed")
    if not verify.is_healthy(path):
        raise places.nothing_there(f"{path} is not healthy: nothing changed")


def _num_array_bytes(path: str) -> int:
    try:
        return verify.count_bytes(manifest.read(path))
    except (OSError, manifest.ManifestError):
        return 0  # Whoever verifies it says what is wrong.


def pin(options: Any) -> int:
    """Keeps a step for ever, whatever the policy of the run."""
    root = places.root_at(options.where)
    reason = _reason(options)
    with places.owned(root):
        if is_new := options.step not in decisions.read(root).pinned:
            decisions.pin(root, options.step, reason=reason)
    if options.json:
        fields = {"step": options.step, "reason": reason, "is_new": is_new}
        text.print_json({"root": root, **fields})
        return ExitCode.FINISHED
    word = "is kept for ever" if is_new else "was pinned before"
    print(f"step {options.step} of {root} {word}")
    return ExitCode.FINISHED


def _reason(options: Any) -> str:
    """What people are told, as one line."""
    reason = " ".join(options.reason.split())
    if not reason:
        raise _refused("--reason is empty: say why, for whoever reads it later")
    return reason


def _refused(problem: str) -> records.FaultError:
    return records.fault_error(records.FaultKind.CONFIG, problem)
