"""Two real processes and a mirror that only one of them talks to."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(80, exit=True)
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import ConfigError
from jaxft.records import FaultError

manager = CheckpointManager(sys.argv[1] + "/root", mirror=sys.argv[1] + "/mirror")
try:
    manager.restore({"a": 1})
except (ConfigError, FaultError) as error:
    print(type(error).__name__, error)
"""


def test_a_mirror_that_fails_the_primary_leaves_nobody_waiting(tmp_path, run_processes):
    (tmp_path / "mirror").write_text("a file where a folder should be")
    ends = run_processes(PROGRAM, tmp_path)
    first, second = (out for out, _ in ends)
    assert "mirror" in first
    assert "Error" in first
    assert "process 0 cannot fetch a step from" in second
