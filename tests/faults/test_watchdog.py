"""The watchdog: what moves, what does not, and what it leaves behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from jaxft.faults import stacks
from jaxft.faults.watchdog import Answer, PhaseBoard, Watchdog
from jaxft.limits import LearntTimes, TimeLimits
from jaxft.records import Phase

LIMITS = TimeLimits(min_secs=60.0, first_secs=1800.0)


class Bench:
    """A watchdog that is asked to look, with a clock that is set by hand."""

    def __init__(self, **options: Any):
        self.now = 100.0
        self.events: list[dict[str, Any]] = []
        self.told: list[tuple[int, Phase, float]] = []
        self.kept: list[dict[str, Any]] = []
        self.learnt = LearntTimes()
        self.dog = Watchdog(
            limits=LIMITS,
            learnt=self.learnt,
            answer=Answer.REPORT,
            emit=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            tell=self._tell,
            keep=self.kept.append,
            clock=lambda: self.now,
            **options,
        )
        self.board = self.dog.board

    def _tell(
        self, serial: int, /, *, phase: Phase, step: int, limit_secs: float
    ) -> bool:
        self.told.append((serial, phase, limit_secs))
        return True

    def wait(self, secs: float) -> None:
        """Time goes by, and the watchdog looks as often as it does."""
        for _ in range(round(secs / 0.25)):
            self.now += 0.25
            self.dog.tick()

    def steps(self, num: int, *, secs: float) -> None:
        for _ in range(num):
            self.wait(secs)
            self.dog.beat(self.board.step + 1)


def test_a_slow_first_step_is_no_hang_and_a_real_stall_later_is():
    bench = Bench()
    bench.wait(1700.0)
    bench.steps(20, secs=1.0)
    assert not bench.events
    bench.wait(59.5)
    assert not bench.events
    bench.wait(1.0)
    (hang,) = bench.events
    assert hang["kind"] == "hang"
    assert (hang["phase"], hang["step"]) == ("step", 19)
    assert 60.0 <= hang["silent_secs"] <= 60.5
    assert (hang["limit_secs"], hang["seen_by"]) == (60.0, "watchdog")
    assert "test_a_slow_first_step_is_no_hang" in hang["stacks"]
    # It is told once, and a later one is another one.
    bench.wait(200.0)
    assert len(bench.events) == 1
    bench.steps(1, secs=1.0)
    bench.wait(5000.0)
    assert len(bench.events) == 2


def test_slow_steps_raise_the_limit():
    bench = Bench()
    bench.steps(10, secs=30.0)
    bench.wait(299.0)
    assert not bench.events
    bench.wait(2.0)
    assert bench.events[0]["limit_secs"] == 300.0


def test_each_phase_has_its_own_patience_and_name():
    bench = Bench()
    bench.steps(10, secs=0.25)
    with bench.dog.phase("compile"):
        bench.wait(1700.0)
    with bench.dog.phase(Phase.DATA):
        bench.wait(1799.0)
        assert not bench.events
        bench.wait(2.0)
    assert [event["phase"] for event in bench.events] == ["data"]
    assert bench.board.phase is Phase.STEP
    with pytest.raises(ValueError, match="nonsense"), bench.dog.phase("nonsense"):
        pass


def test_a_phase_that_ends_by_an_exception_is_over():
    board = PhaseBoard()
    board.enter(Phase.STEP)
    with pytest.raises(KeyError), board.during(Phase.SAVE):
        raise KeyError
    assert board.phase is Phase.STEP


def test_evaluation_is_judged_batch_by_batch():
    bench = Bench()
    bench.steps(10, secs=0.25)
    with bench.dog.phase(Phase.EVALUATE):
        for _ in range(100):
            bench.wait(100.0)
            bench.board.beat()
    assert not bench.events
    assert bench.board.step == 9


def test_time_in_which_nobody_ran_counts_for_nothing():
    """Ctrl-Z, a suspended machine, a paused container."""
    bench = Bench()
    bench.steps(10, secs=0.25)
    bench.now += 3600.0
    bench.dog.tick()
    bench.wait(50.0)
    assert not bench.events
    # Nor has the run learnt that a step may take an hour.
    bench.dog.beat(11)
    bench.dog.tick()
    assert bench.learnt.longest_secs(Phase.STEP) < 61.0
    bench.wait(700.0)
    assert len(bench.events) == 1


def test_not_even_just_before_the_limit_does_a_stop_count():
    bench = Bench()
    bench.steps(20, secs=1.0)
    bench.wait(59.5)
    bench.now += 1000.0
    bench.dog.tick()
    assert not bench.events
    bench.wait(1.0)
    assert [event["kind"] for event in bench.events] == ["hang"]


def test_what_moves_is_told_a_few_times_a_second_and_changes_at_once():
    bench = Bench()
    with bench.dog:
        bench.told.clear()
        for step in range(1000):
            bench.dog.beat(step)
        bench.board.enter(Phase.DATA)
        bench.board.enter(Phase.STEP)
        assert len(bench.told) == 1  # The first step is over.
        bench.board.enter(Phase.SAVE)
        bench.board.enter(Phase.STEP)
        assert [phase for _, phase, _ in bench.told[1:]] == ["save", "step"]


def test_waiting_for_input_is_told_as_such_once_it_is_one():
    bench = Bench()
    bench.steps(5, secs=0.25)
    bench.board.enter(Phase.DATA)
    bench.wait(0.25)
    assert bench.told[-1][1] is Phase.STEP
    bench.wait(5.0)
    assert bench.told[-1][1] is Phase.DATA
    num = len(bench.told)
    bench.wait(20.0)
    assert len(bench.told) == num


def test_what_was_learnt_is_kept_now_and_then():
    bench = Bench()
    bench.steps(250, secs=0.5)
    assert len(bench.kept) == 2
    assert bench.kept[-1]["step"]["longest_secs"] == [0.5]


SCRIPT = """
import sys, threading, time
import jaxft
limits = jaxft.TimeLimits(
    min_secs=1.5, first_secs=20, margin_secs=4, save_secs=1, grace_secs=1, factor=2
)
def the_culprit():
    time.sleep(60)
