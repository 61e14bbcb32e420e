"""The choice of a plan: exact, periodic before contiguous, and a model that learns."""

import itertools
import random
import time

import pytest

from jaxft.remat import planner
from jaxft.remat.planner import Layers, MemoryModel, Option, Planner

NONE = Option(policy="none", kept_bytes=70)
DOTS = Option(policy="dots", kept_bytes=30, recomputed_flops=5)
FULL = Option(policy="full", kept_bytes=8, recomputed_flops=120)
HOST = Option(policy="offload(a)", kept_bytes=8, host_bytes=9, recomputed_flops=60)
WASTE = Option(policy="waste", kept_bytes=71, recomputed_flops=121)


def stack(*options, num_layers=4, scanned=True):
    return Layers(options=(options,) * num_layers, scanned=scanned)


def model(guess=0, **constants):
    return MemoryModel(constants=constants, guess=guess)


def choose(layers, budget, known=None):
    return Planner().choose(layers, known or model(), budget)


def test_keeps_all_where_there_is_room():
    assert choose(stack(NONE, DOTS, FULL), 280) == ("none",) * 4


def test_nothing_fits():
    assert choose(stack(NONE, DOTS, FULL), 31) is None


def test_a_pattern_that_repeats_wins_over_as_good_runs():
    layers = stack(NONE, FULL)
    plan = choose(layers, 2 * 70 + 2 * 8)
    assert plan == ("full", "none") * 2
    assert planner.num_scans(plan) == 1


def test_runs_where_no_pattern_repeats():
    plan = choose(stack(NONE, FULL), 3 * 70 + 8)
    assert sorted(plan) == ["full", "none", "none", "none"]
    assert planner.num_scans(plan) == 2


def test_host_memory_only_where_it_saves_work():
    assert choose(stack(FULL, HOST), 40) == ("offload(a)",) * 4
    equal = Option(policy="kept", kept_bytes=8, recomputed_flops=60)
    assert choose(stack(FULL, HOST, equal), 40) == ("kept",) * 4


def test_what_is_beaten_in_every_respect_is_never_chosen():
    for budget in range(32, 300, 7):
        assert "waste" not in choose(stack(NONE, DOTS, FULL, WASTE), budget)


def _best(layers, budget, allowed):
    """By looking at every plan there is."""
    names = [option.policy for option in layers.options[0]]
    plans = itertools.product(names, repeat=len(layers.options))
    fits = [
        layers.recomputed_flops(plan)
        for plan in plans
        if allowed(plan) and layers.kept_bytes(plan) <= budget
    ]
    return min(fits, default=None)


def _cost(layers, plan):
    return None if plan is None else layers.recomputed_flops(plan)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_groups", [1, 2, 3])
def test_exact_on_stacks_as_exhaustive_search_is(seed, max_groups):
    rng = random.Random(seed)
    options = [
        Option(
            policy=f"p{i}",
            kept_bytes=rng.randrange(1, 60),
            recomputed_flops=rng.randrange(60),
        )
        for i in range(4)
    ]
    layers = stack(*options, num_layers=rng.choice([2, 3, 5, 6]))
    for budget in range(0, 60 * len(layers.options), 37):
        plan = Planner(max_groups=max_groups).choose(layers, model(), budget)
        best = _best(layers, budget, lambda plan: len(set(plan)) <= max_groups)
        assert _cost(layers, plan) == best
        assert plan is None or planner.num_scans(plan) <= max_groups


@pytest.mark.parametrize("seed", range(8))
def test_exact_on_unlike_layers_in_a_loop(seed):
    rng = random.Random(seed)
    rows = tuple(
        tuple(
            Option(
                policy=f"p{i}",
                kept_bytes=rng.randrange(1, 60),
                recomputed_flops=rng.randrange(60),
            )
            for i in range(4)
        )
        for _ in range(5)
    )
    layers = Layers(options=rows, scanned=False)
    for budget in range(0, 300, 31):
        plan = choose(layers, budget)
        assert _cost(layers, plan) == _best(layers, budget, lambda plan: True)


def test_a_compile_corrects_the_constant_of_its_form():
    layers = stack(NONE, DOTS, FULL)
    known = model(guess=10)
    assert known.peak_bytes(layers, ("full",) * 4) == 42
    known = known.corrected(layers, ("full",) * 4, 132)
    assert known.peak_bytes(layers, ("full",) * 4) == 132
    assert known.peak_bytes(layers, ("dots",) * 4) == 120 + 100
    # Of a form that was not compiled the worst that was seen is believed.
    assert known.guess == 100
    mixed = ("full", "full", "full", "dots")
    known = known.corrected(layers, mixed, 200)
    assert known.peak_bytes(layers, ("full", "dots", "dots", "dots")) == 244


def test_only_known_forms_on_demand():
    layers = stack(NONE, DOTS, FULL)
    known = model(guess=0).corrected(layers, ("full", "full", "full", "dots"), 54)
    plan = Planner().choose(layers, known, 130, only_known=True)
    assert set(plan) == {"full", "dots"}


def test_forms():
    layers = stack(NONE, DOTS, FULL)
    assert planner.form(layers, ("full",) * 4) == "scan: full"
    two = planner.form(layers, ("full", "full", "full", "none"))
    assert two == planner.form(layers, ("full", "none", "none", "none"))
    assert two == "scans: full | none"
    assert planner.form(layers, ("full", "none") * 2) == "scan over full,none"
    loop = stack(NONE, FULL, scanned=False)
    assert planner.form(loop, ("full", "full", "none", "full")) == "loop"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (("full",) * 3, "full"),
        (("full", "full", "dots"), "0-1:full,2:dots"),
        (("full", "names(a,b)") * 2, "0:full,1:names(a,b),2:full,3:names(a,b)"),
    ],
)
def test_describes_plans_as_the_setting_takes_them(plan, text):
    assert planner.describe(plan) == text


def test_a_hundred_layers_take_no_time():
    options = [
        Option(policy=f"p{i}", kept_bytes=5 * i + 1, recomputed_flops=(30 - i) ** 2)
        for i in range(30)
    ]
    started = time.monotonic()
    assert choose(stack(*options, num_layers=100), 7000) is not None
    assert time.monotonic() - started < 2
