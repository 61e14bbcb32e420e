"""Failures of every origin, in words."""

import pytest

from jaxft import records
from jaxft.checkpoint import causes


def _from(error, origin):
    error.__cause__ = origin
    return error


_FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/c/1"),
            "something is gone",
        ),
        (ValueError("zarr: Not a directory [/c/1]"), "a file where a folder should be"),
        (_from(FileNotFoundError(2, "No such file"), _FULL), "disk full"),
        (MemoryError(), "out of memory"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1"),
            "out of memory",
        ),
        (
            records.fault_error(records.FaultKind.CONFIG, "process 1: no\nmore"),
            "process 1: no",
        ),
        (
            _from(records.fault_error(records.FaultKind.CONFIG, "no"), _FULL),
            "disk full",
        ),
        (_from(RuntimeError("x"), TimeoutError()), "time-out"),
        (ValueError("[os_error_code=27: File too large]"), "file too large"),
        (KeyError("x"), "KeyError"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_cause_is_said_in_words(error, cause):
    assert causes.cause(error) == cause
    assert "{" not in causes.remedy(error, root="/c")
