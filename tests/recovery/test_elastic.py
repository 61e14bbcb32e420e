"""The config of a run on fewer processes."""

from __future__ import annotations

import pytest

from jaxft import settings
from jaxft.config import Config, ConfigError, resolve
from jaxft.recovery.elastic import adapt, plan_microbatches


@pytest.mark.parametrize(
    ("num_microbatches", "global_batch", "here", "expected"),
    [
        (1, 16, 4, 1),
        (1, 16, 2, 2),
        (1, 16, 1, 4),
        (2, 16, 2, 4),
        (1, 12, 3, 2),
        (1, 24, 3, 2),
        # With 5 parts 30 rows do not divide over 2 processes in 4 or 3 parts.
        (2, 30, 3, 5),
    ],
)
def test_no_process_holds_more_at_a_time(
    num_microbatches, global_batch, here, expected
):
    number = plan_microbatches(
        num_microbatches,
        global_batch=global_batch,
        num_processes=here,
        num_configured=4,
    )
    assert number == expected
    assert global_batch % (number * here) == 0
    assert number * here >= num_microbatches * 4


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match="cannot be split over 3 processes"):
        plan_microbatches(1, global_batch=16, num_processes=3, num_configured=4)


def test_only_what_elasticity_changes_may_differ():
    config = Config()
    config.data.global_batch = 16
    config.elastic.min_processes = 2
    config.resume.allow = "optimizer.b1"
    config = settings.lock(resolve(config))
    adapted = adapt(config, num_processes=2, num_configured=4)
    assert adapted.train.num_microbatches == 2
    allowed = adapted.resume.allow.split(",")
    assert allowed[0] == "optimizer.b1"
    assert set(allowed[1:]) == {
        "num_processes",
        "mesh.shape",
        "mesh.num_devices",
        "train.num_microbatches",
    }
    before, after = settings.flatten(config), settings.flatten(adapted)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"train.num_microbatches", "resume.allow"}
    assert config.train.num_microbatches == 1


def test_without_elasticity_nothing_changes():
    config = settings.lock(resolve(Config()))
    assert adapt(config, num_processes=1, num_configured=4) is config
