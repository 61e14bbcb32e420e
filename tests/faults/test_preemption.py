"""Stop requests: flags, the time limit, leaving at once, children."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jaxft.config import ConfigError, PreemptionConfig
from jaxft.faults import preemption
from jaxft.faults.preemption import StopRequests, parse_signals


class Clock:
    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


class Events(list):
    def __call__(self, kind: str, /, **fields) -> None:
        self.append((kind, fields))


def make(clock=time.time, environ=None, **options) -> StopRequests:
    names = ("signals", "grace_secs", "time_limit_secs")
    config = {name: options.pop(name) for name in names if name in options}
    if clock is not time.time:
        options.setdefault("timer", clock)
    return StopRequests(
        PreemptionConfig(**config), clock=clock, environ=environ or {}, **options
    )


def wait_for(condition, secs: float = 5.0) -> None:
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raise_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def test_parse_signals():
    assert parse_signals("SIGTERM, SIGUSR1, SIGINT") == (
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGINT,
    )
    assert parse_signals("term,HUP, ,TERM") == (signal.SIGTERM, signal.SIGHUP)
    assert parse_signals("") == ()


@pytest.mark.parametrize(
    "text", ["SIGKILL", "STOP", "TERM INT", "15", "SIGSEGV", "SIG_DFL", "BLOCK", "X"]
)
def test_parse_signals_refuses(text):
    with pytest.raises(ConfigError) as caught:
        parse_signals(text)
    assert caught.value.path == "preemption.signals"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGUSR2", "SIGHUP"])
def test_a_signal_is_a_request(name):
    number = signal.Signals[name]
    # Under nohup SIGHUP is ignored, and then it asks for nothing.
    first = signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    events = Events()
    with make(signals=name, emit=events) as stops:
        assert stops.poll() is None
        assert stops.deadline_secs() is None
        raise_signal(number)
        assert stops.poll() == name
        assert 27.0 < stops.deadline_secs() <= 28.0
        assert not stops.urgent
    assert events == [("stop_request", {"reason": name})]
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(number, first)


def test_other_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with make(signals="USR1"):
        assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_ignored_from_the_start_stays_ignored():
    """As nohup has SIGHUP, and a script's job in the background SIGINT."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with make(signals="SIGHUP, SIGTERM") as stops:
            raise_signal(signal.SIGHUP)
            time.sleep(0.02)
            assert stops.poll() is None
            raise_signal(signal.SIGTERM)
            assert stops.poll() == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_interrupts_is_replaced_not_called():
    before = signal.signal(signal.SIGTERM, preemption.interrupt)
    try:
        with make() as stops:
            raise_signal(signal.SIGTERM)
            assert stops.poll() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("jump_secs", [-5000.0, 5000.0])
def test_a_clock_that_is_set_changes_no_interval(jump_secs):
    clock, timer = Clock(), Clock()
    with make(clock=clock, timer=timer) as stops:
        raise_signal(signal.SIGTERM)
        wait_for(lambda: stops._first_seen)
        clock.now += jump_secs
        timer.now += 1.0
        assert stops.deadline_secs() == pytest.approx(27.0)
        raise_signal(signal.SIGTERM)
        time.sleep(0.05)
        assert not stops.urgent


def test_the_handler_only_sets_flags():
    """No call but the clock, a name, the handler from before, and `_set` itself."""
    calls = set()
    for method in (StopRequests._on_signal, StopRequests._set):
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        assert not any(isinstance(node, ast.With | ast.Try) for node in ast.walk(tree))
        calls |= {
            ast.unparse(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
    assert calls == {
        *("self._set", "signal.Signals", "self._earlier.get", "callable"),
        *("earlier", "self._timer"),
    }


def test_again_within_three_seconds_is_the_same_request_later_means_now():
    clock = Clock()
    events = Events()
    with make(clock=clock, emit=events) as stops:
        raise_signal(signal.SIGINT)
        wait_for(lambda: stops._first_seen)
        clock.now += 2.9
        raise_signal(signal.SIGINT)
        time.sleep(0.05)
        assert not stops.urgent
        # Another signal is another way to say it once, as schedulers do.
        clock.now += 1
        raise_signal(signal.SIGTERM)
        wait_for(lambda: len(stops._first_seen) == 2)
        assert not stops.urgent
        raise_signal(signal.SIGINT)
        wait_for(lambda: stops.urgent)
        assert stops.poll() == "SIGINT"
        assert stops.deadline_secs() == pytest.approx(28 - 3.9)
        clock.now += 100
        assert stops.deadline_secs() == 0.0
    assert len(events) == 1


def test_many_signals_in_a_burst_are_one_request():
    with make() as stops:
        for _ in range(200):
            raise_signal(signal.SIGTERM)
            raise_signal(signal.SIGUSR1)
        time.sleep(0.05)
        assert stops.poll() == "SIGTERM"
        assert not stops.urgent


def test_earlier_handlers_are_called_too_and_come_back():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with make() as stops:
            raise_signal(signal.SIGUSR1)
            assert stops.poll() == "SIGUSR1"
            assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_set_over_ours_stays():
    before = signal.getsignal(signal.SIGUSR1)
    theirs = lambda number, frame: None
    try:
        with make():
            signal.signal(signal.SIGUSR1, theirs)
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nested_requests_both_hear():
    with make() as outer, make() as inner:
        raise_signal(signal.SIGTERM)
        assert inner.poll() == outer.poll() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_earlier_wakeup_pipe_still_hears():
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd)
    try:
        with make() as stops:
            raise_signal(signal.SIGTERM)
            wait_for(lambda: stops._first_seen)
            time.sleep(0.05)
            assert os.read(read_fd, 10) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == write_fd
        os.close(read_fd)
        os.close(write_fd)


def test_a_lost_wakeup_pipe_does_not_lose_the_request():
    # As an event loop in the main thread does while it runs.
    with make() as stops:
        earlier = signal.set_wakeup_fd(-1)
        raise_signal(signal.SIGTERM)
        assert stops.poll() == "SIGTERM"
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)


