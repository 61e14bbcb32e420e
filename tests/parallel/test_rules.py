"""The two rule grammars: what they say, and what they refuse."""

import pytest

from jaxft.config import ConfigError, ShardingConfig
from jaxft.parallel.rules import parse_logical_rules, parse_path_rules


def test_the_default_rules():
    assert parse_logical_rules(ShardingConfig().logical_rules) == {
        "batch": (("data", "fsdp"),),
        "vocab": (("tensor",),),
        "embed": (("fsdp",),),
        "heads": (("tensor",),),
        "kv_heads": (("tensor",),),
        "mlp": (("tensor",),),
    }


def test_alternatives_keep_their_order_and_minus_is_no_axis():
    rules = parse_logical_rules(" embed = fsdp , embed=tensor,embed=-, stats = - ,")
    assert rules == {"embed": (("fsdp",), ("tensor",), ()), "stats": ((),)}


def test_nothing_is_no_rule():
    assert parse_logical_rules("") == {}
    assert parse_path_rules(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("embed", "'embed' is not of the form name=axis"),
        ("=fsdp", "is not of the form"),
        ("a b=fsdp", "is not of the form"),
        ("embed=", "the mesh axis ''"),
        ("embed=model", "the mesh axis 'model': there are data, fsdp, tensor"),
        ("embed=fsdp=data", "the mesh axis 'fsdp=data'"),
        ("embed=fsdp, embed=fsdp", "is there twice"),
        ("batch=data+data", "uses a mesh axis twice"),
    ],
)
def test_bad_logical_rules(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_logical_rules(text)
    assert caught.value.path == "sharding.logical_rules"
    assert words in caught.value.problem


def test_path_rules():
    kernel, scale, odd = parse_path_rules(
        ".*/kernel = fsdp, tensor; .*/scale = -; (?P<x>a|b)= -, data+fsdp"
    )
    assert kernel.pattern.pattern == ".*/kernel"
    assert kernel.dims == (("fsdp",), ("tensor",))
    assert scale.dims == ()
    assert odd.pattern.fullmatch("b")
    assert odd.dims == ((), ("data", "fsdp"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".*/kernel", "not of the form"),
        ("= fsdp", "not of the form"),
        ("(a = fsdp", "no regular expression"),
        ("a = fsdp; a = tensor", "there twice"),
        ("a = model", "the mesh axis 'model'"),
        ("a = fsdp,", "the mesh axis ''"),
        ("a = fsdp, fsdp", "for two dims"),
        ("a = fsdp+fsdp", "twice in one dim"),
    ],
)
def test_bad_path_rules(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_path_rules(text)
    assert caught.value.path == "sharding.path_rules"
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)


def test_other_meshes_bring_their_own_axis_names():
    assert parse_logical_rules("mlp=model", mesh_axes=("model",)) == {
        "mlp": (("model",),)
    }
