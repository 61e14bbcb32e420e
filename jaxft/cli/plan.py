"""`plan`: what a run's layers keep, and whether it fits devices that are not here.

World: host-only until it runs. Floor: cli, below `__main__`. Read
`jaxft/compile_only.py` before.

The run's own step is compiled by the target's own compiler; nothing is run, and no
data beyond the first row is read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jaxft import command, compile_only
from jaxft import config as configs
from jaxft.records import ExitCode


def add_command(groups: Any) -> None:
    """Adds `plan` to the toolbox."""
    about = "what each layer keeps, compiled for a target; no accelerator needed"
    parser = groups.add_parser("plan", help=about, description=about)
    parser.add_argument("--config", required=True, help="as for jaxft.main")
    parser.add_argument(
        "--target",
        default="here",
        help="here, tpu:v5e:4x4 (kind and shape), or gpu:h100:8 (experimental)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    # Whatever else there is must be a setting: `--config.section.field=value`.
    parser.set_defaults(run=plan, takes_settings=True)


def plan(options: Any) -> int:
    """Plans, compiles and prints; refuses like a run would."""
    words = [f"--config={options.config}", *options.settings]
    parsed = command.parse(["plan", *words, "--workdir=unused-by-plan"])
    config = configs.resolve(parsed.config)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = compile_only.load_planning(options.target).plan_for(config, options.target)
    print(json.dumps(found, indent=1) if options.json else compile_only.table(found))
    return ExitCode.FINISHED
