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


def test_several_processes_link_nothing_whatever_the_root_has():
    for has_links in (True, False):
        layout, reason = options.choose_layout(
            config.ArrayLayout.AUTO,
            num_leaves=100,
            num_bytes=10**9,
            has_links=has_links,
            num_processes=4,
        )
        assert (layout.value, reason) == ("ocdbt", "4 processes link no leaves")


def test_auto_is_half_of_the_memory_that_is_there():
    half = options.make_options(**(GOOD | {"memory_budget": "auto"})).memory_bytes
    assert 1 << 30 <= half < 1 << 50


HEALTH_PATHS = ("params/embed", "params/layers/0/up", "opt_state/mu", "step")


@pytest.mark.parametrize(
    "text",
    [
        *("", "params/**", "**, !step", "params/*, opt_state/mu", "!nothing/**"),
        # The usual ones are not in every state.
        *(options.HEALTH, f"{options.HEALTH}, step", "opt_state/average/**"),
    ],
)
def test_leaves_to_watch(text):
    options.check_health(text, HEALTH_PATHS)


@pytest.mark.parametrize("glob", ["param/**", "params/layers/*/down", "embed"])
def test_a_glob_that_fits_no_leaf_is_refused(glob):
    for text in (glob, f"params/**, {glob} , step"):
        with pytest.raises(config.ConfigError, match="health") as error:
            options.check_health(text, HEALTH_PATHS)
        assert repr(glob) in str(error.value)
        assert "opt_state, params, step" in str(error.value)


@pytest.mark.parametrize("root", ["s3:/x/y", "gs://x", "file:///x", "memory:/"])
def test_a_root_is_no_address(root):
    with pytest.raises(config.ConfigError, match="not a local folder"):
        options.checked_root(root, timeout_secs=1.0)
