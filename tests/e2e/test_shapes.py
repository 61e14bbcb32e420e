"""With virtual shards a run may be moved to other devices: the bits stay."""

import os
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

# Number of devices, shards of the parameters.
SHAPES = [(1, 1), (8, 8), (2, 1), (4, 2), (8, 1)]
NUM_STEPS = 100
SETTINGS = {
    "train__virtual_shards": 8,
    "train__clip_norm": 0.5,
    "train__num_steps": NUM_STEPS,
    "eval__every_steps": 50,
    # Some leaves are split, small as the model is.
    "sharding__min_shard_elements": 64,
}


@pytest.mark.slow
def test_a_run_moved_four_times_by_kills(command: Any, same: Any) -> None:
    reference = command("reference", **SETTINGS)
    code, _, err = reference.run(timeout_secs=200)
    assert code == 0, err
    run = command("moved", **SETTINGS)
    for number, (num_devices, fsdp) in enumerate(SHAPES):
        run.num_devices, run.settings["mesh.fsdp"] = num_devices, fsdp
        if number == len(SHAPES) - 1:
            code, _, err = run.run(timeout_secs=200)
            assert code == 0, err
            break
        enough = 10 + 20 * number
        run.start()
        run.wait_for(
            lambda enough=enough: any(
                e["step"] >= enough for e in run.events("save_commit")
            ),
            timeout_secs=200,
        )
        assert run.process is not None
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.communicate()
    same(run, reference, NUM_STEPS)
    shapes = [e["facts"]["mesh.shape"] for e in run.events("facts")]
    assert shapes == [[n // fsdp, fsdp, 1] for n, fsdp in SHAPES]
    changes = [e["changes"] for e in run.events("resume_changed")]
    assert all("mesh.shape" in changed for changed in changes)
    assert len(changes) == len(SHAPES) - 1
    evaluations = {
        e["step"]: e["metrics"]
        for one in (run, reference)
        for e in one.events("evaluation")
    }
    for event in run.events("evaluation") + reference.events("evaluation"):
        assert event["metrics"] == evaluations[event["step"]]


def test_another_number_of_devices_is_no_other_run(command: Any) -> None:
    run = command("run", **SETTINGS | {"train__num_steps": 4, "eval__every_steps": 0})
    code, _, err = run.run()
    assert code == 0, err
    run.num_devices, run.settings["train.num_steps"] = 2, 6
    code, _, err = run.run()
    assert code == 0, err
    assert "resuming with other settings: mesh" in err
    run.settings["train.virtual_shards"] = 4
    code, _, err = run.run()
    assert code == 78
    assert "train.virtual_shards: 8 -> 4" in err
