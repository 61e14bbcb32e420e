"""The benchmark that a test module is named after."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> types.ModuleType:
    name = request.path.stem.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(
        f"benchmarks_{name}", FOLDER / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # As for a script: what stands beside it.
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
