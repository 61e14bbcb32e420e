"""Settings of the store, as text."""

import pytest

from jaxft import config
from jaxft.checkpoint import options

GOOD = {
    "array_layout": "auto",
    "codec": "raw",
    "full_every": 10,
    "verify": "full",
    "health": "**",
    "memory_budget": "4GiB",
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 << 29),
        ("2g", 2_000_000_000),
        ("1048576", 1 << 20),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert options.parse_bytes(text, path="x") == size


@pytest.mark.parametrize("text", ["", "4 GB more", "-1GiB", "GiB", "1000", "4PiB"])
def test_what_is_no_size_or_too_small(text):
    with pytest.raises(config.ConfigError, match=r"^config\.x: "):
        options.parse_bytes(text, path="x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array_layout", "zip"),
        ("codec", "gzip"),
        ("full_every", -1),
        ("full_every", True),
        ("verify", "strict"),
        ("memory_budget", "much"),
    ],
)
def test_a_bad_setting_is_named(name, value):
    with pytest.raises(config.ConfigError) as error:
        options.make_options(**(GOOD | {name: value}))
    assert error.value.path == f"checkpoint.{name.removeprefix('array_')}"
    assert "\n" not in str(error.value)


def _chosen(wanted="auto", *, num_leaves, num_bytes, has_links=True):
    layout, reason = options.choose_layout(
        config.ArrayLayout(wanted),
        num_leaves=num_leaves,
        num_bytes=num_bytes,
        has_links=has_links,
    )
    assert reason
    return layout.value


def test_auto_chooses_by_links_and_leaves():
    assert _chosen(num_leaves=100, num_bytes=10**9) == "files"
    assert _chosen(num_leaves=5000, num_bytes=5000 << 13) == "ocdbt"
    assert _chosen(num_leaves=5, num_bytes=40) == "files"
    assert _chosen(num_leaves=100, num_bytes=10**9, has_links=False) == "ocdbt"
    assert _chosen("files", num_leaves=5000, num_bytes=1, has_links=False) == "files"


def test_auto_is_half_of_the_memory_that_is_there():
    half = options.make_options(**(GOOD | {"memory_budget": "auto"})).memory_bytes
    assert 1 << 30 <= half < 1 << 50
