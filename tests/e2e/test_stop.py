"""A request to stop in any phase: a committed step or a clean leave, then the same."""

import os
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
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


def test_stop_before_the_first_step_leaves_at_once(command: Any, full: bool) -> None:
    for index, delay_secs in enumerate([0.1, 0.8, 1.6, 2.4] if full else [0.3, 1.8]):
        run = command(f"early{index}")
        process = run.start()
        run.wait_for((run.workdir / "lock").exists)
        time.sleep(delay_secs)
        os.kill(process.pid, signal.SIGTERM)
        started = time.monotonic()
        code, out, err = run.finish()
        assert code == 75, (delay_secs, out, err)
        assert time.monotonic() - started < 10
        assert "Traceback" not in out + err


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


def test_time_limit(command: Any) -> None:
    run = command("limit", train__num_steps=100_000, preemption__time_limit_secs=15)
    code, out, err = run.run()
    assert code == 75, err
    assert "time limit" in out
    assert max(run.losses()) == run.events("save_commit")[-1]["step"]
