"""What the kernel says of real processes."""

import os
import signal
import subprocess
import sys
import time

from jaxft.process_state import process_state


def test_this_process_runs_and_nobody_holds_it():
    assert process_state("self") == process_state(os.getpid())
    assert process_state("self").letter in "RS"
    assert not process_state("self").is_traced
    assert process_state("self").words == ""


def test_a_stopped_process_explains_itself_and_one_that_is_gone_does_not():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while process_state(child.pid).letter != "T":
                assert time.monotonic() < deadline
            assert process_state(child.pid).words == ", stopped by a signal"
        finally:
            child.kill()
            child.wait()
        assert process_state(child.pid).letter == "?"
