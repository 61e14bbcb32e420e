"""What every test stands on: 8 fake CPU devices, strict ranks, `--full`."""

import os

# Before jax is imported: a test run never takes an accelerator unless asked to.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Orbax asks for an event loop per thread; grain and absl write to stderr.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="everything at full size")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given: tests with a size choose the large one."""
    return request.config.getoption("--full")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --full")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
