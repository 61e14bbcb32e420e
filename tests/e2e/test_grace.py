"""A stop with less time than a save takes: the last committed step, and no half one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GRACE_SECS = 2.0
# Of a save of 4 s or more: all of them are written at a small rate.
SLOW = {
    "faults__inject": "slow_disk@0-100000:250kBps",
    "preemption__grace_secs": GRACE_SECS,
}


def stop(run: Any) -> float:
    """Ends the started command; how long it took to leave."""
    asked = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    secs = time.monotonic() - asked
    assert code == 75, (out, err)
    assert "Traceback" not in out + err
    run.said = err
    # A second more for whoever reaps and tells; the whole grace time may be used.
    assert secs < GRACE_SECS + 2.0
    return secs


def committed(run: Any) -> list[int]:
    return [event["step"] for event in run.events("save_commit")]


def go_on(run: Any, undisturbed: Any, same: Any) -> None:
    """To the end without the slow disk; nothing half is left."""
    num_steps = run.events("end")[-1]["step"] + 20
    del run.settings["faults.inject"]
    run.settings["train.num_steps"] = num_steps
    assert run.run()[0] == 0
    same(run, undisturbed(train__num_steps=num_steps), num_steps)
    names = [path.name for path in (run.workdir / "checkpoints").iterdir()]
    assert all(name.isdigit() for name in names if name != "decisions"), names


@pytest.mark.slow
def test_a_first_save_that_overruns_is_abandoned(
    command: Any, undisturbed: Any, same: Any
) -> None:
    """None was measured yet: it is tried, and the deadline holds."""
    run = command(
        "run", train__num_steps=100_000, checkpoint__save="steps(100000)", **SLOW
    )
    run.start()
    run.wait_for(lambda: len(run.events("step")) > 10)
    assert stop(run) > GRACE_SECS / 2
    (plan,) = run.events("stop_plan")
    assert (plan["action"], plan["save_secs"], plan["committed"]) == ("save", [], -1)
    assert 0 < plan["left_secs"] < GRACE_SECS
    (failed,) = run.events("save_failed")
    assert "the time to stop was over" in failed["reason"]
    assert committed(run) == []
    assert f"step {plan['step']}: left before any step was committed" in run.said
    go_on(run, undisturbed, same)


@pytest.mark.slow
def test_a_save_that_is_known_not_to_fit_is_not_begun(
    command: Any, undisturbed: Any, same: Any
) -> None:
    run = command(
        "run", train__num_steps=100_000, checkpoint__save="steps(2000)", **SLOW
    )
    run.start()
    run.wait_for(lambda: committed(run))
    (first,) = committed(run)
    secs = stop(run)
    plans = run.events("stop_plan")
    assert plans[0]["save_secs"][0] > GRACE_SECS
    assert plans[-1]["action"] in ("leave", "wait")
    assert "save" not in [plan["action"] for plan in plans]
    if plans[0]["in_flight"] == -1:
        assert secs < GRACE_SECS
    assert committed(run)[0] == first
    assert f"a stop leaves {GRACE_SECS} s" in run.said
    assert f"left on the last committed step {committed(run)[-1]}" in run.said
    go_on(run, undisturbed, same)


@pytest.mark.slow
def test_a_save_in_flight_ends_and_another_one_fits_too(
    command: Any, undisturbed: Any, same: Any
) -> None:
    settings = SLOW | {"preemption__grace_secs": 60.0}
    run = command(
        "run", train__num_steps=100_000, checkpoint__save="steps(50)", **settings
    )
    process = run.start()
    run.wait_for(lambda: run.events("save_start"))
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert [plan["action"] for plan in run.events("stop_plan")] == [
        "wait",
        "save",
    ]
    last = run.events("end")[-1]["step"]
    assert committed(run) == [run.events("save_start")[0]["step"], last]
    go_on(run, undisturbed, same)


@pytest.mark.slow
def test_a_second_signal_ends_the_wait_for_a_save(
    command: Any, undisturbed: Any, same: Any
) -> None:
    """Without a supervisor, which would end the worker by force."""
    settings = SLOW | {"preemption__grace_secs": 600.0}
    settings["faults__inject"] = "slow_disk@0-100000:20kBps"
    run = command("run", train__num_steps=100_000, **settings)
    process = run.start("--role=work")
    run.wait_for(lambda: run.events("save_start"))
    os.kill(process.pid, signal.SIGTERM)
    run.wait_for(lambda: run.events("stop_plan"))
    time.sleep(3.5)
    assert process.poll() is None
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert time.monotonic() - asked < 5
    assert committed(run) == []
    go_on(run, undisturbed, same)
