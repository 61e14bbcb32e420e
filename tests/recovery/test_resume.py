"""A resume that could change numbers is refused unless allowed by name."""

import pytest

from jaxft.config import ConfigError
from jaxft.recovery.resume import check_resume

SAVED = {"optimizer.b1": 0.9, "optimizer.b2": 0.95, "jax": "0.10.2", "XLA_FLAGS": ""}


def test_equal_facts_pass() -> None:
    assert check_resume(SAVED, dict(SAVED), allow="") == {}


def test_everything_that_differs_is_listed_in_one_line() -> None:
    now = SAVED | {"optimizer.b1": 0.8, "jax": "0.11.0", "new": 1}
    with pytest.raises(ConfigError) as error:
        check_resume(SAVED, now, allow="")
    text = str(error.value)
    assert "\n" not in text
    for part in ("optimizer.b1: 0.9 -> 0.8", "jax: 0.10.2 -> 0.11.0", "new: (absent)"):
        assert part in text
    assert "--config.resume.allow=jax,new,optimizer.b1" in text


def test_names_and_patterns_allow() -> None:
    now = SAVED | {"optimizer.b1": 0.8, "optimizer.b2": 0.9}
    changes = check_resume(SAVED, now, allow="optimizer.*")
    assert changes == {"optimizer.b1": [0.9, 0.8], "optimizer.b2": [0.95, 0.9]}
    assert check_resume(SAVED, now, allow=" optimizer.b2 , optimizer.b1 ") == changes
    with pytest.raises(ConfigError, match=r"optimizer\.b2"):
        check_resume(SAVED, now, allow="optimizer.b1")


def test_something_that_is_gone_counts() -> None:
    now = {name: value for name, value in SAVED.items() if name != "XLA_FLAGS"}
    with pytest.raises(ConfigError, match="XLA_FLAGS"):
        check_resume(SAVED, now, allow="")
