"""Sections, locking, flattening, ranges."""

import copy
import json
import pathlib
import threading

import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxft import config as configs
from jaxft import settings
from jaxft.config import Config, ConfigError, Corpus, ModelConfig, Schedule, Section


def test_lock_reaches_every_section_and_option() -> None:
    config = Config()
    config.model.options.hidden = 3
    settings.lock(config)
    for section in (config, config.model, config.train):
        with pytest.raises(AttributeError, match="locked"):
            section.seed = 1
    with pytest.raises(AttributeError):
        config.model.options.other = 1


def test_a_copy_of_a_locked_config_is_free() -> None:
    config = Config()
    config.model.options.sizes = [1, 2]
    other = copy.deepcopy(settings.lock(config))
    other.model.width = 7
    other.model.options.sizes.append(3)
    other.model.options.more = 1
    assert (config.model.width, other.model.width) == (128, 7)
    assert config.model.options.to_dict() == {"sizes": [1, 2]}


def test_every_field_has_a_scalar_type_and_a_meaning() -> None:
    for section in settings.fields(Config()):
        assert isinstance(getattr(Config(), section.name), Section)
        for field in settings.fields(getattr(Config(), section.name)):
            assert field.metadata["meaning"], field.name
            assert isinstance(field.type, type), f"{section.name}.{field.name}"


def test_flatten_is_json_and_tells_numbers_apart() -> None:
    config = Config()
    config.data.options.depth = 2
    everything = settings.flatten(config)
    numbers = settings.flatten(config, only_numbers=True)
    assert everything["optimizer.schedule"] == "cosine"
    assert everything["data.options.depth"] == numbers["data.options.depth"] == 2
    assert "checkpoint.save" in everything
    assert not {p for p in numbers if p.startswith(("checkpoint.", "supervisor."))}
    assert not {"train.num_steps", "remat.plan", "data.prefetch"} & numbers.keys()


def test_resolve_fills_in_what_follows_and_is_idempotent() -> None:
    config = configs.resolve(Config())
    assert config.optimizer.decay_steps == config.train.num_steps
    assert config.model.num_kv_heads == config.model.num_heads
    assert config.model.mlp_width == 344
    before = settings.flatten(config)
    assert settings.flatten(configs.resolve(config)) == before


MESH_AXES = ("data", "fsdp", "tensor")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.width", 0),
        ("model.rope_theta", 0.0),
        ("data.global_batch", -1),
        ("data.seq_len", 0),
        ("data.seq_len", 2**31),
        ("data.seed", -1),
        ("data.holdout_fraction", 1.0),
        ("train.num_steps", 0),
        ("train.num_microbatches", 5),
        ("train.seed", 2**32),
        ("train.seed", 10**400),
        ("train.clip_norm", -0.5),
        ("train.ema_decay", 1.0),
        ("train.ema_decay", -0.1),
        ("optimizer.learning_rate", 0.0),
        ("optimizer.learning_rate", -1e-3),
        ("optimizer.b1", 1.0),
        ("optimizer.b2", -0.1),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.end_fraction", 1.01),
        ("preemption.grace_secs", 0.0),
        ("supervisor.backoff_max_secs", -1.0),
        ("sharding.min_shard_elements", -1),
    ],
)
def test_ranges_name_the_path(path: str, value: float) -> None:
    refused(path, value)


def leaves(*kinds: type) -> list[str]:
    return [
        f"{section.name}.{field.name}"
        for section in settings.fields(Config())
        for field in settings.fields(getattr(Config(), section.name))
        if field.type in kinds
    ]


@pytest.mark.parametrize("path", leaves(float))
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400])
def test_every_number_is_finite(path: str, value: float) -> None:
    refused(path, value)


def test_every_number_has_a_range_but_sizes_of_the_mesh() -> None:
    numbers = set(leaves(int, float))
    ranged = {path for path, _, f in settings.walk(Config()) if f.metadata["must"]}
    assert ranged <= numbers
    # Positive or -1: `make_mesh` says it, beside the number of devices.
    sizes = {f"mesh.{dcn}{axis}" for dcn in ("", "dcn_") for axis in MESH_AXES}
    assert numbers - ranged == sizes


