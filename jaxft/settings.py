"""What a config is made of: sections of typed fields, locked once they are resolved.

World: host-only. Floor: the lowest, beside `records`. Read `jaxft/config.py` next,
which declares the sections.

No postponed annotations here: config_flags needs the real classes.
"""

import contextlib
import copy
import dataclasses
import enum
import functools
import json
import math
import typing
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any, TypeVar

from ml_collections import ConfigDict


class ConfigError(ValueError):
    """A setting that cannot work, named by its path in the config.

    Attributes:
        path: the dotted config path, e.g. `data.global_batch`; empty for the command.
        problem: one line: what is wrong and what to do.
    """

    def __init__(self, path: str, problem: str):
        super().__init__(f"config.{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


def setting(
    default: Any,
    meaning: str,
    *,
    numbers: bool = True,
    must: tuple[str, Callable[[float], bool]] | None = None,
) -> Any:
    """A config field and its meaning.

    `numbers`: it can change what is computed; `must`: what `resolve` asks of it.
    """
    metadata = {"meaning": meaning, "numbers": numbers, "must": must}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def within(words: str, holds: Callable[[float], bool]) -> Callable[..., Any]:
    """A `setting` whose value must be within a range; `words` say which."""
    return functools.partial(setting, must=(words, holds))


# Sizes and steps are 32-bit integers on the devices; nothing here needs more.
positive = within("positive and below 2**31", lambda x: 0 < x < 2**31)
not_negative = within("at least 0 and below 2**31", lambda x: 0 <= x < 2**31)
fraction = within("at least 0 and below 1", lambda x: 0 <= x < 1)
share = within("between 0 and 1", lambda x: 0 <= x <= 1)
# jax.random.key drops higher bits: two seeds would be one.
seed32 = within("at least 0 and below 2**32", lambda x: 0 <= x < 2**32)


S = TypeVar("S", bound="Section")


class Section:
    """Base of all sections: plain attributes until `lock`, read-only afterwards."""

    __slots__ = ("_locked",)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_locked", False):
            raise AttributeError(f"the config is locked: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict) -> "Section":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            # What cannot be copied is no option either: `check_types` will say so.
            with contextlib.suppress(TypeError):
                values[name] = copy.deepcopy(value, memo)
                if isinstance(value, ConfigDict):
                    values[name].unlock()
        return type(self)(**values)


def fields(section: Section) -> tuple[dataclasses.Field, ...]:
    """The declared fields of a section or config, in order."""
    return dataclasses.fields(typing.cast(Any, section))


def walk(section: Section, above: str = "") -> Iterator[tuple[str, Section, Any]]:
    """Path, owner and field of everything, a section before what it holds."""
    for field in fields(section):
        yield f"{above}{field.name}", section, field
        if isinstance(value := getattr(section, field.name), Section):
            yield from walk(value, f"{above}{field.name}.")


def lock(config: S) -> S:
    """Makes a whole config read-only and returns it."""
    for _, section, field in walk(config):
        object.__setattr__(section, "_locked", True)
        if isinstance(value := getattr(section, field.name), ConfigDict):
            value.lock()
    return config


def flatten(config: Section, *, only_numbers: bool = False) -> dict[str, Any]:
    """Dotted path -> JSON value, in declared order.

    Args:
        config: the config or one section, its types checked.
        only_numbers: leave out the fields that cannot change what is computed.
    """
    flat: dict[str, Any] = {}
    for path, section, field in walk(config):
        value = getattr(section, field.name)
        skip = only_numbers and not field.metadata["numbers"]
        if skip or isinstance(value, Section):
            continue
        if isinstance(value, ConfigDict):
            # By way of JSON, for what is saved and read to be equal: no tuples.
            options = json.loads(json.dumps(value.to_dict()))
            flat |= {f"{path}.{name}": leaf for name, leaf in options.items()}
        else:
            flat[path] = value.value if isinstance(value, enum.Enum) else value
    return flat


def typed(value: Any, kind: type, path: str) -> Any:
    """The value as `kind`, where that loses nothing."""
    if kind is ConfigDict and isinstance(value, _MAPPINGS):
        _check_json(value, path)
        return value if type(value) is kind else kind(dict(value))
    if type(value) is kind:
        return value
    if not isinstance(value, bool) and isinstance(value, _NUMBERS.get(kind, ())):
        with contextlib.suppress(OverflowError):
            return kind(value)
    if issubclass(kind, enum.Enum) and isinstance(value, str):
        for choice in kind:
            if value in (choice.value, choice.name):
                return choice
    raise ConfigError(path, f"must be {type_words(kind)}, is {shown(value)}")


# The abstract classes: numbers of numpy belong to them too.
_NUMBERS = {int: Integral, float: Real}
_MAPPINGS = (dict, ConfigDict)


def _check_json(value: Any, path: str) -> None:
    if isinstance(value, _MAPPINGS):
        for name, leaf in value.items():
            if not isinstance(name, str) or "." in name or not name:
                raise ConfigError(path, f"{shown(name)} cannot name an option")
            _check_json(leaf, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, leaf in enumerate(value):
            _check_json(leaf, f"{path}[{index}]")
    elif not isinstance(value, str | int | float | None):
        rule = "options hold JSON values; name functions as 'module:function'"
        raise ConfigError(path, f"{rule}; this is {shown(value)}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(path, f"must be finite, is {value}")


def type_words(kind: type) -> str:
    """What a value of a field of this type is, for people."""
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(choice.value) for choice in kind)
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind, f"a {kind.__name__}")


def shown(value: Any) -> str:
    """A value in at most 60 characters of one line, for errors."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
