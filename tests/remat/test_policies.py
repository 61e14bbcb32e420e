"""Plans are read exactly or refused; policies reach JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

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


def _num_operations(
    policy: Policy,
    *,
    form: str,
    in_scan: bool,
    kinds: tuple[str, ...] = ("dot", "tanh"),
) -> int:
    """Of four layers, in the compiled gradient."""

    def layer(x, weight):
        return jnp.tanh(checkpoint_name(x @ weight, "hidden")), None

    def loss(weights, x):
        fn = wrap(layer, policy, in_scan=in_scan)
        if form == "scan":
            x, _ = jax.lax.scan(fn, x, weights)
        else:
            for weight in weights:
                x, _ = fn(x, weight)
        return jnp.sum(x * x)

    weights = jnp.ones((4, 64, 64))
    text = jax.jit(jax.grad(loss)).lower(weights, jnp.ones((8, 64))).compile().as_text()
    return sum(text.count(f" {kind}(") for kind in kinds)


@pytest.mark.device
@pytest.mark.parametrize("text", ["full", "dots", "dots_no_batch", "names(other)"])
@pytest.mark.parametrize("form", ["loop", "scan"])
def test_recompute_survives_the_compiler(form, text):
    policy = parse_plan(text, 1)[0]
    plain = _num_operations(NONE, form=form, in_scan=form == "scan")
    assert plain > 0
    assert _num_operations(policy, form=form, in_scan=form == "scan") > plain


@pytest.mark.device
def test_without_barriers_a_loop_merges_the_second_forward_pass_away():
    plain = _num_operations(NONE, form="loop", in_scan=False)
    assert _num_operations(FULL, form="loop", in_scan=True) == plain


@pytest.mark.device
def test_a_product_that_is_kept_by_name_is_not_computed_again():
    # In a loop XLA for CPU drops the barriers, and merges the products all the same.
    options = {"form": "scan", "in_scan": True, "kinds": ("dot",)}
    plain = _num_operations(NONE, **options)
    assert _num_operations(parse_plan("names(hidden)", 1)[0], **options) == plain
    assert _num_operations(FULL, **options) > plain
