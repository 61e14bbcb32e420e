"""The commands of `ckpt`, declared.

World: host-only. Floor: cli, below `__main__`. Read `jaxft/cli/listing.py`,
`jaxft/cli/proofs.py` and `jaxft/cli/changes.py` next: they do the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxft.cli import changes, listing, proofs

_WHERE = "a step's folder, a checkpoint root or a workdir"


def add_commands(groups: Any) -> None:
    """Adds `ckpt` and what is below it to the groups of the toolbox."""
    about = "looks into checkpoints, proves, compares, exports and tidies them"
    group = groups.add_parser("ckpt", help=about, description=about)
    commands = group.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[Any], int], about: str) -> Any:
        parser = commands.add_parser(name, help=about, description=about)
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.set_defaults(run=run)
        return parser

    ls = add("ls", listing.list_root, "all steps of a root, and what else lies there")
    ls.add_argument("where", metavar="ROOT", help="a checkpoint root or a workdir")
    show = add("show", listing.show_step, "what is in a step, by default the newest")
    show.add_argument("where", metavar="ROOT_OR_STEP", help=_WHERE)
    _add_match(show)
    _add_proofs(add)
    _add_changes(add)


def _add_proofs(add: Callable[..., Any]) -> None:
    verify = add("verify", proofs.verify_steps, "reads every byte and proves it")
    verify.add_argument("where", metavar="ROOT_OR_STEP", help=_WHERE)
    verify.add_argument(
        "--quick", action="store_true", help="only lengths and what describes the step"
    )
    verify.add_argument(
        "--allow-unproven",
        action="store_true",
        help="a step without manifest is fine when it can be read",
    )
    diff = add("diff", proofs.diff_steps, "compares two steps; exit code 1: different")
    diff.add_argument("a", metavar="A", help=_WHERE)
    diff.add_argument("b", metavar="B", help=_WHERE)
    _add_match(diff)
    export = add("export", proofs.export_step, "writes leaves into one file")
    export.add_argument("where", metavar="ROOT_OR_STEP", help=_WHERE)
    export.add_argument("out", metavar="OUT", help="FILE.safetensors or FILE.npz")
    export.add_argument(
        "--params-only",
        dest="match",
        action="store_const",
        const="params/**",
        default="**",
        help="the same as --match='params/**'",
    )
    _add_match(export)
    export.add_argument("--overwrite", action="store_true", help="replace OUT")


def _add_changes(add: Callable[..., Any]) -> None:
    prune = add(
        "prune",
        changes.prune,
        "deletes, for good and without a question, what is named",
    )
    prune.add_argument("where", metavar="ROOT", help="a checkpoint root or a workdir")
    prune.add_argument(
        "--quarantined", action="store_true", help="steps that were damaged"
    )
    prune.add_argument(
        "--abandoned", action="store_true", help="steps that a rollback took out"
    )
    prune.add_argument(
        "--unfinished", action="store_true", help="what interrupted saves left"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    rollback = add(
        "rollback",
        changes.roll_back,
        "makes an earlier step the newest one; later ones are renamed aside",
    )
    rollback.add_argument(
        "where", metavar="ROOT", help="a checkpoint root or a workdir"
    )
    rollback.add_argument("--to", type=_step, required=True, metavar="STEP")
    rollback.add_argument(
        "--skip",
        type=_window,
        metavar="A:B",
        help="leave out batches A to B-1 from now on",
    )
    rollback.add_argument("--reason", required=True, metavar="TEXT", help="for people")
    about = "keeps a step for ever, whatever the run's own policy"
    pin = add("pin", changes.pin, about)
    pin.add_argument("where", metavar="ROOT", help="a checkpoint root or a workdir")
    pin.add_argument("step", type=_step, metavar="STEP")
    pin.add_argument("--reason", required=True, metavar="TEXT", help="for people")


def _add_match(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--match",
        default="**",
        metavar="GLOBS",
        help="leaf paths, e.g. 'params/**, !params/embed'; by default all",
    )


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step")
    return int(text)


def _window(text: str) -> tuple[int, int]:
    start, colon, stop = text.partition(":")
    is_one = colon and start.isdecimal() and stop.isdecimal()
    if not is_one or int(start) >= int(stop):
        problem = f"{text!r} is no window of batches: write e.g. 1000:1200"
        raise argparse.ArgumentTypeError(problem)
    return int(start), int(stop)