with jaxft.Watchdog(sys.argv[1], limits=limits) as dog:
"""


def run(folder: pathlib.Path, script: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT + textwrap.indent(textwrap.dedent(script), "    ")
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_loop_of_anybodys_that_hangs_is_ended_with_its_stacks(tmp_path):
    done = run(
        tmp_path,
        """
        time.sleep(1)  # A slow first step.
        idle = threading.Thread(target=time.sleep, args=(60,), name="idle")
        idle.daemon = True
        idle.start()
        for step in range(10):
            dog.beat(step)
        the_culprit()
        """,
    )
    assert done.returncode == 71, done.stderr
    (file,) = tmp_path.glob("*-hang-*.txt")
    text = file.read_text()
    assert "Thread idle" in text
    main = text[text.index("Thread MainThread") :]
    assert "in the_culprit" in main
    assert "Thread idle" not in main  # Last, so that the end of the text has it.
    assert "jaxft: hang: " in done.stderr


def test_a_loop_that_moves_is_left_alone(tmp_path):
    done = run(
        tmp_path,
        """
        for step in range(20):
            time.sleep(0.1)
            dog.beat(step)
        """,
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr


def test_a_loop_that_is_only_watched_goes_on(tmp_path):
    events: list[str] = []
    limits = TimeLimits(
        min_secs=0.2, first_secs=5.0, margin_secs=4.0, save_secs=1.0, grace_secs=1.0
    )
    reported = threading.Event()

    def emit(kind: str, /, **fields: Any) -> None:
        events.append(kind)
        reported.set()

    with Watchdog(tmp_path, limits=limits, answer=Answer.REPORT, emit=emit) as dog:
        for step in range(5):
            dog.beat(step)
        assert reported.wait(30)
    assert events == ["hang"]


def test_a_process_that_is_stopped_and_goes_on_did_not_hang(tmp_path):
    code = SCRIPT + textwrap.indent(
        textwrap.dedent(
            """
            print("ready", flush=True)
            for step in range(40):
                time.sleep(0.05)
                dog.beat(step)
            """
        ),
        "    ",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(30) == 0
    process.stdout.close()
    assert not list(tmp_path.iterdir())


def test_a_person_in_a_debugger_is_no_hang(tmp_path):
    code = SCRIPT + textwrap.indent(
        textwrap.dedent(
            """
            for step in range(10):
                dog.beat(step)
            breakpoint()
            """
        ),
        "    ",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    time.sleep(3)
    assert process.poll() is None
    out, _ = process.communicate("c\n", timeout=30)
    assert (process.returncode, "(Pdb)" in out) == (0, True)


@pytest.mark.device
def test_compiling_again_in_the_middle_is_no_hang():
    """Whatever JAX calls the place: where XLA compiles, the limit is another one."""
    import jax
    import jax.numpy as jnp

    bench = Bench()
    bench.steps(10, secs=0.25)
    over = threading.Event()
    ident = threading.get_ident()

    def look() -> None:
        while not over.is_set():
            if stacks.is_compiling(stacks.frames_of(ident)):
                bench.wait(61.0)  # More than a step may take.
                return
            time.sleep(0.001)

    unique = time.time_ns() % 1e6  # No cache has it.

    def work(x):
        for i in range(20):
            x = jnp.sin(x) * (i + unique) + jnp.cumsum(x)
        return x

    lowered = jax.jit(work).lower(jnp.zeros(3))
    looker = threading.Thread(target=look)
    looker.start()
    lowered.compile()
    over.set()
    looker.join()
    # XLA took long enough to be met, and what met it knew it for what it is.
    assert Phase.COMPILE in [phase for _, phase, _ in bench.told]
    assert not stacks.is_compiling(stacks.frames_of(ident))
    bench.steps(2, secs=0.25)
    assert bench.board.instead is None
    assert bench.learnt.longest_secs(Phase.COMPILE) is not None
    assert bench.learnt.longest_secs(Phase.STEP) < 61.0


def test_a_short_text_has_the_newest_calls_of_the_thread_that_matters():
    def deep(left: int) -> str:
        if left:
            return deep(left - 1)
        return stacks.all_stacks(last=threading.get_ident())

    idle = threading.Event()
    threads = [threading.Thread(target=idle.wait, name=f"t{i}") for i in range(30)]
    threads.append(threading.Thread(target=idle.wait, name="jaxft-read-0"))
    for thread in threads:
        thread.start()
    try:
        text = deep(150)
    finally:
        idle.set()
    assert text.count("in deep") == 151
    short = stacks.excerpt(text)
    assert len(short.encode()) <= 4096
    assert "in all_stacks" in short.splitlines()[-2]
    assert short.count("in deep") >= 5
    assert "Thread jaxft-read-0" in short  # It may be what the loop waits for.
    assert stacks.excerpt("a\nb", max_bytes=3) == "a\nb"