def test_blocked_signals_are_heard_and_blocked_again():
    # To this thread: the test runner has others, which do not block it.
    me = threading.get_ident()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        signal.pthread_kill(me, signal.SIGTERM)
        with make() as stops:
            assert stops.poll() == "SIGTERM"
        signal.pthread_kill(me, signal.SIGTERM)  # Would end this process.
        assert signal.sigtimedwait([signal.SIGTERM], 1) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_request_keeps_the_first_reason():
    events = Events()
    stops = make(emit=events)
    stops.request()
    with stops:
        stops.request("notebook")
        assert stops.poll() == "requested"
    stops.request("late")
    assert events == [("stop_request", {"reason": "requested"})]


def test_in_another_thread_only_calls_and_time_ask():
    reasons = []
    before = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with make() as stops:
            assert signal.getsignal(signal.SIGTERM) == before
            stops.request("stop button")
            reasons.append(stops.poll())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert reasons == ["stop button"]


def test_time_limit():
    clock = Clock()
    with make(clock=clock, time_limit_secs=50.0) as stops:
        clock.now += 49
        assert stops.poll() is None
        clock.now += 1
        assert stops.poll() == "time limit"
        assert stops.deadline_secs() == 28.0


@pytest.mark.parametrize(
    ("grace_secs", "work_secs"), [(0.0, 0.0), (1.0, 0.9), (10.0, 9.0), (3600.0, 3598.0)]
)
def test_the_time_to_work_ends_before_the_grace_time(grace_secs, work_secs):
    stops = make(clock=Clock(), grace_secs=grace_secs)
    stops.request()
    assert stops.deadline_secs() == pytest.approx(work_secs)


def test_time_limit_goes_on_over_restarts():
    clock = Clock()
    stops = make(clock=clock, time_limit_secs=50.0, start_secs=clock.now - 50)
    assert stops.poll() == "time limit"


def test_slurm_end_time_leaves_the_grace_time():
    clock = Clock()
    environ = {"SLURM_JOB_END_TIME": str(int(clock.now) + 100)}
    stops = make(clock=clock, environ=environ, grace_secs=40.0, time_limit_secs=500.0)
    clock.now += 59
    assert stops.poll() is None
    clock.now += 1
    assert stops.poll() == "time limit"


@pytest.mark.parametrize("text", ["", "soon", "12", "nan"])
def test_a_foreign_slurm_end_time_is_no_limit(text):
    stops = make(clock=Clock(), environ={"SLURM_JOB_END_TIME": text})
    assert stops.poll() is None


def test_time_limit_is_announced_without_a_poll():
    events = Events()
    with make(time_limit_secs=0.1, emit=events):
        wait_for(lambda: events)
    assert events == [("stop_request", {"reason": "time limit"})]


class Left(Exception):
    pass


def leave(reason: str):
    raise Left(reason)


def test_may_leave_leaves_on_entering_after_a_request():
    with make(leave=leave) as stops:
        with stops.may_leave():
            pass
        stops.request("enough")
        with pytest.raises(Left, match="enough"), stops.may_leave():
            raise AssertionError("must not get here")


@pytest.mark.parametrize(("again", "secs"), [(True, 5.0), (False, 30.0 + 5.0)])
def test_a_main_thread_that_does_not_hear_it_is_left(again, secs):
    clock, left = Clock(), []
    with make(clock=clock, leave=left.append) as stops:
        raise_signal(signal.SIGTERM)
        wait_for(lambda: stops._first_seen)
        if again:
            clock.now += 4.0
            raise_signal(signal.SIGTERM)
            wait_for(lambda: stops.urgent)
        clock.now += secs - 0.5
        stops._wake()
        time.sleep(0.05)
        assert left == []
        clock.now += 0.5
        stops._wake()
        wait_for(lambda: left)
    assert left[0] == "SIGTERM while the main thread was deaf to it"


def test_without_leave_nothing_happens():
    with make() as stops:
        stops.request()
        with stops.may_leave():
            pass
        assert stops.poll() == "requested"


def test_importing_it_is_host_only():
    script = "import sys, jaxft.faults.preemption; print('jax' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert out.strip() == "False"
    assert preemption.REPEAT_SECS == 3.0
