"""Plans are read exactly or refused; policies reach JAX."""

import jax
import jax.numpy as jnp
import pytest

from jaxft.config import ConfigError
from jaxft.remat.policies import Kind, Policy, parse_plan, wrap

NONE, FULL, DOTS = Policy(Kind.NONE), Policy(Kind.FULL), Policy(Kind.DOTS)
NAMES = Policy(Kind.NAMES, ("attn", "up"))
MARKED = ("qkv", "attn", "gate", "up")


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("none", [NONE] * 4),
        ("full", [FULL] * 4),
        ("dots_no_batch", [Policy(Kind.DOTS_NO_BATCH)] * 4),
        ("names(attn,up)", [NAMES] * 4),
        (" names( attn , up ) ", [NAMES] * 4),
        ("offload(up)", [Policy(Kind.OFFLOAD, ("up",))] * 4),
        ("0-1:full,2-3:dots", [FULL, FULL, DOTS, DOTS]),
        ("2-3:dots, 0-1:full", [FULL, FULL, DOTS, DOTS]),
        ("0:full,1:names(attn,up),2:dots,3:none", [FULL, NAMES, DOTS, NONE]),
        ("0-3:names(attn,up)", [NAMES] * 4),
    ],
)
def test_reads_plans(text, plan):
    assert parse_plan(text, 4, names=MARKED) == tuple(plan)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown policy ''; policies: none, full, dots"),
        ("ful", "unknown policy 'ful'; policies: none, full, dots"),
        ("full,dots", "'full' is not 'layers:policy'"),
        ("0-3:full,dots", "'dots' is not 'layers:policy'"),
        ("dots(attn)", "'dots' takes no names"),
        ("full()", "'full' takes no names"),
        ("names", "'names' must name marked values; the model marks: attn, gate"),
        ("names()", "must name marked values"),
        ("names(attn,)", "must name marked values"),
        ("names(atn)", "unknown name 'atn' in 'names(atn)'; the model marks: attn"),
        ("offload(attn,x)", "unknown name 'x'"),
        ("names(attn", "unknown policy"),
        ("0-1:full", "no policy for layer 2, 3 of 0-3"),
        ("0-2:full,2-3:dots", "layer 2 is given twice"),
        ("0-4:full", "no layer 4: layers are 0-3"),
        ("3-0:full", "layers 3-0 run backwards"),
        ("all:full", "'all' is no layer: write 3 or 0-3"),
        ("-1:full", "'-1' is no layer"),
        ("0-3:", "unknown policy ''"),
        ("0-3:full,", "'' is not 'layers:policy'"),
    ],
)
def test_refuses_in_one_line(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_plan(text, 4, names=MARKED)
    assert caught.value.path == "remat.plan"
    assert says in caught.value.problem
    assert "\n" not in str(caught.value)


def test_any_name_is_fine_where_the_model_says_nothing():
    assert parse_plan("names(mine)", 1) == (Policy(Kind.NAMES, ("mine",)),)


@pytest.mark.parametrize("text", ["none", "full", "dots", "names(attn,up)"])
def test_a_policy_prints_as_it_is_written(text):
    assert str(parse_plan(text, 1)[0]) == text


def test_none_is_the_function_itself():
    fn = lambda x: x
    assert wrap(fn, NONE, in_scan=True) is fn


def _num_operations(policy: Policy, *, in_scan: bool) -> int:
    """Products and tanhs in the compiled gradient of a chain of four layers."""

    def loss(weights, x):
        for weight in weights:
            fn = wrap(lambda x, w: jnp.tanh(x @ w), policy, in_scan=in_scan)
            x = fn(x, weight)
        return jnp.sum(x * x)

    weights = [jnp.ones((64, 64))] * 4
    text = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((8, 64))).compile().as_text()
    return text.count(" dot(") + text.count(" tanh(")


@pytest.mark.device
def test_recompute_survives_the_compiler_outside_scan():
    plain = _num_operations(NONE, in_scan=False)
    assert plain > 0
    # Without the barriers the compiler merges the second forward pass away.
    assert _num_operations(FULL, in_scan=True) == plain
    assert _num_operations(FULL, in_scan=False) > plain
