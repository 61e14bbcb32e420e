"""Batches to leave out, as text, and when it is too late for them."""

import pytest

from jaxft.config import ConfigError
from jaxft.data.windows import add_skips, parse_skip


def test_numbers_and_ranges():
    assert parse_skip("") == ()
    assert parse_skip(" 300-310, 400 ,5 - 6") == ((300, 311), (400, 401), (5, 7))


@pytest.mark.parametrize("text", ["a", "5-", "-5", "6-5", "5:6", "1.5", "9" * 30])
def test_a_mistake_names_the_setting(text):
    with pytest.raises(ConfigError, match=r"is no range|is empty") as error:
        parse_skip(text)
    assert error.value.path == "data.skip"


def test_only_what_lies_ahead_can_be_left_out():
    assert add_skips([(3, 5)], [], step=10) == [(3, 5)]
    # Ten steps without batches 3 and 4 have trained on all up to 11.
    assert add_skips([(3, 5)], [(12, 14)], step=10) == [(3, 5), (12, 14)]
    with pytest.raises(ConfigError, match="batches up to 11, so 11-13 cannot"):
        add_skips([(3, 5)], [(11, 14)], step=10)
    assert add_skips([(3, 5)], [(3, 5)], step=10) == [(3, 5)]
