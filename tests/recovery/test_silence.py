"""The supervisor and workers that make no progress: what it sees, and what it does."""

from __future__ import annotations

import json
import signal
import time

import pytest

from jaxft.limits import LearntTimes, TimeLimits
from jaxft.records import ExitCode, FaultKind, Phase
from jaxft.recovery import silence
from jaxft.recovery.silence import HangWatch, Silence, beat_line
from jaxft.recovery.workdir import WorkdirLock

LIMITS = TimeLimits(min_secs=60.0, first_secs=1800.0, margin_secs=15.0)
# For real processes: a toy that says nothing may take a while to start.
QUICK = TimeLimits(
    min_secs=0.5, first_secs=20.0, margin_secs=0.5, save_secs=1.0, grace_secs=1.0
)


class Watched:
    """What the supervisor knows of one worker, with a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 5.0
        self.silence = Silence(LIMITS, learnt=LearntTimes(), clock=lambda: self.now)

    def hangs_within(self, secs: float) -> bool:
        for _ in range(round(secs / 0.1)):
            self.now += 0.1
            if self.silence.tick():
                return True
        return False

    def tell(self, serial: int, phase: Phase = Phase.STEP) -> None:
        line = beat_line(serial, phase=phase, step=3, limit_secs=60.0)
        assert self.silence.take(line.encode())


def test_a_worker_is_judged_a_margin_later_than_it_judges_itself():
    watched = Watched()
    assert not watched.hangs_within(1800.0)  # It still starts.
    watched.tell(1)
    assert not watched.hangs_within(74.0)
    assert watched.hangs_within(2.0)
    assert (watched.silence.phase, watched.silence.step) == (Phase.STEP, 3)


def test_only_what_moved_is_progress():
    watched = Watched()
    watched.tell(1)
    for _ in range(7):
        assert not watched.hangs_within(10.0)
        watched.tell(1)
    assert watched.hangs_within(6.0)
    watched.tell(1, Phase.DATA)
    assert not watched.hangs_within(70.0)
    watched.tell(2, Phase.DATA)
    assert not watched.hangs_within(70.0)


def test_time_in_which_the_supervisor_was_stopped_is_not_counted():
    watched = Watched()
    watched.tell(1)
    watched.now += 100_000.0
    assert not watched.silence.tick()
    assert not watched.hangs_within(73.0)
    assert watched.hangs_within(2.0)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{}", b"beat", b"beat 1 2", b"beat x step 1 1.0", b"beat 1 nap 1 1.0"),
        *(b"beat \xff", b"learnt {", b"learnt " + b"[" * 100_000),
        b"beaten 1 step 1 1.0",
    ],
)
def test_a_torn_or_foreign_line_is_no_progress(line):
    watched = Watched()
    assert not watched.silence.take(line)
    assert watched.silence.learnt is None


def test_what_a_worker_learnt_is_for_the_next_and_on_disk(tmp_path):
    watch = HangWatch(LIMITS, workdir=tmp_path)
    learnt = LearntTimes()
    learnt.observe(Phase.START, 250.0)
    first = watch.begin()
    assert first.take(f"learnt {json.dumps(learnt.to_json())}".encode())
    watch.count_alarm(Phase.STEP)
    watch.keep(first)
    assert watch.begin().limit_secs == 2500.0
    assert watch.learnt.alarms == {Phase.STEP: 1}
    again = HangWatch(LIMITS, workdir=tmp_path)
    assert again.begin().limit_secs == 2500.0
    assert again.learnt.alarms == {}


def test_the_newest_calls_of_the_main_thread_stay():
    other = "Thread 0x1 (most recent call first):\n" + '  File "a", line 1 in b\n' * 99
    main = 'Current thread 0x2 (most recent call first):\n  File "m", line 7 in hot\n'
    main += '  File "m", line 1 in cold\n' * 99
    text = f"{other}\n{main}".strip()
    assert silence.excerpt(text, max_bytes=10_000) == text
    assert "in hot" in silence.excerpt(text, max_bytes=1_000)
    assert len(silence.excerpt(text, max_bytes=1_000)) <= 1_000
    assert silence.excerpt(text, max_bytes=3_000).endswith(main.strip())
    assert silence.where(text) == 'File "m", line 7 in hot'
    assert silence.where("") == ""


HOLDS_THE_LOCK = """
emit("preflight_done")
show_stacks()
def the_culprit():
    import ctypes
    sleep = ctypes.PyDLL(None).sleep  # It keeps the interpreter lock.
    while True:  # A signal would end one.
        sleep(60)
step(7)
beat(1)
if attempt == 0:
    the_culprit()
