"""The text of a plan of faults, and its mistakes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.config import ConfigError
from jaxft.faults.plan import OF_BATCHES, Injected, parse_plan

ALL = (
    "kill@120; hang@200; hang_gil@210; nan_grad@250-252; bad_batch@300; spike@350; "
    "bitflip@400 leaf=params/embed; sigterm@450 grace=5; enospc@500; "
    "slow_disk@550-600:10MBps; corrupt_newest@650; kill_in_save@700 process=1; "
    "oom@800; raise@820 times=2"
)


def parse(text, **options):
    return parse_plan(text, **({"num_steps": 1000} | options))


def test_every_kind():
    plan = parse(ALL)
    assert {fault.kind for fault in plan} == set(Injected)
    assert [fault.number for fault in plan] == list(range(1, 15))
    by_kind = {fault.kind: fault for fault in plan}
    assert (by_kind["nan_grad"].first, by_kind["nan_grad"].last) == (250, 252)
    assert by_kind["slow_disk"].value == 10e6
    assert by_kind["sigterm"].grace_secs == 5
    assert by_kind["kill_in_save"].process == 1
    assert by_kind["raise"].times == 2
    assert by_kind["bitflip"].leaf == "params/embed"
    assert parse("") == ()


def test_its_text_is_a_plan_again():
    assert parse("; ".join(map(str, parse(ALL)))) == parse(ALL)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kill", "write kind@step"),
        ("kill@", "write kind@step"),
        ("crash@5", "there is no 'crash'; there are kill, hang"),
        ("kill@5-6", "kill has no range"),
        ("nan_grad@6-5", "the range is empty"),
        ("kill@99999999999", "no run comes that far"),
        ("kill@5:3", "'3' means nothing here"),
        ("spike@5:-1", "':-1' is not understood"),
        ("spike@5:0", "'0' means nothing here"),
        ("slow_disk@5-6", "slow_disk needs a rate"),
        ("slow_disk@5-6:0MBps", "slow_disk needs a rate"),
        ("kill@5 grace=3", "'grace=3' is not understood; kill takes process=, times="),
        ("nan_grad@5 times=3", "nan_grad takes no options"),
        ("kill@5 times=0", "times=0 is out of range"),
        ("kill@5 times=two", "times=two is no number"),
        ("sigterm@5 grace=nan", "grace=nan is out of range"),
        ("random(n=x)", "n=x is no number"),
        ("random(kinds=kill+crash)", "there is no 'crash'"),
        ("random(count=3)", "'count=3' is not one of n, seed"),
        ("random(n=5, first=3, last=4)", "5 faults do not fit between 3 and 4"),
        ("random(n=0)", "0 faults do not fit"),
    ],
)
def test_a_mistake_is_one_line(text, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        parse(text)
    assert error.value.path == "faults.inject"
    assert "\n" not in str(error.value)


@given(
    seed=st.integers(0, 100),
    n=st.integers(1, 30),
    kinds=st.lists(st.sampled_from(sorted(Injected)), min_size=1, unique=True),
    first=st.integers(0, 500),
    room=st.integers(0, 500),
)
def test_random_plans(seed, n, kinds, first, room):
    text = f"random(n={n}, seed={seed}, kinds={'+'.join(kinds)}, first={first}, "
    text += f"last={first + n + room})"
    plan = parse(text, num_bad=3, num_high=5)
    assert plan == parse(text, num_bad=3, num_high=5)
    assert len(plan) == n
    # Each kind as often as the others.
    counts = [sum(fault.kind == kind for fault in plan) for kind in kinds]
    assert max(counts) - min(counts) <= 1
    places = [fault.first for fault in plan]
    assert places == sorted(set(places))
    assert first <= places[0]
    assert places[-1] <= first + n + room
    for fault in plan:
        # As many as it takes to be noticed.
        length = 5 if fault.kind == Injected.SPIKE else 3
        assert fault.kind not in OF_BATCHES or fault.last - fault.first == length - 1


def test_random_faults_stand_among_others():
    plan = parse("kill@3; random(n=2, kinds=raise); kill@900", num_steps=100)
    assert [fault.kind for fault in plan] == ["kill", "raise", "raise", "kill"]
    assert [fault.number for fault in plan] == [1, 2, 3, 4]
    assert all(1 <= fault.first < 100 for fault in plan[1:3])


def test_another_seed_is_another_plan():
    texts = [f"random(n=10, seed={seed}, kinds=kill+hang)" for seed in range(5)]
    assert len({parse(text) for text in texts}) == 5