def test_the_edges_of_ranges_are_inside() -> None:
    config = Config()
    config.optimizer.b1 = config.optimizer.end_fraction = 0.0
    config.train.seed = config.data.seed = 2**32 - 1
    config.data.seq_len = 2**31 - 1
    config.log.event_secs = config.supervisor.backoff_secs = 0.0
    configs.resolve(config)
    config.optimizer.end_fraction = 1.0
    configs.resolve(config)


WRONG = {
    int: ["wide", 8.0, 30.5, True, None, [8], 1j],
    float: ["1e-3", True, None, [0.1], 1j],
    bool: ["no", 0, 1, None, 1.0],
    str: [3, None, pathlib.Path("/x"), b"x", ["a"], Corpus.TEXT],
    ConfigDict: [None, 3, "a", [("a", 1)], ModelConfig()],
}


@pytest.mark.parametrize("path", ["", *leaves(*WRONG)])
def test_every_field_refuses_every_other_type(path: str) -> None:
    if not path:
        for thing in (5, None, {"model": {}}, Config, ModelConfig()):
            with pytest.raises(ConfigError, match=r"not a jaxft.Config"):
                configs.resolve(thing)
        return
    section, name = path.split(".")
    kinds = {f.name: f.type for f in settings.fields(getattr(Config(), section))}
    for value in WRONG[kinds[name]]:
        refused(path, value)


@pytest.mark.parametrize("name", [f.name for f in settings.fields(Config())])
def test_a_section_is_of_its_own_class(name: str) -> None:
    other = Config().train if name == "model" else Config().model
    for value in (None, {}, 3, other, type(getattr(Config(), name))):
        config = Config()
        setattr(config, name, value)
        with pytest.raises(ConfigError) as error:
            configs.resolve(config)
        assert error.value.path == name
        assert f"a {type(getattr(Config(), name)).__name__}" in str(error.value)


def test_what_loses_nothing_is_converted() -> None:
    config = Config()
    config.data.corpus = "text"
    config.optimizer.schedule = "CONSTANT"
    config.optimizer.learning_rate = 1
    config.model.width = np.int64(64)
    config.optimizer.b1 = np.float32(0.5)
    config.data.options = {"a": 1, "b": {"c": (1, 2)}}
    configs.resolve(config)
    assert config.data.corpus is Corpus.TEXT
    assert config.optimizer.schedule is Schedule.CONSTANT
    values = (config.optimizer.learning_rate, config.model.width, config.optimizer.b1)
    assert values == (1.0, 64, 0.5)
    assert [type(value) for value in values] == [float, int, float]
    assert config.data.options.b.c == (1, 2)
    flat = settings.flatten(config)
    assert flat["data.options.b"] == {"c": [1, 2]}
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat
    config.data.corpus = "txt"
    with pytest.raises(ConfigError, match=r"data.corpus: must be one of stdlib, text"):
        configs.resolve(config)


@pytest.mark.parametrize("where", ["f", "deep.f", "list"])
@pytest.mark.parametrize(
    "value",
    [print, object(), threading.Lock(), (i for i in "a"), {1}, b"x", 1j, NAN, Corpus],
    ids=lambda value: type(value).__name__,
)
def test_options_hold_json_values(where: str, value: object) -> None:
    config = Config()
    if where == "f":
        config.model.options.f = value
    elif where == "deep.f":
        config.model.options = {"deep": {"f": value}}
    else:
        config.model.options.list = [1, (value,)]
    expected = {"list": "list[1][0]"}.get(where, where)
    # A notebook's `run` resolves a copy.
    for each in (config, copy.deepcopy(config)):
        with pytest.raises(ConfigError) as error:
            configs.resolve(each)
        assert error.value.path == f"model.options.{expected}"
        assert "\n" not in str(error.value)


def test_names_of_options_are_one_word_of_a_path() -> None:
    for name in (1, "", "a.b"):
        config = Config()
        config.model.options = {name: 1}
        with pytest.raises(ConfigError, match="cannot name an option"):
            configs.resolve(config)


def refused(path: str, value: object) -> None:
    config = Config()
    section, name = path.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError) as error:
        configs.resolve(config)
    assert error.value.path == path, value
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
