"""Whatever hangs, and however: named, ended, and the run ends with the same bits."""

import json
import os
import pathlib
import re
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

# Hangs are seen soon; before anything is known a busy machine is given time.
SOON = {
    "hang__min_secs": 2,
    "hang__margin_secs": 4,
    "hang__first_secs": 120,
    "checkpoint__timeout_secs": 60,
}
NUM_STEPS = 60

# The same rows for every run; at one of them one reader hangs, once.
ROWS = """
import os, time
import numpy as np
from jaxft.data.sources import Sources

def the_culprit(once):
    if once and not os.path.exists(once):
        open(once, "w").close()
        time.sleep(600)

class Rows:
    fingerprint = "rows"

    def __len__(self):
        return 512

    def __getitem__(self, index):
        if index == 300:
            the_culprit(os.environ.get("ONCE"))
        row = np.full(33, index % 250, np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    return Sources(Rows())
"""


def hangs(run: Any) -> list[dict[str, Any]]:
    """Its events, after what must hold for every one of them.

    The first is the one that was meant: to limits as short as these a machine that is
    very busy may hang by itself.
    """
    found = run.events("hang")
    for event in found:
        assert event["silent_secs"] >= event["limit_secs"] > 0
        assert len(event["stacks"].encode()) <= 4096
        assert pathlib.Path(event["file"]).parent == run.workdir / "events"
        # The event holds the end of what is in the file, or its main thread.
        text = pathlib.Path(event["file"]).read_text()
        assert event["stacks"].splitlines()[-1] in text
    return found


@pytest.fixture
def reference(command: Any) -> Any:
    run = command("reference", train__num_steps=NUM_STEPS)
    assert run.run()[0] == 0
    assert not run.events("hang")
    return run


@pytest.mark.parametrize(
    ("fault", "culprit", "seen_by"),
    [
        pytest.param("hang@33", "in hang", "watchdog", marks=pytest.mark.slow),
        ("hang_gil@33", "in hang_with_interpreter_lock", "supervisor"),
    ],
)
def test_a_step_that_hangs(
    command: Any, same: Any, reference: Any, fault: str, culprit: str, seen_by: str
) -> None:
    run = command("run", train__num_steps=NUM_STEPS, faults__inject=fault, **SOON)
    code, _, err = run.run()
    assert code == 0, err
    assert [e["fault"] for e in run.events("injected")] == [fault.partition("@")[0]]
    hang = hangs(run)[0]
    assert (hang["phase"], hang["seen_by"]) == ("step", seen_by)
    # The supervisor knows what it was told last, a few times a second.
    assert hang["step"] in ((32, 33) if seen_by == "watchdog" else range(20, 34))
    assert culprit in hang["stacks"]
    decision = next(e for e in run.events("decision") if e["action"] == "restart")
    assert decision["cause"] == "hang"
    assert "no progress for" in err
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_a_worker_that_somebody_stopped(
    command: Any, same: Any, reference: Any
) -> None:
    run = command("run", train__num_steps=NUM_STEPS, log__event_secs=0, **SOON)
    run.start()
    run.wait_for(lambda: len(run.events("step")) > 10)
    os.kill(run.events("launch")[-1]["worker_pid"], signal.SIGSTOP)
    code, _, err = run.finish()
    assert code == 0, err
    hang = hangs(run)[0]
    assert hang["seen_by"] == "supervisor"
    assert "stopped by a signal" in err
    assert "in run" in hang["stacks"]
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_a_command_that_is_frozen_and_goes_on_did_not_hang(
    command: Any, same: Any, reference: Any
) -> None:
    """Ctrl-Z, a paused container: whoever judges was stopped as well."""
    patient = SOON | {"hang__min_secs": 5}
    run = command("run", train__num_steps=NUM_STEPS, **patient)
    supervisor = run.start()
    run.wait_for(lambda: len(run.events("step")) > 10)
    pids = [supervisor.pid, run.events("launch")[-1]["worker_pid"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(14)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    code, _, err = run.finish()
    assert code == 0, err
    assert not run.events("hang")
    assert len(run.events("launch")) == 1
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_input_that_hangs(
    command: Any, same: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    settings = {
        "train__num_steps": NUM_STEPS,
        "data__factory": "rows:make_data",
        "data__shuffle": "false",
    }
    plain = command("reference", **settings)
    assert plain.run()[0] == 0
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    run = command("run", **settings, **SOON)
    code, _, err = run.run()
    assert code == 0, err
    assert (tmp_path / "once").exists()
    hang = hangs(run)[0]
    assert (hang["phase"], hang["seen_by"]) == ("data", "watchdog")
    assert "in the_culprit" in hang["stacks"]
    assert "in phase data" in err
    same(run, plain, NUM_STEPS)
    assert json.loads((run.workdir / "supervisor.json").read_text())["longest"]


@pytest.mark.slow
def test_hangs_without_end_end_the_run_with_their_code(command: Any) -> None:
    run = command(
        "run",
        train__num_steps=NUM_STEPS,
        faults__inject="hang@12 times=9",
        supervisor__max_restarts=2,
        **SOON,
    )
    code, out, err = run.run(timeout_secs=300)
    assert code == 71, err
    assert "hung at step" in out
    assert "no restart left" in out
    assert "in hang" in err  # The stacks are told at the end.
    limits = [(event["phase"], event["limit_secs"]) for event in hangs(run)]
    # The first steps of a worker have more time than later ones, and as each alarm may
    # have been wrong, the next worker has twice as much.
    assert limits == [("step", 2.0), ("first_step", 10.0), ("first_step", 20.0)]
    reason = run.events("supervisor_end")[0]["reason"]
    assert re.search(r"the cause 2 times: no progress for 20\.\d s", reason)


@pytest.mark.slow
def test_a_worker_alone_ends_itself(command: Any) -> None:
    run = command("run", train__num_steps=NUM_STEPS, faults__inject="hang@33", **SOON)
    code, out, err = run.run("--role=work")
    assert code == 71, err
    assert "hung at step" in out
    hang = hangs(run)[0]
    assert "in hang" in hang["stacks"]
    fault = run.events("fault")[0]
    assert (fault["fault"], fault["exit_code"]) == ("hang", 71)
    # The same command goes on.
    code, _, err = run.run("--role=work")
    assert code == 0, err


@pytest.mark.slow
def test_who_wants_no_watchdog_gets_none(command: Any) -> None:
    run = command("run", train__num_steps=5, hang__enabled="false", **SOON)
    assert run.run()[0] == 0
    assert not (run.workdir / "supervisor.json").exists()


def test_limits_that_cannot_work_are_refused(command: Any) -> None:
    run = command("run", hang__first_secs=60, hang__min_secs=1)
    code, _, err = run.run()
    assert code == 78
    assert "config.hang.first_secs: must exceed checkpoint.timeout_secs 600" in err
    assert not (run.workdir / "events").exists()
