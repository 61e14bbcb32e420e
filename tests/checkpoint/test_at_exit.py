"""A save in flight when the program leaves without `close`."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.device

NO_CLOSE = """
import sys
import jax.numpy as jnp
from jaxft.checkpoint.manager import CheckpointManager
CheckpointManager(sys.argv[1]).save(1, {"w": jnp.ones((512, 512))})
if sys.argv[2] == "raise":
    raise KeyError("mine")
if sys.argv[2] == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_program_that_forgets_to_close_commits(tmp_path, ending, code):
    done = subprocess.run(
        [sys.executable, "-c", NO_CLOSE, str(tmp_path), ending],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert os.listdir(tmp_path) == ["1"]
    assert done.stderr.count("Traceback") == (ending == "raise")
    assert ending != "raise" or done.stderr.endswith("KeyError: 'mine'\n")


def test_threading_register_atexit_is_where_it_was():
    """Private, so it may move; `jaxft/checkpoint/at_exit.py` says why it is needed."""
    called = "import threading; threading._register_atexit(print, 'called')"
    done = subprocess.run(
        [sys.executable, "-c", called], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("called\n", "")
