"""Globs over leaf paths."""

import pytest

from jaxft.patterns import Patterns


@pytest.mark.parametrize(
    ("text", "path", "named"),
    [
        ("", "params/w", False),
        ("**", "params/w", True),
        ("params/**", "params/layers/w", True),
        ("params/**", "params", True),
        ("params/**", "params2/w", False),
        ("params/*", "params/w", True),
        ("params/*", "params/layers/w", False),
        ("**/mu/**", "opt_state/0/mu/w", True),
        ("**/mu/**", "mu/w", True),
        ("**/w", "w", True),
        ("**/w", "a/b/w", True),
        ("**/w", "a/bw", False),
        ("params/layer?/w", "params/layer1/w", True),
        ("params/layer?/w", "params/layer12/w", False),
        ("params/a.b", "params/aXb", False),
        ("params/**, !params/embed", "params/embed", False),
        ("!params/embed, params/**", "params/embed", True),
        ("params/**, !params/embed, **/embed", "params/embed", True),
        (" params/a , params/b ", "params/b", True),
    ],
)
def test_which_paths_a_glob_names(text, path, named):
    assert Patterns(text).match(path) is named


def test_select_keeps_the_order():
    paths = ["b/w", "a/w", "a/b"]
    assert Patterns("*/w").select(paths) == ["b/w", "a/w"]
