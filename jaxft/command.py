"""The command line as data: flags, config file, overrides; each misuse one line.

World: host-only. Floor: below `main`, which reads what is declared here.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from jaxft.config import Config, ConfigError, Section, fields

USAGE = """\
usage: python -m jaxft.main --config=FILE --workdir=FOLDER [--config.SECTION.FIELD=V]

  --config=FILE          a Python file with get_config() -> jaxft.Config;
                         FILE:ARGUMENT passes a string to get_config
  --config.SECTION.FIELD=VALUE
                         overrides one setting, e.g. --config.train.num_steps=500;
                         all settings with their meaning: jaxft/config.py
  --workdir=FOLDER       checkpoints, events, lock and compile cache; the same command
                         goes on where an earlier one stopped
  --role=supervise|work  restart the worker when it dies (default), or run it alone

exit codes: 0 finished, 65 not finite, 66 no usable checkpoint, 70 crashed,
            73 workdir in use, 74 save failed, 75 stopped (run again to go on),
            77 out of memory, 78 wrong config
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, understood.

    Attributes:
        argv: the words it came from, the program first.
        config: from the file, with overrides; not yet resolved.
        workdir: as it was given.
        role: `supervise` or `work`.
        attempt, event_fd, parent_fd, lock_fd, compile_cache, start_secs: what a
            supervisor tells its worker, see `jaxft.recovery.supervisor.Launch`.
    """

    argv: tuple[str, ...]
    config: Config
    workdir: str
    role: str
    attempt: int
    event_fd: int
    parent_fd: int
    lock_fd: int
    compile_cache: str
    start_secs: float


def parse(argv: Sequence[str]) -> Command:
    """Reads a command line.

    Raises:
        ConfigError: anything about it is wrong.
    """
    _check_config_file(argv)
    values = flags.FlagValues()
    _define_flags(values)
    # config_flags looks for the overrides in sys.argv.
    earlier, sys.argv = sys.argv, list(argv)
    try:
        rest = values(list(argv))
        config = values.config
    except Exception as error:
        raise _explain(argv, error) from error
    finally:
        sys.argv = earlier
    if len(rest) > 1:
        raise ConfigError("", f"unexpected arguments: {' '.join(rest[1:])}")
    if not values.workdir:
        raise ConfigError("", "--workdir=FOLDER is missing")
    if not isinstance(config, Config):
        name = type(config).__name__
        raise ConfigError("", f"get_config() returned {name}, not a jaxft.Config")
    names = [f.name for f in dataclasses.fields(Command)][2:]
    given = {name: getattr(values, name) for name in names}
    return Command(argv=tuple(argv), config=config, **given)


def _define_flags(values: flags.FlagValues) -> None:
    define: dict[str, Any] = {"flag_values": values}
    config_flags.DEFINE_config_file("config", None, "config file", **define)
    flags.DEFINE_string("workdir", "", "folder of the run", **define)
    flags.DEFINE_enum("role", "supervise", ["supervise", "work"], "role", **define)
    # What a supervisor tells its worker; not for use by hand.
    flags.DEFINE_integer("attempt", 0, "restarts before", **define)
    flags.DEFINE_integer("event_fd", -1, "event pipe", **define)
    flags.DEFINE_integer("parent_fd", -1, "pipe that ends with the parent", **define)
    flags.DEFINE_integer("lock_fd", -1, "inherited lock", **define)
    modes = ["keep", "off", "fresh"]
    flags.DEFINE_enum("compile_cache", "keep", modes, "compile cache", **define)
    flags.DEFINE_float("start_secs", 0.0, "start of the command", **define)


def _config_file(argv: Sequence[str]) -> str | None:
    """What `--config` names, without an argument for get_config."""
    for index, word in enumerate(argv):
        if word in ("--config", "-config") and index + 1 < len(argv):
            return argv[index + 1].partition(":")[0]
        for prefix in ("--config=", "-config="):
            if word.startswith(prefix):
                return word.removeprefix(prefix).partition(":")[0]
    return None


def _check_config_file(argv: Sequence[str]) -> None:
    name = _config_file(argv)
    if not name:
        raise ConfigError("", "--config=FILE is missing, e.g. configs/tiny_lm.py")
    if not pathlib.Path(name).is_file():
        raise ConfigError("", f"--config={name}: there is no such file")
    if not os.access(name, os.R_OK):
        raise ConfigError("", f"--config={name}: the file cannot be read")


def _explain(argv: Sequence[str], error: Exception) -> ConfigError:
    """The parser's error in words for whoever typed the command."""
    for word in argv[1:]:
        name, _, value = word.lstrip("-").partition("=")
        if not name.startswith("config."):
            continue
        path = name.removeprefix("config.")
        if (problem := _path_problem(path)) is not None:
            return ConfigError(path, problem)
        if isinstance(error, flags.Error) and f"--{name}" in str(error):
            return ConfigError(path, _value_problem(value, error))
        if path.partition(".options.")[1] and isinstance(error, AttributeError):
            return ConfigError(path, "the config file does not declare this option")
    if isinstance(error, flags.Error) and "parsing config file" not in str(error):
        return ConfigError("", " ".join(str(error).split()))
    return _file_problem(argv, error)


def _path_problem(path: str) -> str | None:
    """What is wrong with a dotted path; None where it names a field."""
    section: Any = Config()
    for name in path.split("."):
        if not isinstance(section, Section):
            return None if path.partition(".options.")[1] else "this is not a section"
        known = [f.name for f in fields(section)]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else ", ".join(known)
            return f"there is no {name!r} here; {hint}"
        section = getattr(section, name)
    if isinstance(section, Section):
        return "this is a section; set one of its fields"
    return None


def _value_problem(value: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    _, _, reason = text.partition(": ")
    if "Non-boolean" in reason:
        reason = "must be true or false"
    return f"cannot be {value!r}: {reason or text}"


def _file_problem(argv: Sequence[str], error: BaseException) -> ConfigError:
    """An error inside the config file, with its place there."""
    name = _config_file(argv) or ""
    cause = error.__cause__ or error.__context__
    if isinstance(error, flags.Error) and cause is not None:
        error = cause
    place = name
    if isinstance(error, SyntaxError):
        place = f"{name}:{error.lineno}"
        message = error.msg
    else:
        message = " ".join(str(error).split())
        for frame in traceback.extract_tb(error.__traceback__):
            if pathlib.Path(frame.filename).name == pathlib.Path(name).name:
                place = f"{name}:{frame.lineno}"
    if "has no attribute 'get_config'" in message:
        return ConfigError("", f"--config={name}: it does not define get_config()")
    return ConfigError("", f"--config={place}: {type(error).__name__}: {message}")
