"""The command line as data: flags, config file, overrides; each misuse one line.

World: host-only. Floor: below `main`, which reads what is declared here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxft.config import Config, ConfigError, check_types
from jaxft.settings import Section, fields, type_words

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
  --role=compile --target=tpu:v5e:4x4
                         compile the run for devices that need not be here, and exit
  --num_processes=N      alone: starts all processes of a job on this machine
  --num_processes=N --process_index=I --coordinator=HOST:PORT
                         who this is, where neither Slurm nor Kubernetes says it

exit codes: 0 finished, 65 not finite, 66 no usable checkpoint, 69 peer lost,
            70 crashed, 71 hung, 73 workdir in use, 74 save failed, 75 stopped
            (run again to go on), 77 out of memory, 78 wrong config
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, understood.

    Attributes:
        argv: the words it came from, the program first.
        config: from the file, with overrides; not yet resolved.
        workdir: as it was given.
        role: `supervise`, `work` or `compile`.
        num_processes: of the whole job; None when it was not given.
        process_index: of this one; None when it was not given.
        coordinator: `host:port`; empty when it was not given.
        target: what `compile` compiles for.
    """

    argv: tuple[str, ...]
    config: Config
    workdir: str
    role: str
    num_processes: int | None = None
    process_index: int | None = None
    coordinator: str = ""
    target: str = "here"


def parse(argv: Sequence[str]) -> Command:
    """Reads a command line; runs the config file.

    Raises:
        ConfigError: anything about it is wrong.
    """
    file, words = _split_config(argv)
    config = _load(file)
    overrides = [(path, value, _look_up(config, path)) for path, value in _paths(words)]
    values = flags.FlagValues()
    try:
        _define_flags(values, config, words)
        rest = values(words)
    except Exception as error:
        raise _explain(error, overrides) from error
    if len(rest) > 1:
        raise ConfigError("", f"unexpected arguments: {' '.join(rest[1:])}")
    _check_workdir(values.workdir)
    return Command(
        argv=tuple(argv),
        config=values.config,
        workdir=values.workdir,
        role=values.role,
        num_processes=values.num_processes,
        process_index=values.process_index,
        coordinator=values.coordinator,
        target=_target(values),
    )


def _define_flags(values: flags.FlagValues, config: Config, words: list[str]) -> None:
    define: dict[str, Any] = {"flag_values": values}
    config_flags.DEFINE_config_dataclass("config", config, sys_argv=words, **define)
    once = define | {"allow_overwrite": False}
    flags.DEFINE_string("workdir", "", "folder of the run", **once)
    flags.DEFINE_enum(
        "role", "supervise", ["supervise", "work", "compile"], "role", **define
    )
    flags.DEFINE_integer("num_processes", None, "of the whole job", **define)
    flags.DEFINE_integer("process_index", None, "of this process", **define)
    flags.DEFINE_string("target", "", "what --role=compile compiles for", **define)
    flags.DEFINE_string("coordinator", "", "host:port where they meet", **define)


def _target(values: flags.FlagValues) -> str:
    if values.target and values.role != "compile":
        raise ConfigError("", "--target goes with --role=compile only")
    return values.target or "here"


def _split_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """What `--config` says, and the command line without it."""
    files, words = [], []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("--config", "-config"):
            files.append(value if equals else next(rest, ""))
        else:
            words.append(word)
    if len(files) > 1:
        raise ConfigError("", f"--config is given twice: {' and '.join(files)}")
    if not files or not files[0]:
        raise ConfigError("", "--config=FILE is missing, e.g. configs/tiny_lm.py")
    return files[0], words


def _load(file: str) -> Config:
    """Runs `FILE` or `FILE:ARGUMENT`; the config is typed, not yet resolved."""
    name, colon, argument = file.partition(":")
    if not pathlib.Path(name).is_file():
        raise ConfigError("", f"--config={name}: there is no such file")
    # Its own module, for classes in it to find their home.
    module = types.ModuleType("jaxft_config_file")
    module.__file__ = name
    sys.modules[module.__name__] = module
    try:
        source = pathlib.Path(name).read_bytes()
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError("", f"--config={name}: it does not define get_config()")
        arguments = [argument] if colon else []
        _check_arguments(file, get_config, arguments)
        config = get_config(*arguments)
    except ConfigError:
        raise
    # A file that calls sys.exit must not look like a finished run.
    except (Exception, SystemExit) as error:
        raise _file_problem(name, error) from error
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise ConfigError("", f"get_config() returned {kind}, not a jaxft.Config")
    check_types(config)
    return config


def _check_arguments(
    file: str, get_config: Callable[..., Any], arguments: list[str]
) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            "",
            f"--config={file}: get_config: {error}; "
            "--config=FILE passes no argument, --config=FILE:ARGUMENT one string",
        ) from error


def _file_problem(name: str, error: BaseException) -> ConfigError:
    """An error inside the config file, with its place there."""
    message = " ".join(str(error).split())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == name
    ]
    if isinstance(error, SyntaxError) and error.filename in (name, None):
        lines, message = [error.lineno], error.msg
    place = f"{name}:{lines[-1]}" if lines and lines[-1] else name
    reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ConfigError("", f"--config={place}: {reason}")


def _paths(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Path and value of each override."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        match = re.fullmatch(r"--?(?:no)?config\.(.*)", name)
        if match:
            after = words[index + 1] if index + 1 < len(words) else ""
            yield match[1], value if equals else after


def _look_up(config: Config, path: str) -> Any:
    """The value at a path that can be overridden."""
    value: Any = config
    for name in path.split("."):
        if isinstance(value, Section):
            known, unknown = (
                [f.name for f in fields(value)],
                f"there is no {name!r} here",
            )
        elif isinstance(value, ConfigDict):
            known, unknown = list(value), "the config file does not declare this option"
        else:
            raise ConfigError(path, "this is not a section")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else ", ".join(known)
            raise ConfigError(path, f"{unknown}; {hint}" if hint else unknown)
        value = getattr(value, name) if isinstance(value, Section) else value[name]
    if isinstance(value, Section | ConfigDict):
        raise ConfigError(path, "this is a section; set one of its fields")
    return value


def _explain(
    error: Exception, overrides: Sequence[tuple[str, str, Any]]
) -> ConfigError:
    """The parser's error in words for whoever typed the command."""
    text = " ".join(str(error).split())
    for path, value, before in overrides:
        shown = " ".join(value.split())
        if f"--config.{path}={shown}:" in text:
            return ConfigError(
                path, f"must be {type_words(type(before))}, is {value!r}"
            )
        if text.endswith(f"--config.{path}"):
            return ConfigError(path, f"a value is missing: --config.{path}=VALUE")
        if f"field config.{path} " in text:
            kind = type(before).__name__
            return ConfigError(path, f"a {kind} can only be set in the config file")
    return ConfigError("", text)


def _check_workdir(workdir: str) -> None:
    if not workdir:
        raise ConfigError("", "--workdir=FOLDER is missing")
    path = os.path.realpath(os.path.expanduser(workdir))
    if path == os.path.dirname(path):
        raise ConfigError("", f"--workdir={workdir}: a whole file system is no workdir")
    if os.path.expanduser(workdir).startswith("~"):
        raise ConfigError("", f"--workdir={workdir}: there is no such user")
