"""A save is written when its call is over, or not at all; nothing waits for ever."""

import subprocess
import sys
import threading

import pytest

from jaxft.checkpoint.gate import Gate

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]


def test_it_opens_or_is_given_up_and_stays_so():
    opened, given_up = Gate(), Gate()
    opened.open()
    opened.give_up()
    opened.wait()
    given_up.give_up()
    given_up.open()
    with pytest.raises(InterruptedError, match="given up"):
        given_up.wait()
    late = Gate()
    threading.Timer(0.05, late.open).start()
    late.wait()


# A signal as soon as a thread of the save is there, while its call is not over.
INTERRUPTED = """
import os, signal, sys, threading, time
import jax.numpy as jnp
from jaxft.checkpoint.manager import CheckpointManager

state = {f"w{i}": jnp.full((50,), i, jnp.float32) for i in range(1000)}
checkpoints = CheckpointManager(sys.argv[1])

def interrupt():
    while not any(t.name == sys.argv[2] for t in threading.enumerate()):
        time.sleep(0.0002)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    checkpoints.save(1, state)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
checkpoints.save(2, state, force=True)
checkpoints.close()
print(checkpoints.steps())
"""


@pytest.mark.parametrize(
    "thread",
    [pytest.param("arrays", marks=pytest.mark.slow), "async_save", "jaxft-save"],
)
def test_an_interrupted_save_ends_and_leaves_the_next_one_alone(tmp_path, thread):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "root"), thread],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "interrupted"
    assert lines[1] in ("[2]", "[1, 2]")
