"""A request to stop in any phase: a committed step or a clean leave, then the same."""

import fcntl
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def slow(value: str) -> Any:
    """A case that the sample leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)


REPO = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGINT"), slow("SIGUSR1")])
def test_stop_while_training_saves_and_resumes(
    command: Any, same: Any, name: str
) -> None:
    reference = command("reference", train__num_steps=300)
    assert reference.run()[0] == 0
    run = command("stopped", train__num_steps=300, checkpoint__save="steps(1000)")
    process = run.start()
    run.wait_for(lambda: len(run.events("step")) > 20)
    os.kill(process.pid, getattr(signal, name))
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert "the same command goes on from here" in out
    assert "Traceback" not in out + err
    (stop,) = run.events("stop_request")
    assert stop["reason"] == name
    (end,) = run.events("end")
    (commit,) = run.events("save_commit")
    # The save is of the very border where all processes agreed.
    assert end["step"] == commit["step"] == max(run.losses())
    code, out, err = run.run()
    assert code == 0, err
    assert f"resuming at step {end['step']} from" in err
    same(run, reference, 300)


POOLED = """
import multiprocessing
from concurrent import futures
import numpy as np
from jaxft.data.sources import Sources

def read(index):
    row = np.full(33, index, np.int32)
    return {"inputs": row[:-1], "targets": row[1:]}

class Rows:
    fingerprint = "pooled"

    def __init__(self):
        fork = multiprocessing.get_context("fork")
        self._pool = futures.ProcessPoolExecutor(4, mp_context=fork)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self._pool.submit(read, index).result()

def make_data(config):
    return Sources(Rows())
"""


def _pids_in_group(number: int) -> list[int]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) == number:
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.slow
def test_a_signal_to_every_process_is_one_save_and_the_newest_goes_on(
    command: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As schedulers send it: to those that read for the worker, too."""
    (tmp_path / "pooled.py").write_text(POOLED)
    monkeypatch.chdir(tmp_path)
    run = command(
        "run",
        data__factory="pooled:make_data",
        train__num_steps=100_000,
        checkpoint__save="steps(30)",
    )
    newest = 0
    for _ in range(2):
        process = run.start()
        run.wait_for(lambda after=newest: len(_commits(run, after=after)) >= 2)
        worker = run.events("launch")[-1]["worker_pid"]
        assert len(_pids_in_group(worker)) == 1 + 4
        for group in (worker, process.pid):
            os.killpg(group, signal.SIGTERM)
        code, out, err = run.finish()
        assert code == 75, (out, err)
        assert "Traceback" not in out + err
        assert not _pids_in_group(worker)
        if newest:
            assert f"resuming at step {newest} from" in err
        last = run.events("end")[-1]["step"]
        # Besides those that were due anyway.
        commits = _commits(run, after=newest)
        assert [step for step in commits if step % 30] == [last] * (last % 30 > 0)
        assert commits[-1] == last
        newest = last


def _commits(run: Any, *, after: int) -> list[int]:
    steps = [event["step"] for event in run.events("save_commit")]
    return [step for step in steps if step > after]


def test_stop_before_the_first_step_leaves_at_once(command: Any, full: bool) -> None:
    for index, delay_secs in enumerate([0.1, 0.8, 1.6, 2.4] if full else [0.3, 1.8]):
        run = command(f"early{index}", cold=True)
        process = run.start()
        run.wait_for((run.workdir / "lock").exists)
        time.sleep(delay_secs)
        os.kill(process.pid, signal.SIGTERM)
        started = time.monotonic()
        code, out, err = run.finish()
        assert code == 75, (delay_secs, out, err)
        assert time.monotonic() - started < 10
        assert "Traceback" not in out + err
        assert "stopped by SIGTERM" in out + err


@pytest.mark.parametrize("role", ["supervise", "work"])
def test_ctrl_c_during_the_start_is_a_stop_in_words(
    command: Any, full: bool, role: str
) -> None:
    delays = [0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 3.0] if full else [0.0, 0.5, 2.0]
    for index, delay_secs in enumerate(delays):
        run = command(f"early{index}", cold=True)
        process = run.start(f"--role={role}")
        run.wait_for((run.workdir / "lock").exists)
        time.sleep(delay_secs)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, out, err = run.finish()
        assert code == 75, (delay_secs, out, err)
        assert time.monotonic() - started < 5
        assert "Traceback" not in out + err
        assert "stopped by SIGINT" in out + err, (delay_secs, out, err)
        if run.workdir.exists() and any(run.workdir.glob("events/*")):
            assert "the same command goes on from here (exit 75)" in out
        else:
            assert not run.workdir.exists(), delay_secs


