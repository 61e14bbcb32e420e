"""`ckpt verify`, `ckpt diff` and `ckpt export`: what reads the arrays.

World: host-only. Floor: cli, below `ckpt`. Read `jaxft/cli/places.py` and
`jaxft/checkpoint/verify.py` before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from jaxft.checkpoint import diff, export, manifest, verify
from jaxft.checkpoint.diff import Change, LeafDiff
from jaxft.cli import places, text
from jaxft.records import ExitCode

_DIFFERENT = 1


def verify_steps(options: Any) -> int:
    """Proves a step, or all steps of a root."""
    results = []
    for path in places.steps_at(options.where):
        result = _verify(path, options)
        if result is None:
            continue  # A run's own retention was faster.
        results.append(result)
        if not options.json:
            _print_proof(result)
    is_good = not any(result["problems"] for result in results)
    if options.json:
        text.print_json({"proven": is_good, "steps": results})
    return ExitCode.FINISHED if is_good else ExitCode.NO_CHECKPOINT


def _verify(path: str, options: Any) -> dict[str, Any] | None:
    """What was found in one step; None when it was deleted meanwhile."""
    start = time.monotonic()
    num_bytes, has_manifest = 0, False
    with contextlib.suppress(OSError, manifest.ManifestError):
        num_bytes, has_manifest = verify.count_bytes(manifest.read(path)), True
    progress = text.Progress(f"verifying {path}", num_bytes=num_bytes)
    try:
        problems = verify.verify_step(
            path,
            full=not options.quick,
            allow_unproven=options.allow_unproven,
            progress=progress.add,
        )
    except FileNotFoundError:
        if os.path.isdir(path):
            raise
        return None
    finally:
        progress.close()
    if not os.path.isdir(path):
        return None
    return {
        "path": path,
        "has_manifest": has_manifest,
        "full": not options.quick,
        "num_bytes": num_bytes,
        "secs": round(time.monotonic() - start, 3),
        "problems": [
            {"path": one.path, "leaf": one.leaf, "reason": one.reason, "text": str(one)}
            for one in problems
        ],
    }


def _print_proof(result: dict[str, Any]) -> None:
    path, problems = result["path"], result["problems"]
    if problems:
        print(f"{path}: {text.plural(len(problems), 'problem')}")
        for problem in problems:
            print(f"  {problem['text']}")
        return
    word = "proven" if result["full"] else "complete, its arrays were not read"
    if not result["has_manifest"]:
        word = "readable, but without a manifest nothing is proven"
    print(f"{path}: {word} ({text.size(result['num_bytes'])}, {result['secs']:.1f} s)")


def diff_steps(options: Any) -> int:
    """Compares two steps."""
    a, b = places.step_at(options.a), places.step_at(options.b)
    leaves = list(diff.diff(a, b, paths=options.match))
    different = [leaf for leaf in leaves if leaf.change is not Change.EQUAL]
    num_equal = len(leaves) - len(different)
    if options.json:
        rows = [
            {
                "path": leaf.path,
                "change": str(leaf.change),
                "type_a": leaf.type_a,
                "type_b": leaf.type_b,
                "num_elements": leaf.num_elements,
                "num_different": leaf.num_different,
                "max_abs": leaf.max_abs,
                "max_rel": leaf.max_rel,
            }
            for leaf in different
        ]
        text.print_json({"a": a, "b": b, "num_equal": num_equal, "different": rows})
    else:
        if different:
            print(text.table([_HEAD, *map(_row, different)], right=(2, 3, 4)))
        equal = text.plural(num_equal, "leaf")
        print(f"{equal} equal, {len(different)} different: A is {a}, B is {b}")
    return _DIFFERENT if different else ExitCode.FINISHED


_HEAD = ("leaf", "what", "different", "max abs", "max rel")


def _row(leaf: LeafDiff) -> tuple[str, ...]:
    if leaf.change is Change.ONLY_A:
        return (leaf.path, f"{leaf.type_a} only in A", "", "", "")
    if leaf.change is Change.ONLY_B:
        return (leaf.path, f"{leaf.type_b} only in B", "", "", "")
    what = leaf.type_a
    if leaf.change is Change.TYPE:
        what = f"{leaf.type_a} in A, {leaf.type_b} in B"
    if not leaf.num_different or not leaf.num_elements:
        return (leaf.path, what, "", "", "")
    share = f"{leaf.num_different} of {leaf.num_elements}"
    return (leaf.path, what, share, f"{leaf.max_abs:.3g}", f"{leaf.max_rel:.3g}")


def export_step(options: Any) -> int:
    """Writes leaves of a step into one file."""
    step = places.step_at(options.where)
    done = export.export(
        step,
        os.path.expanduser(options.out),
        paths=options.match,
        overwrite=options.overwrite,
    )
    if options.json:
        text.print_json(
            {
                "step": step,
                "path": done.path,
                "num_bytes": done.num_bytes,
                "names": list(done.names),
                "left_out": list(done.left_out),
                "proven": done.is_proven,
            }
        )
        return ExitCode.FINISHED
    checked = "checked against their fingerprints"
    if not done.is_proven:
        checked = "there were no fingerprints to check them against"
    arrays = text.plural(len(done.names), "array")
    print(f"{done.path}: {arrays} of {step}, {text.size(done.num_bytes)}, {checked}")
    if done.left_out:
        print(f"left out, being text: {', '.join(done.left_out)}", file=sys.stderr)
    return ExitCode.FINISHED
