"""A plan of faults in the real command: each fires, and the numbers stay the same."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

NUM_STEPS = 80


def fired(run: Any) -> list[str]:
    """The kinds that happened, once each; each has its marker."""
    told = [(e["number"], e["fault"]) for e in run.events("injected")]
    markers = {int(path.stem) for path in (run.workdir / "faults").glob("*.json")}
    assert {number for number, _ in told} == markers
    return [fault for _, fault in sorted(told)]


@pytest.fixture
def reference(command: Any) -> Any:
    run = command("reference", train__num_steps=NUM_STEPS)
    code, _, err = run.run()
    assert code == 0, err
    return run


def test_the_same_numbers_in_the_end(
    command: Any, same: Any, reference: Any, full: bool
) -> None:
    kinds = ["kill_in_save", "corrupt_newest"]
    plan = "kill_in_save@40; corrupt_newest@65"
    if full:
        kinds, plan = ["kill", "raise", *kinds], f"kill@15; raise@33; {plan}"
    run = command("run", train__num_steps=NUM_STEPS, faults__inject=plan)
    code, out, err = run.run(timeout_secs=200)
    assert code == 0, (out, err)
    assert fired(run) == kinds
    statuses = [e["status"] for e in run.events("worker_exit")]
    kill = -signal.SIGKILL
    assert statuses == ([kill, 70] if full else []) + [kill, kill, 0]
    (killed,) = [e for e in run.events("injected") if e["fault"] == "kill_in_save"]
    steps = [
        {e["step"] for e in run.events(kind) if e["pid"] == killed["pid"]}
        for kind in ("save_start", "save_commit")
    ]
    assert len(steps[0] - steps[1]) == 1
    (damaged,) = run.events("quarantine")
    assert damaged["path"].endswith(f"/{damaged['step']}.quarantined-1")
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_asked_to_stop_and_out_of_memory(
    command: Any, same: Any, reference: Any
) -> None:
    plan = "sigterm@12 grace=60; oom@37"
    run = command("run", train__num_steps=NUM_STEPS, faults__inject=plan)
    codes = []
    for _ in range(3):
        code, out, err = run.run(timeout_secs=200)
        codes.append(code)
    assert codes == [75, 77, 0], (out, err)
    assert fired(run) == ["sigterm", "oom"]
    assert run.events("stop_request")[0]["reason"] == "SIGTERM"
    (fault,) = run.events("fault")
    assert "RESOURCE_EXHAUSTED" in fault["evidence"]
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_raised_twice_it_is_the_same_error_again(command: Any) -> None:
    run = command("run", train__num_steps=50, faults__inject="raise@20 times=2")
    code, out, err = run.run()
    assert code == 70, (out, err)
    assert "InjectedError: faults.inject: raise@20 times=2" in err
    assert "the same error again" in out
    # By hand once more: it has happened twice, and does not a third time.
    assert run.run()[0] == 0


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_save(
    command: Any, same: Any, reference: Any, mount_disk: Any, tmp_path: pathlib.Path
) -> None:
    mount_disk(tmp_path / "run", "32m")
    run = command("run", train__num_steps=NUM_STEPS, faults__inject="enospc@25")
    code, out, err = run.run(timeout_secs=200)
    assert code == 0, (out, err)
    assert fired(run) == ["enospc"]
    assert 74 in [e["status"] for e in run.events("worker_exit")]
    assert not (run.workdir / "faults" / "filler").exists()
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_a_flipped_bit_is_silent(command: Any, reference: Any) -> None:
    """Nothing sees it yet; that is what this kind is for."""
    run = command("run", train__num_steps=NUM_STEPS, faults__inject="bitflip@30")
    code, _, err = run.run()
    assert code == 0, err
    assert fired(run) == ["bitflip"]
    ours, theirs = run.losses(), reference.losses()
    same_until = {s: ours[s] for s in ours if s <= 30}
    assert same_until == {s: theirs[s] for s in same_until}
    assert run.state(NUM_STEPS) != reference.state(NUM_STEPS)


def test_a_wrong_plan_is_one_line(command: Any) -> None:
    run = command("run", faults__inject="kill@5; explode@6")
    code, out, err = run.run()
    assert code == 78, (out, err)
    assert err.startswith("jaxft: config.faults.inject: 'explode@6': there is no")
    assert os.listdir(run.workdir) == ["compile_cache"]  # which the test has put there


@pytest.mark.slow
def test_hangs_end(command: Any, same: Any, reference: Any) -> None:
    plan = "hang@20; hang_gil@50"
    limits = {"hang__min_secs": 4, "hang__margin_secs": 3}
    run = command("run", train__num_steps=NUM_STEPS, faults__inject=plan, **limits)
    code, out, err = run.run(timeout_secs=300)
    assert code == 0, (out, err)
    assert fired(run) == ["hang", "hang_gil"]
    causes = [e["cause"] for e in run.events("decision")]
    # A machine with much else to do may see one more.
    assert causes.count("hang") >= 2
    stacks = " ".join(e["stacks"] for e in run.events("hang"))
    assert "in hang" in stacks
    assert "in hang_with_interpreter_lock" in stacks
    same(run, reference, NUM_STEPS)


@pytest.mark.slow
def test_killed_between_the_decision_and_the_restore(command: Any) -> None:
    """The next start does what is left of a rollback."""
    bad = {
        "train__num_steps": NUM_STEPS,
        "train__max_nonfinite": 3,
        "rollback__skip_after": 4,
        "faults__inject": "nan_grad@40-42",
    }
    straight = command("straight", data__skip="39-44", **bad)
    code, _, err = straight.run()
    assert code == 0, err
    run = command("run", **bad)
    run.start()
    decision = run.workdir / "checkpoints" / "decisions" / "1.json"
    run.wait_for(decision.exists)
    os.kill(run.events("launch")[0]["worker_pid"], signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0, (out, err)
    assert run.events("worker_exit")[0]["status"] == -signal.SIGKILL
    assert len(list(decision.parent.glob("*.json"))) == 1
    assert run.state(NUM_STEPS) == straight.state(NUM_STEPS)
