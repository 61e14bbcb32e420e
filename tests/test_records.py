"""Values that cross the house say in a line what they are."""

import pytest

from jaxft import records


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "OSError"),
        ("one\ntwo", "one"),
        ("No space left [os_error_code='28'\nsource='x']", "No space left"),
        (
            "No space left [os_error_code='28']\nmore",
            "No space left [os_error_code='28']",
        ),
        ("[1, 2", "[1, 2"),
        ("x" * 400, "x" * 297 + "..."),
    ],
)
def test_the_first_line_of_an_error(text: str, line: str) -> None:
    assert records.first_line(OSError(text)) == line
