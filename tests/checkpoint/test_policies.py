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


def test_auto_goes_by_what_it_is_told_and_is_always_asked():
    asked = []

    def interval(question):
        asked.append(question.step)
        return 50.0

    policy = policies.parse_save("steps(100) | auto", interval=interval)
    assert policies.names_auto("steps(100) | auto")
    assert not policies.names_auto("steps(100)")
    assert policies.reads_clock(policy)
    assert policy.should_save(_question(100, now=0.0))
    assert policy.should_save(_question(101, now=50.0))
    assert not policy.should_save(_question(102, now=49.0))
    assert asked == [100, 101, 102]


@pytest.mark.parametrize("text", ["auto(3)", "auto()", "Auto", "auto steps(3)"])
def test_auto_has_no_brackets(text):
    with pytest.raises(config.ConfigError, match="joined by"):
        policies.parse_save(text, interval=lambda question: 1.0)


def test_auto_is_refused_where_clocks_would_differ_and_where_nobody_measures():
    with pytest.raises(config.ConfigError, match="goes by a clock"):
        policies.parse_save("auto", num_processes=2, interval=lambda question: 1.0)
    with pytest.raises(config.ConfigError, match="is no policy"):
        policies.parse_save("auto")


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


@pytest.mark.parametrize(
    "text",
    [
        *("last(0)", "best(2)", "every(0)", "last(1.5)", "best(0, loss)"),
        *("best(x, loss)", "best(2, loss, up)", "best(2, )", "best(2, a, max, b)"),
    ],
)
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


def _measured(values, *, unhealthy=()):
    return [
        records.CheckpointInfo(
            step=step,
            path=f"/x/{step}",
            commit_secs=0.0,
            metrics={"eval/loss": value},
            healthy=step not in unhealthy,
        )
        for step, value in values.items()
    ]


def _stay(text, infos):
    gone = policies.plan_deletions(infos, keep=policies.parse_keep(text))
    return [info.step for info in infos if info not in gone]


def test_best_and_last_are_counted_apart():
    """The metric gets worse and worse: the newest stay all the same."""
    worse = _measured({step: float(step) for step in range(1, 9)})
    assert _stay("last(2) | best(2, eval/loss)", worse) == [1, 2, 7, 8]
    assert _stay("last(2) | best(2, eval/loss, max)", worse) == [7, 8]
    assert _stay("best(1, eval/loss)", worse) == [1, 8]
    # What nobody has is no reason to delete, and takes nothing from the other parts.
    assert _stay("best(3, other)", worse) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert _stay("last(2) | best(3, other)", worse) == [7, 8]


def test_of_two_that_are_as_good_the_newer_one_is_better_and_nan_is_none():
    nan = float("nan")
    infos = _measured({1: 2.0, 2: 1.0, 3: 1.0, 4: nan, 5: float("-inf"), 6: 9.0})
    assert _stay("best(1, eval/loss)", infos) == [3, 6]
    assert _stay("best(2, eval/loss)", infos) == [2, 3, 6]


def test_unhealthy_steps_do_not_count_and_never_cost_a_healthy_one():
    values = dict.fromkeys(range(1, 7), 0.0)
    assert _stay("last(2)", _measured(values, unhealthy=(5, 6))) == [3, 4, 6]
    assert _stay("last(1)", _measured(values, unhealthy=(2, 3, 4, 5, 6))) == [1, 6]
    assert _stay("last(2)", _measured(values, unhealthy=(4,))) == [5, 6]


def test_how_many_a_policy_keeps():
    keep = policies.parse_keep("last(3) | every(1000) | best(2, loss)")
    assert policies.most_kept(keep) == 5
    assert policies.reads_metrics(keep)
    assert not policies.reads_metrics(policies.parse_keep("last(3) | every(10)"))


def test_what_a_failed_save_means():
    assert policies.parse_save_error("fail", max_failed=3).is_fatal
    warn = policies.parse_save_error(" warn ", max_failed=3)
    assert (warn.is_fatal, warn.num_retries, warn.max_failed) == (False, 0, 3)
    retry = policies.parse_save_error("retry(2)", max_failed=9)
    assert (retry.is_fatal, retry.num_retries, retry.max_failed) == (False, 2, 3)


def test_several_processes_do_not_save_by_a_clock():
    assert policies.parse_save("steps(4)", num_processes=2)
    for text in ("secs(5)", "steps(2) | secs(5)"):
        assert policies.parse_save(text, num_processes=1)
        with pytest.raises(config.ConfigError, match="2 processes do not agree"):
            policies.parse_save(text, num_processes=2)


@pytest.mark.parametrize("text", ["", "ignore", "retry", "retry(0)", "retry(x)"])
def test_a_bad_policy_for_failed_saves_lists_what_exists(text):
    path = r"^config.checkpoint.on_save_error: "
    with pytest.raises(config.ConfigError, match=path) as error:
        policies.parse_save_error(text, max_failed=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps(x)", "'steps(x)': x is no whole number"),
        ("steps()", "'steps()': nothing is no whole number"),
        ("secs(soon)", "'secs(soon)': soon is no number"),
    ],
)
def test_a_number_that_is_none_is_told_in_words(text, words):
    with pytest.raises(config.ConfigError) as caught:
        policies.parse_save(text)
    assert words in str(caught.value)
