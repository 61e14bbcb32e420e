"""What the kernel says of real processes."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxft.process_state import process_state, resident_bytes


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


def test_the_memory_of_this_process_is_what_the_kernel_says():
    status = pathlib.Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmRSS:\s*(\d+) kB", status)
    assert 0.5 < resident_bytes() / (int(kilobytes) * 1024) < 2.0


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("['one', 'two words', '\u00e9']", ["one", "two words", "\u00e9"]),
        ("['x' * 5000]", None),  # There is no room for so much.
    ],
)
def test_other_words_are_shown_where_they_fit(words, shown):
    code = (
        "import sys, pathlib\n"
        "from jaxft.process_state import show_words\n"
        f"show_words({words})\n"
        "shown = pathlib.Path('/proc/self/cmdline').read_bytes()\n"
        "sys.stdout.buffer.write(shown)\n"
        "assert sys.argv[1:] == ['a', 'b']\n"
    )
    command = [sys.executable, "-c", code, "a", "b"]
    told = subprocess.run(command, check=True, capture_output=True).stdout
    found = [word.decode() for word in told.rstrip(b"\0").split(b"\0")]
    assert found == (command if shown is None else shown)
