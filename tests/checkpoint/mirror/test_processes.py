"""Two real processes and a mirror that only one of them talks to."""

import os
import socket
import subprocess
import sys

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


def test_a_mirror_that_fails_the_primary_leaves_nobody_waiting(tmp_path):
    (tmp_path / "mirror").write_text("a file where a folder should be")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), address]
    processes = [
        subprocess.Popen(
            [*command, str(index)],
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ends = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-2000:]
    first, second = (out for out, _ in ends)
    assert "mirror" in first
    assert "Error" in first
    assert "process 0 cannot fetch a step from" in second
