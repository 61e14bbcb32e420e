"""The supervisor and signals: passed on once, a grace time, then the end."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from jaxft.records import ExitCode, FaultKind

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

pytestmark = pytest.mark.usefixtures("nothing_leaks")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_passed_on_and_the_run_is_stopped(make_run, number):
    run = make_run(
        """
        emit("preflight_done")
        def save(number, frame):
            emit("stop_request", reason=signal.Signals(number).name)
            emit("save_commit", step=8)
            emit("end", step=8, reason="stopped")
            os._exit(75)
        for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(n, save)
        listen()
        time.sleep(20)
        """,
    )
    outcome = run.run((0.3, number))
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.num_restarts == 0
    assert outcome.committed_step == 8
    assert outcome.fault.kind is FaultKind.STOPPED
    assert outcome.reason == f"stopped by {number.name}"
    assert run.events("decision")[0]["action"] == "stop"


def test_a_signal_while_python_starts_is_not_lost(make_run, tmp_path):
    """The worker does not listen yet: neither a traceback nor a lost request."""
    run = make_run(
        """
        time.sleep(0.3)
        def leave(number, frame):
            emit("end", step=-1, reason="stopped by SIGINT")
            os._exit(75)
        signal.signal(signal.SIGINT, leave)
        listen()
        time.sleep(20)
        """,
    )
    begun = time.monotonic()
    outcome = run.run((0.01, signal.SIGINT))
    assert outcome.exit_code == ExitCode.STOPPED
    assert not outcome.preflight_done
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - begun < 3


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(make_run):
    """As nohup does it; the worker inherits it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        run = make_run(
            """
            emit("preflight_done")
            listen()
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.6)
            finish()
            """,
        )
        outcome = run.run((0.3, signal.SIGUSR1))
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (outcome.exit_code, outcome.num_restarts) == (ExitCode.FINISHED, 0)


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace(make_run):
    run = make_run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        emit("preflight_done")
        emit("save_commit", step=40)
        time.sleep(20)
        """,
        grace_secs=0.4,
    )
    begun = time.monotonic()
    outcome = run.run((0.2, signal.SIGTERM))
    assert 0.6 <= time.monotonic() - begun < 2.0
    assert outcome.exit_code == ExitCode.STOPPED
    assert "left on the last committed step 40" in outcome.reason
    assert "the time to stop was over" in outcome.reason
    assert outcome.num_restarts == 0


def test_a_worker_that_stops_by_itself_gets_the_same_grace(make_run):
    run = make_run(
        """
        emit("preflight_done")
        emit("stop_request", reason="time limit")
        time.sleep(20)
        """,
        grace_secs=0.3,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.reason.startswith("stopped by time limit, left before any step")


COUNT_SIGNALS = """
emit("preflight_done")
count = 0
def note(number, frame):
    global count
    count += 1
    emit("save_commit", step=count)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
listen()
end = time.monotonic() + 20
while time.monotonic() < end: time.sleep(0.01)
"""


def test_the_same_signal_again_within_three_seconds_is_one_request(make_run):
    run = make_run(COUNT_SIGNALS, grace_secs=1.0)
    begun = time.monotonic()
    moments = (0.3, 0.35, 0.6, 0.9)
    outcome = run.run(*((moment, signal.SIGINT) for moment in moments))
    assert time.monotonic() - begun >= 1.3  # The whole grace time.
    assert outcome.committed_step == 1  # Passed on once.


def test_the_same_signal_later_means_now(make_run):
    # Hours of grace, and each look at the clock takes a second.
    ticks = itertools.count(0, 1.0)
    run = make_run(COUNT_SIGNALS, grace_secs=1e9, clock=lambda: float(next(ticks)))
    outcome = run.run((0.3, signal.SIGINT), (1.5, signal.SIGINT))
    assert outcome.exit_code == ExitCode.STOPPED
    assert outcome.reason.startswith("stopped by SIGINT, left on the last committed")
    assert outcome.committed_step == 2 or "the time to stop was over" in outcome.reason


def test_another_signal_is_passed_on_and_hurries_nobody(make_run):
    run = make_run(COUNT_SIGNALS, grace_secs=1.0)
    begun = time.monotonic()
    outcome = run.run((0.3, signal.SIGINT), (0.6, signal.SIGTERM))
    assert time.monotonic() - begun >= 1.3
    assert outcome.committed_step == 2
    assert outcome.reason.startswith("stopped by SIGINT")


def test_a_stop_while_waiting_to_restart_ends_at_once(make_run):
    run = make_run(
        'emit("save_commit", step=2); die()',
        backoff_secs=60.0,
        backoff_max_secs=60.0,
    )
    begun = time.monotonic()
    outcome = run.run((0.6, signal.SIGTERM))
    assert time.monotonic() - begun < 5
    assert outcome.exit_code == ExitCode.STOPPED
    assert "left on the last committed step 2" in outcome.reason
    assert outcome.num_restarts == 1


def test_a_death_after_a_request_is_not_restarted(make_run):
    run = make_run(
        """
        signal.signal(signal.SIGTERM, lambda n, f: os.abort())
        listen()
        time.sleep(20)
        """,
    )
    outcome = run.run((0.3, signal.SIGTERM))
    assert outcome.exit_code == ExitCode.STOPPED
    assert "SIGABRT" in outcome.reason
    assert outcome.num_restarts == 0


def test_a_save_that_fails_after_a_request_is_neither_hidden_nor_tried_again(make_run):
    run = make_run(
        """
        emit("preflight_done")
        stop = lambda n, f: fault("save_failed", 74, step=8, evidence="disk full")
        signal.signal(signal.SIGTERM, stop)
        listen()
        time.sleep(20)
        """,
    )
    outcome = run.run((0.3, signal.SIGTERM))
    assert outcome.exit_code == ExitCode.SAVE_FAILED
    assert outcome.reason == "disk full"
    assert (outcome.num_restarts, run.told) == (0, [])


def test_finishing_after_a_request_is_finished(make_run):
    run = make_run(
        """
        signal.signal(signal.SIGTERM, lambda n, f: finish(9))
        listen()
        time.sleep(20)
        """,
    )
    assert run.run((0.3, signal.SIGTERM)).exit_code == ExitCode.FINISHED
