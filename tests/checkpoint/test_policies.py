import pytest

from jaxft import config, records
from jaxft.checkpoint import policies


def _question(step=100, *, now=1000.0, last_step=-1, last_secs=0.0):
    return records.SaveQuestion(
        step=step, now_secs=now, last_step=last_step, last_secs=last_secs
    )


def _infos(*steps):
    return [
        records.CheckpointInfo(step=step, path=f"/x/{step}", commit_secs=0.0)
        for step in steps
    ]


def test_parts_are_joined_by_or():
    policy = policies.parse_save("steps(100) | secs(600)")
    assert policy.should_save(_question(200, now=0.0))
    assert policy.should_save(_question(201, now=600.0))
    assert not policy.should_save(_question(201, now=599.0))


def test_steps_are_multiples_and_never_zero():
    policy = policies.parse_save("steps(4)")
    due = [step for step in range(13) if policy.should_save(_question(step))]
    assert due == [4, 8, 12]


@pytest.mark.parametrize(
    "text",
    ["", "step(3)", "steps", "steps(0)", "steps(-1)", "steps(x)", "steps(3", "|"],
)
def test_a_bad_save_policy_lists_what_exists(text):
    with pytest.raises(config.ConfigError, match=r"^config.checkpoint.save: ") as error:
        policies.parse_save(text)
    assert "steps(" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["secs(nan)", "secs(inf)", "secs(0)", "secs(-3)"])
def test_seconds_are_positive_and_finite(text):
    with pytest.raises(config.ConfigError, match="positive number of seconds"):
        policies.parse_save(text)


@pytest.mark.parametrize("text", ["last(0)", "best(2)", "every(0)", "last(1.5)"])
def test_a_bad_keep_policy_lists_what_exists(text):
    with pytest.raises(config.ConfigError, match=r"^config.checkpoint.keep: "):
        policies.parse_keep(text)


def _left(text, *steps):
    infos = _infos(*steps)
    gone = policies.plan_deletions(infos, keep=policies.parse_keep(text))
    return [info.step for info in infos if info not in gone]


def test_what_stays():
    assert _left("last(2)", 1, 2, 3, 4) == [3, 4]
    assert _left("last(9)", 1, 2) == [1, 2]
    assert _left("last(1) | every(10)", 5, 10, 15, 20, 25) == [10, 20, 25]
    assert _left("every(10)", 5, 10, 15) == [10, 15]
    assert _left("last(1)") == []


def test_the_newest_stays_whatever_the_policy_says():
    class Nothing:
        def should_keep(self, checkpoints):
            return [False] * len(checkpoints)

    gone = policies.plan_deletions(_infos(1, 2, 3), keep=Nothing())
    assert [info.step for info in gone] == [1, 2]
