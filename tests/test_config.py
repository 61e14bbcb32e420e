"""Sections, locking, flattening, ranges."""

import copy
import dataclasses

import pytest

from jaxft import config as configs
from jaxft.config import Config, ConfigError, Section


def test_lock_reaches_every_section_and_option() -> None:
    config = Config()
    config.model.options.hidden = 3
    configs.lock(config)
    for section in (config, config.model, config.train):
        with pytest.raises(AttributeError, match="locked"):
            section.seed = 1
    with pytest.raises(AttributeError):
        config.model.options.other = 1


def test_a_copy_of_a_locked_config_is_free() -> None:
    config = configs.lock(Config())
    other = copy.deepcopy(config)
    other.model.width = 7
    assert (config.model.width, other.model.width) == (128, 7)


def test_every_field_has_a_scalar_type_and_a_meaning() -> None:
    for section in configs.fields(Config()):
        assert isinstance(getattr(Config(), section.name), Section)
        for field in configs.fields(getattr(Config(), section.name)):
            assert field.metadata["meaning"], field.name
            assert isinstance(field.type, type), f"{section.name}.{field.name}"


def test_flatten_is_json_and_tells_numbers_apart() -> None:
    config = Config()
    config.data.options.depth = 2
    everything = configs.flatten(config)
    numbers = configs.flatten(config, only_numbers=True)
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
    before = configs.flatten(config)
    assert configs.flatten(configs.resolve(config)) == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.width", 0),
        ("data.global_batch", -1),
        ("train.num_steps", 0),
        ("data.holdout_fraction", 1.0),
        ("train.clip_norm", -0.5),
        ("preemption.grace_secs", 0.0),
        ("train.num_microbatches", 5),
        ("preemption.grace_secs", float("nan")),
    ],
)
def test_ranges_name_the_path(path: str, value: float) -> None:
    config = Config()
    section, name = path.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError) as error:
        configs.resolve(config)
    assert error.value.path == path
    assert "\n" not in str(error.value)


def test_checked_paths_exist() -> None:
    flat = configs.flatten(Config())
    assert set(configs._POSITIVE + configs._NOT_NEGATIVE) <= flat.keys()
    assert dataclasses.is_dataclass(Config)
