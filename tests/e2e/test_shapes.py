"""With virtual shards a run may be moved to other devices and processes: bits stay."""

import itertools
import os
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

# Number of processes, devices of each, shards of the parameters.
SHAPES = [(1, 1, 1), (2, 4, 8), (1, 2, 1), (4, 1, 2), (1, 8, 1)]
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
@pytest.mark.timeout(900)
def test_a_run_moved_four_times_by_kills(job: Any, same: Any) -> None:
    reference = job("reference", num_processes=1, **SETTINGS).run
    code, _, err = reference.run(timeout_secs=200)
    assert code == 0, err
    one = job("moved", **SETTINGS)
    run = one.run
    for number, shape in enumerate(SHAPES):
        one.num_processes, run.num_devices, run.settings["mesh.fsdp"] = shape
        one.start()
        if number == len(SHAPES) - 1:
            break
        kill_after_save(one, 10 + 20 * number)
    code, _, err = one.finish()
    assert code == 0, err
    same(run, reference, NUM_STEPS)
    shapes = [event["facts"]["mesh.shape"] for event in run.events("facts")]
    # Each of several processes tells of it.
    assert [shape for shape, _ in itertools.groupby(shapes)] == [
        [processes * devices // fsdp, fsdp, 1] for processes, devices, fsdp in SHAPES
    ]
    changes = [event["changes"] for event in run.events("resume_changed")]
    assert all("mesh.shape" in changed for changed in changes)
    assert len(changes) >= len(SHAPES) - 1
    evaluations = {e["step"]: e["metrics"] for e in reference.events("evaluation")}
    assert {e["step"] for e in run.events("evaluation")} == evaluations.keys()
    for event in run.events("evaluation"):
        assert event["metrics"] == evaluations[event["step"]]


def kill_after_save(job: Any, step: int) -> None:
    """All of it at once, when a save of that step or a later one is done."""
    job.run.wait_for(
        lambda: any(e["step"] >= step for e in job.run.events("save_commit")),
        timeout_secs=200,
        poll_secs=0.02,
    )
    pids = list(job.running("worker").values())
    os.killpg(job.run.process.pid, signal.SIGKILL)
    job.run.process.communicate()
    job.wait_until_dead(pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "num_devices", "fsdp"), [(2, 1, 1), (2, 2, 4), (4, 1, 2)]
)
def test_processes_are_no_other_numbers(
    job: Any, reference: Any, num_processes: int, num_devices: int, fsdp: int
) -> None:
    settings = SETTINGS | {"train__num_steps": 40, "eval__every_steps": 20}
    one = job(num_processes=num_processes, mesh__fsdp=fsdp, **settings)
    one.run.num_devices = num_devices
    one.start()
    code, _, err = one.finish()
    assert code == 0, err
    one.check_same(reference(1, **settings))


@pytest.mark.slow
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