@pytest.mark.parametrize("role", ["supervise", slow("work")])
@pytest.mark.parametrize("phase", ["imports", "config"])
@pytest.mark.parametrize("name", ["SIGINT", slow("SIGTERM"), slow("SIGHUP")])
def test_a_stop_before_the_start(
    tmp_path: pathlib.Path, monkeypatch: Any, role: str, phase: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    wait = "import time\nprint('ready', flush=True)\ntime.sleep(30)\n"
    # With -m the current folder comes first: jaxft/command.py imports this one.
    (tmp_path / "difflib.py").write_text(wait if phase == "imports" else "")
    (tmp_path / "run.py").write_text(wait)
    words = ["--config=run.py", "--workdir=run", f"--role={role}"]
    with subprocess.Popen(
        [sys.executable, "-m", "jaxft.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[name])
        _, err = process.communicate(timeout=10)
    assert process.returncode == 75
    assert err.startswith(f"jaxft: stopped by {name}")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_while_it_waits_for_the_lock(command: Any, name: str) -> None:
    run = command("waiting", cold=True)
    run.workdir.mkdir()
    with (run.workdir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A dead owner: it waits for what that left running.
        owner = {"pid": 2**22 + 1, "host": socket.gethostname(), "since": "then"}
        lock.write(json.dumps(owner))
        lock.flush()
        process = run.start()
        time.sleep(1.5)
        assert process.poll() is None
        started = time.monotonic()
        process.send_signal(signal.Signals[name])
        code, out, err = run.finish()
    assert (code, out, err) == (75, "", f"jaxft: stopped by {name}\n")
    assert time.monotonic() - started < 2
    assert [path.name for path in run.workdir.iterdir()] == ["lock"]


@pytest.mark.slow
def test_the_summary_changes_no_exit_code(command: Any) -> None:
    """Not by foreign lines in the history, nor by a reader that is gone."""
    run = command("run", train__num_steps=10)
    (run.workdir / "events").mkdir(parents=True)
    (run.workdir / "events" / "a.jsonl").write_text(
        '{"kind":"step","time":9e12}\n{"kind":"step","time":"x"}\n[]\n{"kind":'
    )
    code, out, err = run.run()
    assert code == 0, err
    assert "10 of 10" in out
    with run.start() as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 0


def test_a_history_that_cannot_be_written_is_said(command: Any) -> None:
    run = command("run", train__num_steps=10)
    run.workdir.mkdir()
    (run.workdir / "events").write_text("not a folder")
    code, out, err = run.run()
    assert code == 0, err
    # By the worker and by its supervisor: each has a file of its own.
    assert err.count("history incomplete: ") == 1
    assert "incomplete: 5 events lost from" in out
    assert "10 of 10" in out


def test_stop_while_compiling_does_not_wait_for_the_compiler(command: Any) -> None:
    run = command(
        "compiling",
        model__num_layers=24,
        model__scan_layers=False,
        model__width=64,
        data__seq_len=128,
    )
    process = run.start()
    compiling = ("init", "compile")
    run.wait_for(lambda: [e for e in run.events("phase") if e["name"] in compiling])
    time.sleep(0.5)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert time.monotonic() - started < 3
    assert not run.events("step"), "the compiler was faster than the test"


SLOW_DATA = """
import time
import numpy as np
from jaxft.data.sources import Sources

class Rows:
    fingerprint = "slow"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == SLOW and not FAST:
            time.sleep(100)
        row = np.full(33, index, np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    return Sources(Rows())
"""


@pytest.mark.slow
def test_stop_while_waiting_for_input(
    command: Any, same: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    settings = {
        "data__factory": "slow_data:make_data",
        "data__shuffle": "false",
        "eval__every_steps": 0,
        "train__num_steps": 12,
        "checkpoint__save": "steps(1000)",
    }
    monkeypatch.chdir(tmp_path)
    # Row 41 is in the batch of step 6.
    text = SLOW_DATA.replace("SLOW", "41")
    (tmp_path / "slow_data.py").write_text(text.replace("FAST", "False"))
    run = command("run", **settings)
    process = run.start()
    run.wait_for(lambda: [e for e in run.events("step") if e["step"] == 4])
    time.sleep(0.5)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert time.monotonic() - started < 10
    assert run.events("end")[-1]["step"] == 5
    assert run.events("save_commit")[-1]["step"] == 5
    (tmp_path / "slow_data.py").write_text(text.replace("FAST", "True"))
    assert run.run()[0] == 0
    reference = command("reference", **settings)
    assert reference.run()[0] == 0
    same(run, reference, 12)


def test_a_second_signal_means_now(command: Any) -> None:
    run = command("now", train__num_steps=100_000, checkpoint__save="steps(100000)")
    process = run.start()
    run.wait_for(lambda: run.events("step"))
    pid = run.events("launch")[0]["worker_pid"]
    # The worker cannot answer: it is stopped, as a hung one would be.
    os.kill(pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(3.3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    started = time.monotonic()
    code, out, _ = run.finish()
    assert code == 75
    assert time.monotonic() - started < 5
    assert "left before any step was committed" in out


def test_the_grace_time_is_kept(command: Any) -> None:
    run = command("grace", train__num_steps=100_000, preemption__grace_secs=2)
    process = run.start()
    run.wait_for(lambda: run.events("save_commit"))
    os.kill(run.events("launch")[0]["worker_pid"], signal.SIGSTOP)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, out, _ = run.finish()
    assert code == 75
    assert 1.5 < time.monotonic() - started < 6
    assert "left on the last committed step" in out


@pytest.mark.slow  # The sample has it in tests/faults.
def test_time_limit(command: Any) -> None:
    run = command("limit", train__num_steps=100_000, preemption__time_limit_secs=30)
    code, out, err = run.run()
    assert code == 75, err
    assert "time limit" in out
    assert max(run.losses()) == run.events("save_commit")[-1]["step"]
