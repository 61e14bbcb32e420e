"""Rename rules: a place in the tree, wildcards, and what cannot be meant."""

import pytest

from jaxft.checkpoint import renames

PATHS = ["params/a/kernel", "params/a/bias", "params/ab/kernel", "step"]


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({}, PATHS),
        (
            {"params/a": "x/y"},
            ["x/y/kernel", "x/y/bias", "params/ab/kernel", "step"],
        ),
        ({"params": ""}, ["a/kernel", "a/bias", "ab/kernel", "step"]),
        ({"": "old"}, [f"old/{path}" for path in PATHS]),
        (
            {"params/*/kernel": "w/*"},
            ["w/a", "params/a/bias", "w/ab", "step"],
        ),
        (
            {"**/kernel": "**/kernel/value", "step": "n/step"},
            [
                "params/a/kernel/value",
                "params/a/bias",
                "params/ab/kernel/value",
                "n/step",
            ],
        ),
        (
            {"params/a/bias": "first", "params": "second"},
            ["second/a/kernel", "first", "second/ab/kernel", "step"],
        ),
    ],
    ids=["none", "place", "up", "down", "star", "stars", "first-fits"],
)
def test_names(rules, names):
    assert list(renames.rename_paths(PATHS, rules).values()) == names


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"weights": "x"}, "no stored leaf fits the rename rule 'weights'"),
        ({"params/*": "x"}, "the same wildcards"),
        ({"params/a": "x", "params/ab": "x"}, "would both be called x/kernel"),
        ({"step": ""}, "step would have no name left"),
    ],
    ids=["typo", "wildcards", "clash", "nothing"],
)
def test_rules_that_cannot_be_meant(rules, reason):
    with pytest.raises(renames.RenameError, match=reason):
        renames.rename_paths(PATHS, rules)
