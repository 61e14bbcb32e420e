"""A run that is killed and stopped is accounted for to the last second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

# Whatever else the machine does.
PATIENT = {"timeout_secs": 200.0}


def report(run: Any, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "jaxft.cli", "report", str(run.workdir), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


def test_a_broken_run_is_accounted_for(
    command: Any, read_curves: Any, full: bool
) -> None:
    settings = {"log__tensorboard": "true", "log__event_secs": 0}
    run = command("run", train__num_steps=400, eval__every_steps=100, **settings)
    run.start()
    began = time.monotonic()
    run.wait_for(lambda: any(e["step"] >= 25 for e in run.events("step")), **PATIENT)
    run.wait_for(lambda: run.events("save_commit"), **PATIENT)
    # A look takes moments, in which it might come to its end.
    worker = run.wait_for(lambda: run.events("launch"))[0]["worker_pid"]
    os.kill(worker, signal.SIGSTOP)
    known = json.loads(report(run, "--json"))
    assert known["is_running"]
    assert known["step"] >= 25
    os.kill(worker, signal.SIGKILL)
    if full:
        # Not before it is as far again: else the stop would share the loss.
        run.wait_for(
            lambda: any(e["step"] >= 150 for e in run.events("step")), **PATIENT
        )
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(**PATIENT)[0] == 75
        run.start()
    code, out, err = run.finish(**PATIENT)
    assert code == 0, err
    (row,) = [line for line in out.splitlines() if line.startswith("goodput")]
    assert row.endswith(f"s; python -m jaxft.cli report {run.workdir}")
    took = time.monotonic() - began

    known = json.loads(report(run, "--json"))
    secs, wall = known["secs"], known["wall_secs"]
    assert sum(secs.values()) == pytest.approx(wall, abs=1e-5)
    assert min(secs.values()) >= 0
    assert secs["unknown"] < 0.01 * wall
    # All but the first supervisor's own beginning is in it.
    assert 0.5 * took < wall < took
    if not full:  # The same, as the supervisor has seen it happen.
        told = float(row.split()[1]) / 100
        assert known["goodput"] == pytest.approx(told, abs=0.005)
    steps = run.events("step")
    assert known["num_productive_steps"] == known["step"] == 400
    ran = sum(e["step"] - e["first_step"] + 1 for e in steps)
    assert known["num_repeated_steps"] == ran - 400
    for cause in ("init", "compile", "restore", "productive_step", "evaluation"):
        assert secs[cause] > 0, cause
    assert secs["checkpoint_blocking"] > 0
    assert full * 1e-3 <= known["off_secs"] < secs["down"]
    measured = sum(e["secs"] for e in steps)
    booked = ("productive_step", "repeated_step", "data_wait", "checkpoint_blocking")
    assert sum(secs[cause] for cause in booked) > 0.8 * measured

    killed, *others = known["incidents"]
    assert killed["kind"] == "killed"
    assert "SIGKILL" in killed["evidence"]
    restored = run.events("restore")[0]["step"]
    assert killed["num_lost_steps"] == killed["step"] - restored >= 0
    assert killed["lost_secs"] > 0
    told = [(one["kind"], one["evidence"]) for one in others]
    assert told == full * [("stopped", "stopped by SIGTERM")]
    assert all(one["is_over"] for one in known["incidents"])
    first, *later = known["recoveries"]
    assert not first["is_restart"]
    assert len(later) == 1 + full
    for one in later:
        assert one["is_restart"]
        parts = [v for name, v in one.items() if name.endswith("_secs")]
        assert min(parts) >= -1e-6
        assert one["restore_secs"] > 0
    text = report(run)
    assert "finished, step 400 of 400" in text
    assert "killed by SIGKILL" in text

    # Each step shows once, with the loss that the history has of it.
    curves = read_curves(run.workdir / "tensorboard")
    losses = run.losses()
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 401))
    assert curves["train/loss"] == [(s, np.float32(losses[s])) for s in range(1, 401)]
    assert [step for step, _ in curves["eval/loss"]] == [0, 100, 200, 300, 400]


# What each fault of the plan must be told as, in this order.
PLAN = {
    "nan_grad@25-27": "rollback",
    "kill@40": "killed",
    "raise@80": "exception",
    "hang@120": "hang",
    "kill_in_save@150": "killed",
    "hang_gil@180": "hang",
    "sigterm@220": "stopped",
    "oom@260": "out_of_memory",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_of_fault_has_its_own_cause(command: Any) -> None:
    limits = {"hang__min_secs": 8, "hang__margin_secs": 4, "preemption__grace_secs": 20}
    run = command(
        "run",
        train__num_steps=300,
        train__max_nonfinite=3,
        faults__inject="; ".join(PLAN),
        **limits,
    )
    codes = [run.run(timeout_secs=300)[0] for _ in range(3)]
    assert codes == [75, 77, 0]
    known = json.loads(report(run, "--json"))
    told = {one["injected"]: one["kind"] for one in known["incidents"]}
    assert told == PLAN
    assert all(one["is_over"] and one["evidence"] for one in known["incidents"])
    assert known["secs"]["hang"] >= 8.0 + 12.0
    assert known["secs"]["unknown"] < 0.01 * known["wall_secs"]
    assert known["num_productive_steps"] == 300
