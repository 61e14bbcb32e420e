"""Requests in processes of their own: while C code runs, in forks, at random times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

SCRIPT = """
import os, signal, sys, threading, time
from signal import SIG_DFL
from jaxft.config import PreemptionConfig
from jaxft.faults.preemption import StopRequests, interrupt

def leave(reason):
    print("left", reason, threading.current_thread().name, flush=True)
    os._exit(75)

def ready():
    print("ready", flush=True)

def stops(**options):
    return StopRequests(PreemptionConfig(**options), leave=leave, environ={})
"""


def run(body: str, *signals: int, delay_secs: float = 0.05) -> tuple[int, str]:
    """Runs a script in its own group; each signal goes to that when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        for number in signals:
            time.sleep(delay_secs)
            os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out.strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_leaves_while_the_main_thread_sits_in_c(number):
    # A C call that signals do not interrupt, with the GIL released, as XLA's compiler.
    begun = time.monotonic()
    code, out = run(
        """
        import hashlib
        with stops() as s, s.may_leave():
            ready()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 50_000_000)
        """,
        number,
    )
    assert (code, out) == (75, f"left {number.name} stop-requests")
    assert time.monotonic() - begun < 5


def test_leaves_at_the_time_limit():
    code, out = run(
        """
        with stops(time_limit_secs=0.3) as s, s.may_leave():
            ready()
            time.sleep(15)
        """
    )
    assert (code, out) == (75, "left time limit stop-requests")


def test_outside_of_such_a_phase_nobody_leaves():
    code, out = run(
        """
        with stops() as s:
            with s.may_leave():
                pass
            ready()
            end = time.monotonic() + 15
            while s.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2)
            print("saved", s.poll(), s.urgent, flush=True)
        """,
        signal.SIGTERM,
        signal.SIGTERM,
    )
    assert (code, out) == (0, "saved SIGTERM False")


@pytest.mark.parametrize("earlier", ["SIG_DFL", "interrupt"])
def test_forked_children_mean_what_they_meant(earlier):
    code, out = run(
        f"""
        signal.signal(signal.SIGTERM, {earlier})
        with stops() as s:
            pids = []
            told, tell = os.pipe()
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    # Python lets a child go only after the fork: it says when.
                    os.write(tell, b"y" if signal.set_wakeup_fd(-1) == -1 else b"n")
                    try:
                        time.sleep(15)
                    except BaseException:  # as a pool does with what its work raises
                        os._exit(4)
                    os._exit(3)
                pids.append(pid)
            assert [os.read(told, 1) for _ in pids] == [b"y"] * 3
            # As multiprocessing's `terminate` does: ends the child, tells us nothing.
            os.kill(pids[0], signal.SIGTERM)
            assert os.waitpid(pids[0], 0)[1] == signal.SIGTERM
            time.sleep(0.1)
            assert s.poll() is None
            ready()
            end = time.monotonic() + 15
            while s.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            statuses = [os.waitpid(pid, 0)[1] for pid in pids[1:]]
            print("saved", s.poll(), statuses, flush=True)
        """,
        signal.SIGTERM,
    )
    assert (code, out) == (0, "saved SIGTERM [15, 15]")


def test_signals_at_random_times_never_hang_nor_get_lost():
    """A request at any moment ends the loop at a border, from busy Python and C."""
    num_tries = 40
    code, out = run(
        f"""
        import random
        rng = random.Random(0)
        ready()
        num_saved = 0
        for _ in range({num_tries}):
            timer = threading.Timer(
                rng.random() * 0.01, os.kill, (os.getpid(), signal.SIGTERM)
            )
            with stops() as s:
                timer.start()
                state = [0, 0]
                end = time.monotonic() + 5
                while s.poll() is None and time.monotonic() < end:
                    state[0] += 1
                    sum(range(200))
                    state[1] += 1
                num_saved += s.poll() == "SIGTERM" and state[0] == state[1]
                timer.join()
        print(num_saved)
        """
    )
    assert (code, out) == (0, str(num_tries))
