"""The supervisor with toy workers: restarts, verdicts, what it is told."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxft.events import read_events
from jaxft.records import ExitCode, FaultKind
from jaxft.recovery.supervisor import MAX_REASON_CHARS
from jaxft.recovery.worker_process import MAX_LINE_BYTES

pytestmark = pytest.mark.usefixtures("nothing_leaks")


def test_finishes(make_run):
    run = make_run(
        """
        emit("preflight_done")
        for n in range(1, 4): step(n)
        emit("save_commit", step=3)
        finish(3)
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.FINISHED
    assert outcome.fault is None
    assert (outcome.step, outcome.committed_step, outcome.num_restarts) == (3, 3, 0)
    assert outcome.preflight_done
    kinds = [event["kind"] for event in read_events(run.events_folder)]
    assert kinds == ["launch", "worker_exit", "decision", "supervisor_end"]


def test_killed_workers_are_restarted(make_run):
    run = make_run(
        """
        emit("preflight_done")
        if attempt: emit("restore", step=10 * attempt, secs=0.0, num_bytes=0)
        time.sleep(0.1)
        for n in range(10 * attempt + 1, 10 * attempt + 12): step(n)
        emit("save_commit", step=10 * (attempt + 1))
        if attempt < 3: die()
        finish()
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == 0
    assert outcome.num_restarts == 3
    assert outcome.step == 41
    assert 0.3 < outcome.lost_secs < 3.0
    assert [launch.attempt for launch in run.launches] == [0, 1, 2, 3]
    exits = run.events("worker_exit")
    assert [e["status"] for e in exits] == [-9, -9, -9, 0]
    assert [e["step"] for e in exits] == [11, 21, 31, 41]
    decisions = run.events("decision")
    assert [d["action"] for d in decisions] == ["restart"] * 3 + ["finish"]
    assert {d["cause"] for d in decisions} == {"killed", "finished"}
    assert "killed by SIGKILL" in decisions[0]["reason"]
    assert "out of memory" in decisions[0]["reason"]
    assert [d["budget_left"] for d in decisions] == [5, 4, 3, 3]


def test_a_worker_is_told_what_was_committed_before_it(make_run):
    run = make_run(
        """
        if attempt == 2:
            finish()
        emit("save_commit", step=7 - attempt)
        die()
        """
    )
    assert run.run().exit_code == 0
    assert [launch.committed_step for launch in run.launches] == [-1, 7, 7]


def test_loss_of_time_spans_workers_that_die_before_a_step(make_run):
    run = make_run(
        """
        if attempt == 0: step(1); die()
        time.sleep(0.15)
        if attempt == 1: die()
        step(2)
        time.sleep(0.3)
        finish()
        """,
    )
    assert 0.3 < run.run().lost_secs < 2.0


def test_budget_ends_and_says_why(make_run):
    run = make_run('emit("preflight_done"); sys.exit(3)', max_restarts=4)
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 2
    assert outcome.fault.kind is FaultKind.KILLED
    assert "no restart left" in outcome.reason
    assert "left with status 3 in phase start" in outcome.reason
    assert [launch.cache for launch in run.launches] == ["keep", "keep", "off"]


def test_always_failing_at_the_same_place_stops(make_run):
    """A program that fails three steps after the start, each time killed."""
    run = make_run(
        """
        for n in range(1, 4): step(n)
        os.abort()
        """,
        max_restarts=5,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 3  # One with progress, two that count double.
    assert "SIGABRT" in outcome.reason


def test_backoff_waits_only_without_progress(make_run):
    run = make_run(
        """
        if attempt == 0: step(1)
        if attempt == 4: step(2); finish()
        die()
        """,
        max_restarts=20,
        backoff_secs=0.15,
        backoff_max_secs=10.0,
    )
    run.run()
    delays = [d["delay_secs"] for d in run.events("decision")]
    assert delays == [0.0, 0.0, 0.15, 0.3, 0.0]
    launches = [e["time"] for e in run.events("launch")]
    exits = [e["time"] for e in run.events("worker_exit")]
    waited = [b - a for a, b in zip(exits, launches[1:], strict=False)]
    assert waited[2] >= 0.15
    assert waited[3] >= 0.3
    assert waited[0] < 0.15


def test_backoff_by_the_clock_that_is_given(make_run):
    ticks = itertools.count(0, 200.0)
    run = make_run(
        "finish() if attempt == 3 else die()",
        max_restarts=20,
        backoff_secs=1000.0,
        backoff_max_secs=1000.0,
        clock=lambda: next(ticks),
    )
    begun = time.monotonic()
    assert run.run().exit_code == 0
    assert [d["delay_secs"] for d in run.events("decision")] == [0, 1000, 1000, 0]
    assert time.monotonic() - begun < 20


def test_exception_twice_at_the_same_step_stops(make_run):
    run = make_run(
        """
        emit("preflight_done")
        step(7)
        fault("exception", 70, step=7, evidence="Traceback\\nValueError: no")
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert outcome.num_restarts == 1
    assert outcome.reason == "the same error again at step 7: ValueError: no"
    assert outcome.fault.kind is FaultKind.EXCEPTION
    assert outcome.fault.evidence == "Traceback\nValueError: no"


def test_exception_once_is_forgiven(make_run):
    run = make_run(
        """
        step(7 + attempt)
        if attempt == 0: fault("exception", 70, step=7, evidence="ValueError: no")
        finish()
        """,
    )
    assert run.run().exit_code == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("config", 78),
        ("stopped", 75),
        ("no_checkpoint", 66),
        ("nonfinite", 65),
        ("out_of_memory", 77),
    ],
)
def test_faults_that_end_the_run(make_run, kind, code):
    run = make_run(
        f"""
        emit("preflight_done")
        fault({kind!r}, {code}, step=5, evidence="one line")
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == code
    assert outcome.num_restarts == 0
    assert outcome.fault.kind == kind
    assert outcome.reason == "one line"


@pytest.mark.parametrize("status", [0, 3, 70, 75, 78])
def test_a_status_without_a_word_says_nothing(make_run, status):
    """Code of the user's own can leave with any: only events tell of the worker."""
    run = make_run(f"finish() if attempt else os._exit({status})")
    outcome = run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (0, 1)
    (first, _) = run.events("decision")
    assert (first["action"], first["cause"]) == ("restart", "killed")
    assert f"left with status {status} " in first["reason"]
    assert "without a word" in first["reason"]


def test_a_stop_without_a_request_is_no_stop(make_run):
    """The event and the status only together."""
    run = make_run(
        """
        if attempt: finish()
        emit("end", step=3, reason="stopped")
        sys.exit(1)
        """,
    )
    assert run.run().num_restarts == 1
    run = make_run('emit("end", step=3, reason="stopped"); sys.exit(75)', name="both")
    assert run.run().exit_code == ExitCode.STOPPED


def test_refused_before_the_preflight_writes_nothing(make_run, tmp_path):
    run = make_run('fault("config", 78, evidence="config.x: no")')
    outcome = run.run()
    assert (outcome.exit_code, outcome.reason) == (78, "config.x: no")
    assert not outcome.preflight_done
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_after_restarts_keeps_the_history(make_run):
    run = make_run('fault("config", 78, evidence="no") if attempt else die()')
    outcome = run.run()
    assert outcome.exit_code == 78
    assert outcome.preflight_done
    assert len(run.events("decision")) == 2


def test_the_fault_event_wins_over_the_status(make_run):
    run = make_run('emit("fault", fault="nonfinite", step=3, evidence="x"); die()')
    assert run.run().exit_code == ExitCode.NONFINITE


def test_a_failed_save_is_tried_again(make_run):
    script = """
        emit("preflight_done")
        emit("save_commit", step=5)
        if attempt < FAILS: step(6); fault("save_failed", 74, step=6, evidence="EIO")
        finish(9)
        """
    once = make_run(script.replace("FAILS", "1"), name="once")
    assert once.run().exit_code == ExitCode.FINISHED
    always = make_run(script.replace("FAILS", "9"), name="always")
    outcome = always.run()
    assert outcome.exit_code == ExitCode.SAVE_FAILED
    assert outcome.num_restarts == 1
    assert outcome.verdict == "saving failed again"


def test_each_restart_is_told_in_a_line(make_run):
    run = make_run(
        """
        emit("preflight_done")
        if attempt == 0: die()
        step(7 + attempt)
        emit("save_commit", step=7)
        if attempt == 1: fault("exception", 70, step=8, evidence="x" * 3000)
        if attempt == 2: die()
        finish(9)
        """,
    )
    assert run.run().exit_code == 0
    first, second, third = run.told
    assert first.startswith("worker died before its first step: killed by SIGKILL in ")
    assert first.endswith("restarting from the beginning (restart 1, 4 left)")
    assert second.startswith("worker died at step 8: xxx")
    assert "x" * 3000 in second  # A path cut in the middle would help nobody.
    assert second.endswith("restarting from the newest checkpoint (restart 2, 3 left)")
    assert third.startswith("worker died at step 9: killed by SIGKILL in phase start (")


def test_each_event_is_heard(make_run):
    run = make_run("step(1 + attempt); die() if attempt == 0 else finish(5)")
    run.run()
    assert [(e["kind"], e["step"]) for e in run.heard] == [
        ("step", 1),
        ("step", 2),
        ("end", 5),
    ]


def test_reasons_are_whole_for_people_and_short_in_the_history(make_run):
    evidence = "config.model.width: " + "much too wide " * 100 + "end"
    run = make_run(f'fault("config", 78, evidence={evidence!r})')
    outcome = run.run()
    assert outcome.reason == outcome.fault.evidence == evidence
    run = make_run(f'fault("nonfinite", 65, evidence={evidence!r})', name="events")
    run.run()
    for event in run.events("decision", "supervisor_end"):
        assert len(event["reason"]) == MAX_REASON_CHARS


def test_an_unknown_fault_is_a_crash(make_run):
    run = make_run(
        'emit("fault", fault="gremlins", step="?"); sys.exit(77)', max_restarts=0
    )
    assert run.run().exit_code == ExitCode.CRASHED


def test_a_crash_after_the_end_is_finished(make_run):
    run = make_run('emit("end", step=9, reason="finished"); os.abort()')
    assert run.run().exit_code == 0


def test_a_worker_that_cannot_be_started(make_run, tmp_path):
    run = make_run("", max_restarts=2)
    run._make_argv = None
    run.supervisor._make_argv = lambda launch: [str(tmp_path / "no-python")]
    outcome = run.run()
    assert outcome.exit_code == ExitCode.CRASHED
    assert "could not be started" in outcome.reason


def test_pipe_closed_early(make_run):
    run = make_run(
        """
        step(1)
        os.close(event_fd)
        time.sleep(0.3)
        sys.exit(77)
        """,
        max_restarts=0,
    )
    cpu = time.process_time()
    assert run.run().exit_code == ExitCode.CRASHED
    assert time.process_time() - cpu < 0.25  # It does not spin on the closed pipe.


def test_huge_torn_and_foreign_lines(make_run):
    run = make_run(
        """
        def write(data):
            while data:
                data = data[os.write(event_fd, data):]
        write(b"\\xff\\xfe not json\\n[1, 2]\\n\\n{}\\n")
        emit("step", step=5, first_step=5, metrics="x" * (5 << 20))
        emit("step", step="six")
        emit("no such kind")
        emit("save_commit", step=5)
        if attempt: finish()
        write(b'{"kind": "end", "time": 1, "reason": "finished"')
        sys.exit(0)
        """,
    )
    outcome = run.run()
    assert outcome.exit_code == 0
    assert outcome.num_restarts == 1
    assert (outcome.step, outcome.committed_step) == (5, 5)


def test_a_line_without_end_is_dropped(make_run):
    run = make_run(
        f"""
        piece = b"x" * (1 << 20)
        for _ in range({MAX_LINE_BYTES} // len(piece) + 2):
            rest = piece
            while rest: rest = rest[os.write(event_fd, rest):]
        os.write(event_fd, b"\\n")
        step(4)
        finish()
        """,
    )
    assert run.run().step == 4


def test_children_of_a_dead_worker_are_killed(make_run, tmp_path, wait_until_dead):
    """They hold the pipe's end, and the worker's death is seen all the same."""
    run = make_run(
        f"""
        if attempt: finish()
        for _ in range(3):
            if os.fork() == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
                time.sleep(60)
                os._exit(0)
            with open({str(tmp_path / "pids")!r}, "a") as file:
                print(os.getpid(), file=file)
        children = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read()
        with open({str(tmp_path / "pids")!r}, "w") as file:
            file.write(children)
        die()
        """,
    )
    begun = time.monotonic()
    assert run.run().exit_code == 0
    assert time.monotonic() - begun < 3
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 3
    for pid in pids:
        wait_until_dead(int(pid))


def test_the_environment_is_passed_on(make_run):
    env = os.environ | {"JAXFT_TEST": "yes"}
    run = make_run('assert os.environ["JAXFT_TEST"] == "yes"; finish()', env=env)
    assert run.run().exit_code == 0


def test_runs_in_another_thread(make_run):
    run = make_run("finish() if attempt else die()")
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(run.run()))
    thread.start()
    thread.join()
    assert outcomes[0].num_restarts == 1


def test_starts_without_jax_and_fast():
    script = """
import sys, time
begun = time.process_time()
import jaxft.recovery.supervisor, jaxft.recovery.workdir, jaxft.recovery.worker_link
banned = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore"}
print(time.process_time() - begun, *(banned & set(sys.modules)))
"""
    tries = [
        subprocess.check_output([sys.executable, "-c", script], text=True).split()
        for _ in range(3)
    ]
    assert all(len(words) == 1 for words in tries), tries
    assert min(float(words[0]) for words in tries) < 0.3
