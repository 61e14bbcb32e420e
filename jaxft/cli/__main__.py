"""The toolbox: `python -m jaxft.cli ckpt|report|simulate|drill|plan ...`.

World: host-only. Floor: the top, beside `main`. Read `jaxft/cli/ckpt.py`,
`jaxft/cli/report.py`, `jaxft/cli/simulate.py`, `jaxft/cli/drill.py` and
`jaxft/cli/plan.py` next.

Exit codes: 0 fine, 1 two checkpoints differ or a drill was not passed, 66 a problem
was found or nothing is there, 73 a run is using it, 74 it cannot be read or written
now, 75 interrupted, 78 wrong usage. Every error is one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxft.checkpoint.export import ExportError
from jaxft.checkpoint.run_record import RecordError
from jaxft.checkpoint.stored_tree import ArrayError
from jaxft.cli import ckpt, drill, plan, report, simulate
from jaxft.config import ConfigError
from jaxft.records import ExitCode, FaultError


class _UsageError(Exception):
    """A command line that is not understood."""


class _Parser(argparse.ArgumentParser):
    """Argparse whose errors are one line, told in one place."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = _Parser(
        prog="python -m jaxft.cli", description="Looks after runs of jaxft."
    )
    groups = parser.add_subparsers(metavar="GROUP", required=True)
    ckpt.add_commands(groups)
    report.add_command(groups)
    simulate.add_command(groups)
    drill.add_command(groups)
    plan.add_command(groups)
    try:
        options, rest = parser.parse_known_args(argv)
        options.settings = [word for word in rest if word.startswith("--config.")]
        takes_settings = getattr(options, "takes_settings", False)
        if wrong := [
            w for w in rest if not takes_settings or w not in options.settings
        ]:
            raise _UsageError(f"unrecognized arguments: {' '.join(wrong)}; see --help")
        return options.run(options)
    except (_UsageError, ExportError, ConfigError) as error:
        return _fail(str(error), ExitCode.CONFIG)
    except FaultError as error:
        return _fail(str(error), error.fault.exit_code)
    except (ArrayError, RecordError) as error:
        return _fail(str(error), ExitCode.NO_CHECKPOINT)
    except BrokenPipeError:
        # Who read it has seen enough; the interpreter's own flush must not say more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.FINISHED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", ExitCode.SAVE_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.STOPPED)


def _fail(problem: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(f"jaxft: {' '.join(problem.split())}", file=sys.stderr)
    return int(code)


def run() -> NoReturn:
    """`main` as a process of its own."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            # Leaf names may hold what the terminal does not know. A type checker knows
            # of no such method: a stream that was put in their place may lack it.
            stream.reconfigure(errors="backslashreplace")  # pyrefly: ignore
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


if __name__ == "__main__":
    run()