finish(9)
"""


@pytest.mark.usefixtures("nothing_leaks")
def test_a_worker_that_holds_the_interpreter_lock_is_replaced(make_run):
    run = make_run(HOLDS_THE_LOCK, limits=QUICK)
    begun = time.monotonic()
    outcome = run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (ExitCode.FINISHED, 1)
    assert time.monotonic() - begun < 30
    (hang,) = run.events("hang")
    assert "in the_culprit" in hang["stacks"]
    assert (hang["phase"], hang["step"], hang["seen_by"]) == ("step", 7, "supervisor")
    assert hang["limit_secs"] == 0.3
    with open(hang["file"]) as file:
        assert "in the_culprit" in file.read()
    decision = run.events("decision")[0]
    assert (decision["action"], decision["cause"]) == ("restart", "hang")
    assert "no progress for" in decision["reason"]
    assert "in the_culprit" in decision["reason"]
    assert run.launches[0].alarms == {}
    assert run.launches[1].alarms == {Phase.STEP: 1}


@pytest.mark.usefixtures("nothing_leaks")
def test_a_worker_that_somebody_stopped_is_replaced(make_run):
    run = make_run(
        """
        emit("preflight_done")
        show_stacks()
        def the_culprit():
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        beat(1)
        if attempt == 0:
            the_culprit()
        finish(9)
        """,
        limits=QUICK,
    )
    outcome = run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (ExitCode.FINISHED, 1)
    (hang,) = run.events("hang")
    assert "in the_culprit" in hang["stacks"]
    assert ", stopped by a signal" in run.events("decision")[0]["reason"]


@pytest.mark.usefixtures("nothing_leaks")
def test_hangs_without_end_end_with_their_own_code(make_run):
    run = make_run(
        """
        emit("preflight_done")
        show_stacks()
        beat(1, "data")
        time.sleep(60)
        """,
        limits=QUICK,
        max_restarts=3,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.HUNG
    assert outcome.fault.kind is FaultKind.HANG
    # One without progress costs two.
    assert outcome.num_restarts == 2
    assert "in phase data" in outcome.reason
    assert [hang["phase"] for hang in run.events("hang")] == ["data"] * 3


@pytest.mark.usefixtures("nothing_leaks")
def test_a_worker_that_never_speaks_hangs_and_gives_no_stacks(make_run, tmp_path):
    limits = TimeLimits(
        min_secs=0.05, first_secs=1.0, margin_secs=0.2, save_secs=0.5, grace_secs=0.5
    )
    run = make_run("time.sleep(60)", limits=limits, max_restarts=0)
    outcome = run.run()
    assert outcome.exit_code == ExitCode.HUNG
    assert not outcome.preflight_done or list(tmp_path.iterdir())
    assert "in phase start" in outcome.reason


@pytest.mark.usefixtures("nothing_leaks")
def test_a_slow_worker_that_makes_progress_is_left_alone(make_run, tmp_path):
    with WorkdirLock.acquire(tmp_path / "run") as lock:
        run = make_run(
            """
            emit("preflight_done")
            show_stacks()
            os.write(event_fd, b'learnt {"step": {"count": 9, "longest_secs": [2]}}\\n')
            for serial in range(10):
                beat(serial)
                time.sleep(0.2)
            finish(9)
            """,
            limits=QUICK,
            lock=lock,
        )
        outcome = run.run()
        stored = json.loads((tmp_path / "run" / "supervisor.json").read_text())
    assert (outcome.exit_code, outcome.num_restarts) == (ExitCode.FINISHED, 0)
    assert stored["longest"] == {"step": {"count": 9, "longest_secs": [2.0]}}


@pytest.mark.usefixtures("nothing_leaks")
def test_a_hang_while_a_stop_is_asked_for_is_a_stop(make_run):
    run = make_run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        emit("preflight_done")
        emit("save_commit", step=40)
        beat(1)
        time.sleep(60)
        """,
        limits=QUICK,
        grace_secs=30.0,
    )
    outcome = run.run((0.1, signal.SIGTERM))
    assert outcome.exit_code == ExitCode.STOPPED
    assert "left on the last committed step 40" in outcome.reason


# A child that traces the worker for a while, as gdb and strace do.
TRACED = """
import ctypes, subprocess
emit("preflight_done")
libc = "import ctypes, sys, time; libc = ctypes.CDLL(None, use_errno=True); "
seize = "print(libc.ptrace(0x4206, int(sys.argv[1]), None, None), flush=True); "
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # Where only parents may trace.
beat(1)
child = subprocess.Popen(
    [sys.executable, "-S", "-c", libc + seize + "time.sleep(3)", str(os.getpid())],
    stdout=subprocess.PIPE,
)
beat(2)
if child.stdout.readline() != b"0\\n":
    fault("config", 78, evidence="may not trace")
beat(3)
child.wait()
finish(9)
"""


@pytest.mark.usefixtures("nothing_leaks")
def test_a_worker_that_a_person_debugs_is_left_alone(make_run):
    run = make_run(TRACED, limits=QUICK)
    outcome = run.run()
    if "may not trace" in outcome.reason:
        pytest.skip("this machine lets no process trace another")
    assert (outcome.exit_code, outcome.num_restarts) == (ExitCode.FINISHED, 0)
    assert not run.events("hang")
