"""One run on 8, then 4, then 8 devices: nothing is converted, nothing read twice."""

import os
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

NUM_DEVICES = [8, 4, 8]
NUM_STEPS = 300


@pytest.mark.parametrize("fsdp", [1, 4])
def test_half_the_devices_and_all_again(
    command: Any, same_samples: Any, fsdp: int
) -> None:
    settings = {
        "train__num_steps": NUM_STEPS,
        # Rounding grows with the steps that it goes through; so it does not.
        "optimizer__learning_rate": 1e-5,
        "mesh__fsdp": fsdp,
        # Some leaves are split, small as the model is.
        "sharding__min_shard_elements": 64,
        "checkpoint__keep": "last(3) | every(20)",
        "resume__allow": "mesh.shape,mesh.num_devices",
    }
    plain = command("plain", **settings)
    plain.num_devices = NUM_DEVICES[0]
    code, _, err = plain.run(timeout_secs=150)
    assert code == 0, err
    run = command("moved", **settings)
    for number, num_devices in enumerate(NUM_DEVICES):
        run.num_devices = num_devices
        if number == len(NUM_DEVICES) - 1:
            code, _, err = run.run(timeout_secs=150)
            assert code == 0, err
            break
        kill_after_save(run)
    shapes = [event["facts"]["mesh.shape"] for event in run.events("facts")]
    assert shapes == [[n // fsdp, fsdp, 1] for n in NUM_DEVICES]
    # What each restored is what the one before had saved, to the bit: it was proven.
    restores = run.events("restore")
    assert [event["verify"] for event in restores] == ["full"] * 2
    assert 0 < restores[0]["step"] < restores[1]["step"] < NUM_STEPS
    same_samples(run, plain)
    ours, theirs = ({e["step"]: e for e in one.events("step")} for one in (run, plain))
    assert sorted(ours) == sorted(theirs) == list(range(1, NUM_STEPS + 1))
    for step, event in theirs.items():
        loss = event["metrics"]["loss"]
        assert ours[step]["metrics"]["loss"] == pytest.approx(loss, rel=3e-6), step


def kill_after_save(run: Any) -> None:
    """Starts it and kills all of it once it has done a save of its own."""
    before = len(run.events("save_commit"))
    run.start()
    run.wait_for(lambda: run.events("save_commit")[before:], timeout_secs=150)
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate()
