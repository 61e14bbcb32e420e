"""A workdir with steps in it, made by hand, and the toolbox as a function."""

import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxft.cli import __main__ as cli


@pytest.fixture(scope="session")
def handmade() -> Any:
    """The module that makes steps; see there."""
    path = pathlib.Path(__file__).parents[1] / "checkpoint" / "handmade.py"
    spec = importlib.util.spec_from_file_location("handmade", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LEAVES = {
    "params/w": np.arange(40, dtype=np.float32).reshape(8, 5),
    "params/b": np.array([1, np.nan], ml_dtypes.bfloat16),
    "key": np.array([1, 2], np.uint32),
    "step": 7,
    "note": "some text",
}


@pytest.fixture
def leaves() -> dict[str, Any]:
    return dict(LEAVES)


@pytest.fixture
def root(tmp_path: pathlib.Path, handmade: Any) -> pathlib.Path:
    """Steps 10, 20 and 30 (linked to 10) of a workdir; more by `make`."""
    root = tmp_path / "run" / "checkpoints"
    record = {"metrics": {"eval/loss": 1.25}, "data": {"batch": 10}}
    first = handmade.make_step(root, 10, LEAVES, keys=("key",), record=record)
    handmade.make_step(root, 20, LEAVES, keys=("key",))
    changed = {**LEAVES, "step": 8}
    links = {"params/w": first}
    handmade.make_step(root, 30, changed, keys=("key",), links=links)
    return root


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `ckpt ...`: exit code, what it said, what it complained of."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["ckpt", *map(str, words)])
        said = capsys.readouterr()
        assert said.err.count("\n") <= 1, said.err
        assert "Traceback" not in said.err
        return int(code), said.out, said.err

    return run


@pytest.fixture
def ckpt_json(ckpt: Any) -> Callable[..., tuple[int, Any]]:
    """The same with `--json`: exit code, and what was said."""

    def run(*words: object) -> tuple[int, Any]:
        code, out, _ = ckpt(*words, "--json")

        def refuse(text: str) -> None:
            raise ValueError(f"{text} is no JSON")

        return code, json.loads(out, parse_constant=refuse)

    return run
