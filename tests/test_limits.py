"""Time limits: what is learnt, what is forgotten, and orders that cannot work."""

import json
import pathlib

import pytest

from jaxft.config import Config, ConfigError
from jaxft.limits import LearntTimes, TimeLimits, read_learnt, write_learnt
from jaxft.records import Phase

LIMITS = TimeLimits(min_secs=60.0, first_secs=1800.0, factor=10.0)


@pytest.mark.parametrize("phase", Phase)
def test_what_was_never_seen_gets_the_first_limit_at_least(phase):
    assert LIMITS.limit_secs(phase, LearntTimes()) >= LIMITS.first_secs


def test_a_step_learns_from_the_longest_after_three():
    learnt = LearntTimes()
    for secs in (0.1, 20.0):
        learnt.observe(Phase.STEP, secs)
        assert LIMITS.limit_secs(Phase.STEP, learnt) == 1800.0
    learnt.observe(Phase.STEP, 0.1)
    assert LIMITS.limit_secs(Phase.STEP, learnt) == 200.0


def test_short_steps_keep_the_least_limit_and_other_phases_more_patience():
    learnt = LearntTimes()
    for phase in Phase:
        learnt.observe(phase, 0.01, num=3)
    limits = {phase: LIMITS.limit_secs(phase, learnt) for phase in Phase}
    assert limits[Phase.STEP] == 60.0
    assert all(limit >= 60.0 for limit in limits.values())
    assert limits[Phase.DATA] == 300.0
    assert limits[Phase.COMPILE] == 600.0
    # A save fails by its own deadline before it hangs.
    assert limits[Phase.SAVE] == LIMITS.save_secs + 60.0


def test_an_outlier_among_steps_is_forgotten_after_a_while():
    learnt = LearntTimes()
    learnt.observe(Phase.STEP, 100.0)
    for _ in range(500):
        learnt.observe(Phase.STEP, 0.5)
    assert LIMITS.limit_secs(Phase.STEP, learnt) == 1000.0
    for _ in range(1000):
        learnt.observe(Phase.STEP, 0.5)
    assert LIMITS.limit_secs(Phase.STEP, learnt) == 60.0
    # Many at once, as the watchdog takes them, are no different.
    learnt.observe(Phase.STEP, 9.0, num=10_000)
    assert LIMITS.limit_secs(Phase.STEP, learnt) == 90.0


def test_a_compilation_without_the_cache_stays_known():
    learnt = LearntTimes()
    learnt.observe(Phase.COMPILE, 900.0)
    for _ in range(100):
        learnt.observe(Phase.COMPILE, 1.0)
    assert LIMITS.limit_secs(Phase.COMPILE, learnt) == 9000.0


def test_each_alarm_doubles_the_limit_up_to_eight_times():
    learnt = LearntTimes()
    learnt.observe(Phase.STEP, 1.0, num=5)
    seen = []
    for num in range(6):
        learnt.alarms[Phase.STEP] = num
        seen.append(LIMITS.limit_secs(Phase.STEP, learnt))
    assert seen == [60.0, 120.0, 240.0, 480.0, 480.0, 480.0]
    assert LIMITS.limit_secs(Phase.DATA, learnt) == 1800.0


@pytest.mark.parametrize(
    ("values", "path", "rule"),
    [
        ({"factor": 1.0}, "hang.factor", "above 1"),
        ({"min_secs": 7.0, "first_secs": 6.0}, "hang.min_secs", "at most"),
        ({"min_secs": 0.0}, "hang.min_secs", "positive"),
        ({"margin_secs": 0.0}, "hang.margin_secs", "positive"),
        ({"save_secs": 1800.0}, "hang.first_secs", "checkpoint.timeout_secs 1800"),
        ({"grace_secs": 4000.0}, "hang.first_secs", "preemption.grace_secs 4000"),
    ],
)
def test_an_impossible_order_is_refused_by_its_rule(values, path, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        TimeLimits(**values)
    assert caught.value.path == path
    assert "\n" not in str(caught.value)


def test_the_limits_of_a_config():
    config = Config()
    config.hang.min_secs = 5.0
    config.checkpoint.timeout_secs = 7.0
    limits = TimeLimits.of(config)
    assert (limits.min_secs, limits.save_secs) == (5.0, 7.0)
    # The worker has time to speak before its supervisor acts.
    assert limits.tick_secs < limits.last_words_secs < limits.margin_secs


def test_what_was_learnt_outlives_the_process(tmp_path: pathlib.Path):
    learnt = LearntTimes()
    learnt.observe(Phase.STEP, 12.0, num=700)
    learnt.observe(Phase.RESTORE, 100.0)
    learnt.alarms[Phase.STEP] = 3
    write_learnt(tmp_path, learnt.to_json())
    again = read_learnt(tmp_path)
    assert LIMITS.limit_secs(Phase.STEP, again) == 120.0
    assert LIMITS.limit_secs(Phase.RESTORE, again) == 1000.0
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"longest": 3}',
        '{"longest": {"step": {"count": 5, "longest_secs": []}}}',
        '{"longest": {"step": {"count": 5, "longest_secs": [1e9]}}}',
        '{"longest": {"step": {"count": 5, "longest_secs": [NaN]}}}',
        '{"longest": {"step": {"count": "x", "longest_secs": [1]}, "walk": {}}}',
        "[" * 100_000,
    ],
)
def test_a_broken_file_teaches_nothing(tmp_path: pathlib.Path, text: str):
    (tmp_path / "supervisor.json").write_text(text)
    assert LIMITS.limit_secs(Phase.STEP, read_learnt(tmp_path)) == 1800.0


def test_a_workdir_that_takes_no_file_is_no_error(tmp_path: pathlib.Path):
    write_learnt(tmp_path / "not there", LearntTimes().to_json())
    (tmp_path / "supervisor.json").mkdir()
    write_learnt(tmp_path, LearntTimes().to_json())
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.json"]
    assert read_learnt(tmp_path).to_json() == {}


def test_the_stored_form_is_plain(tmp_path: pathlib.Path):
    learnt = LearntTimes()
    learnt.observe(Phase.SAVE, 0.25, num=2)
    write_learnt(tmp_path, learnt.to_json())
    assert json.loads((tmp_path / "supervisor.json").read_text()) == {
        "format": 1,
        "longest": {"save": {"count": 2, "longest_secs": [0.25]}},
    }
