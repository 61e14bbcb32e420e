"""`--role=compile`: compiles the real run, leaves its plan, runs nothing."""

import json
import pathlib

import pytest

from jaxft import main
from jaxft.command import parse
from jaxft.config import ConfigError

CONFIG = """
from jaxft.config import Config

def get_config():
    config = Config()
    config.model.width, config.model.num_layers, config.model.num_heads = 32, 4, 2
    config.model.vocab_size = 64
    config.data.corpus = "synthetic"
    config.data.seq_len, config.data.global_batch = 64, 8
    config.mesh.num_devices = 1
    config.optimizer.warmup_steps = 2
    config.remat.plan, config.remat.memory_budget = "auto", "8MiB"
    return config
"""


@pytest.fixture
def words(tmp_path: pathlib.Path) -> list[str]:
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    return ["jaxft.main", f"--config={config}", f"--workdir={tmp_path / 'run'}"]


def test_leaves_the_plan_and_nothing_else(words, tmp_path, capsys):
    assert main.main([*words, "--role=compile"]) == 0
    printed = capsys.readouterr().out
    saved = json.loads((tmp_path / "run" / "remat.json").read_text())
    assert f"remat.plan = {saved['plan']!r}" in printed
    assert saved["report"]["peak_bytes"] <= 8 * 2**20
    assert not (tmp_path / "run" / "checkpoints").exists()
    # The second time it is read.
    assert main.main([*words, "--role=compile"]) == 0
    assert capsys.readouterr().out == printed


def test_a_plan_that_is_named_is_compiled_as_it_is(words, tmp_path, capsys):
    assert main.main([*words, "--role=compile", "--config.remat.plan=full"]) == 0
    assert "remat.plan = 'full'" in capsys.readouterr().out
    assert not (tmp_path / "run" / "remat.json").exists()


def test_nothing_fits(words, tmp_path, capsys):
    budget = "--config.remat.memory_budget=1MiB"
    assert main.main([*words, "--role=compile", budget]) == 78
    assert "no plan fits 1.0 MiB a device" in capsys.readouterr().err
    assert not (tmp_path / "run" / "remat.json").exists()


def test_a_target_goes_with_compiling_only(words):
    assert parse([*words, "--role=compile", "--target=tpu:v5e:4x4"]).target
    with pytest.raises(ConfigError, match="--target goes with --role=compile only"):
        parse([*words, "--target=here"])
