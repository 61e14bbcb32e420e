"""The manager in a loop: exactly once, never silent, always one step on disk."""

import asyncio
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import config
from jaxft.checkpoint import layout, manager, orbax_io, retention

pytestmark = pytest.mark.device


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self if name == kind]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def _state(step):
    return {"step": step, "w": jnp.full((4,), step, jnp.float32)}


def _fill(root, *steps):
    with manager.CheckpointManager(root, keep="last(99)") as checkpoints:
        for step in steps:
            assert checkpoints.save(step, _state(step), force=True)


@pytest.fixture
def slow(monkeypatch):
    """Commits wait for the event: a writer as slow as a test wants it."""
    gate = threading.Event()
    commit = orbax_io._commit

    def wait(*args):
        assert gate.wait(60)
        commit(*args)

    monkeypatch.setattr(orbax_io, "_commit", wait)
    yield gate
    gate.set()


LOOP = """
import sys, time
import jax.numpy as jnp
from jaxft.checkpoint.manager import CheckpointManager
with CheckpointManager(sys.argv[1], save="steps(5)") as checkpoints:
    state = {"w": jnp.ones(3)}
    restored = checkpoints.restore(state)
    start, state = (restored.step, restored.state) if restored else (0, state)
    for step in range(start, 40):
        state = {"w": state["w"] * 1.5 + step}
        checkpoints.maybe_save(step + 1, state)
        print(step, float(state["w"][0]).hex(), flush=True)
        time.sleep(0.05)
    checkpoints.save(40, state, force=True)
"""


def test_a_strangers_loop_survives_sigkill(tmp_path):
    root = tmp_path / "root"

    def run(kill_at=None):
        """Steps run; killed as soon as step `kill_at` is committed."""
        lines = []
        with subprocess.Popen(
            [sys.executable, "-c", LOOP, str(root)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.split())
                if kill_at is not None and layout.discover(root).steps[-1:] >= [
                    kill_at
                ]:
                    process.kill()
        return process.returncode, dict(lines)

    status, first = run(kill_at=5)
    assert status == -9
    status, second = run(kill_at=15)
    assert status == -9
    status, third = run()
    assert status == 0
    want, w = {}, np.float32(1)
    for step in range(40):
        w = np.float32(w * np.float32(1.5) + np.float32(step))
        want[str(step)] = float(w).hex()
    for seen in (first, second, third):
        assert all(want[step] == value for step, value in seen.items())
    assert int(next(iter(second))) >= 5
    assert int(next(iter(third))) >= 15
    assert "39" in third


def test_nothing_is_touched_before_the_first_save(tmp_path):
    checkpoints = manager.CheckpointManager(tmp_path / "a" / "b")
    assert checkpoints.latest() is None
    assert checkpoints.restore(_state(0)) is None
    checkpoints.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"save": "steps(0)"}, "checkpoint.save"),
        ({"keep": "last(0)"}, "checkpoint.keep"),
        ({"timeout_secs": 0.0}, "checkpoint.timeout_secs"),
        ({"root": "s3://bucket"}, "checkpoint"),
    ],
)
def test_misuse_is_one_line(tmp_path, settings, path):
    settings = {"root": tmp_path} | settings
    with pytest.raises(config.ConfigError) as error:
        manager.CheckpointManager(settings.pop("root"), **settings)
    assert error.value.path == path
    assert "\n" not in str(error.value)


def test_any_root_refers_to_one_place(tmp_path, monkeypatch):
    """Relative, with spaces and a slash, and a chdir between five saves."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    events = Events()
    with manager.CheckpointManager(
        "./my root/", keep="last(2)", emit=events
    ) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, _state(step), force=True)
            monkeypatch.chdir(tmp_path / "a" if step % 2 else tmp_path)
    assert sorted(os.listdir(tmp_path / "my root")) == ["4", "5"]
    assert os.listdir(tmp_path / "a") == []
    assert events.of("delete_failed") == []
    assert [event["step"] for event in events.of("save_commit")] == [1, 2, 3, 4, 5]


def test_the_policy_is_asked_once_a_step(tmp_path):
    clock = Clock()
    checkpoints = manager.CheckpointManager(
        tmp_path, save="steps(4) | secs(10)", timer=clock
    )
    assert [step for step in range(9) if checkpoints.should_save(step)] == [4, 8]
    assert not checkpoints.should_save(8)
    clock.now += 10
    assert checkpoints.should_save(9)
    assert not checkpoints.should_save(9)
    assert checkpoints.save(9, _state(9))
    checkpoints.wait()
    clock.now += 9
    assert not checkpoints.should_save(10)
    clock.now += 1
    assert checkpoints.should_save(10)


def test_after_a_restore_the_policy_starts_from_there(tmp_path):
    _fill(tmp_path, 8)
    clock = Clock()
    checkpoints = manager.CheckpointManager(
        tmp_path, save="steps(4) | secs(10)", timer=clock
    )
    clock.now += 100
    assert checkpoints.last_committed is None
    assert checkpoints.restore(_state(0)).step == 8
    assert not checkpoints.should_save(8)
    assert not checkpoints.should_save(9)


def test_the_newest_committed_step_that_is_known(tmp_path):
    _fill(tmp_path, 8, 9)
    checkpoints = manager.CheckpointManager(tmp_path)
    assert checkpoints.last_committed is None
    assert checkpoints.restore(_state(0)).step == 9
    assert checkpoints.last_committed == 9
    assert checkpoints.restore(_state(0), step=8).step == 8
    assert checkpoints.last_committed == 9
    # A fall-back: the newer one is no checkpoint any more.
    (tmp_path / "9" / "run" / "metadata").unlink()
    assert checkpoints.restore(_state(0)).step == 8
    assert checkpoints.last_committed == 8
    assert checkpoints.save(10, _state(10))
    checkpoints.close()
    assert checkpoints.last_committed == 10


def test_a_clock_that_goes_back_does_not_stop_the_saves(tmp_path):
    """Wall time is for the record only; the policy asks a timer."""
    clock, timer = Clock(), Clock()
    checkpoints = manager.CheckpointManager(
        tmp_path, save="secs(10)", clock=clock, timer=timer
    )
    clock.now -= 3600
    timer.now += 10
    assert checkpoints.maybe_save(1, _state(1))
    checkpoints.wait()
    assert checkpoints.restore(_state(0)).record["time"] == clock.now
    clock.now += 7200
    assert not checkpoints.should_save(2)
    timer.now += 10
    assert checkpoints.should_save(2)


def test_should_save_costs_nothing_while_a_save_is_in_flight(tmp_path, slow):
    checkpoints = manager.CheckpointManager(tmp_path, save="steps(1000)")
    assert checkpoints.save(1, _state(1))
    start = time.perf_counter()
    for step in range(2, 502):
        assert not checkpoints.maybe_save(step, None)
        assert checkpoints.error() is None
    assert (time.perf_counter() - start) / 500 < 1e-3
    slow.set()
    checkpoints.close()


def test_a_periodic_save_while_one_is_in_flight_is_skipped_and_counted(tmp_path, slow):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, save="steps(1)", emit=events)
    assert checkpoints.maybe_save(1, _state(1))
    assert checkpoints.in_flight == 1
    assert not checkpoints.save(1, _state(1))
    assert not checkpoints.maybe_save(2, _state(2))
    assert checkpoints.num_skipped == 1
    assert [event["step"] for event in events.of("save_skipped")] == [2]
    assert checkpoints.latest() is None
    threading.Timer(0.2, slow.set).start()
    assert checkpoints.save(3, _state(3), force=True)
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.last_committed == 3
    assert checkpoints.in_flight is None


def test_a_time_policy_skips_once_a_period(tmp_path, slow):
    clock = Clock()
    events = Events()
    checkpoints = manager.CheckpointManager(
        tmp_path, save="secs(10)", timer=clock, emit=events
    )
    clock.now += 10
    assert checkpoints.maybe_save(1, _state(1))
    for step in range(2, 32):
        clock.now += 1
        assert not checkpoints.maybe_save(step, _state(step))
    assert [event["step"] for event in events.of("save_skipped")] == [11, 21, 31]
    slow.set()
    checkpoints.close()


def test_each_step_is_saved_exactly_once(tmp_path, slow):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, emit=events)
    assert checkpoints.save(20, _state(20))
    threading.Timer(0.2, slow.set).start()
    assert not checkpoints.save(20, _state(20), force=True)
    assert not checkpoints.save(20, _state(20), force=True)
    checkpoints.close()
    assert len(events.of("save_commit")) == 1


def test_the_label_is_the_state_s_own_step(tmp_path):
    class State:
        step = jnp.int32(4)

    checkpoints = manager.CheckpointManager(tmp_path / "root")
    for state in ({"step": 4}, {"step": np.int64(4)}, {"step": jnp.int32(4)}):
        with pytest.raises(ValueError, match=r"save\(5\) of a state whose step is 4"):
            checkpoints.save(5, state)
    with pytest.raises(ValueError, match="whose step is 4"):
        checkpoints.save(5, State())
    for step in (-1, 2.0, True, "5"):
        with pytest.raises(ValueError, match="the label of a save"):
            checkpoints.save(step, {"w": 1})
    assert not (tmp_path / "root").exists()


def test_older_than_the_newest_is_refused_at_once(tmp_path):
    _fill(tmp_path, 100)
    checkpoints = manager.CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=r"cannot save step 5 .* step 100 is newer"):
        checkpoints.save(5, _state(5))
    assert os.listdir(tmp_path) == ["100"]


def test_a_restore_waits_for_the_save_in_flight(tmp_path, slow):
    checkpoints = manager.CheckpointManager(tmp_path)
    w = np.arange(4)
    checkpoints.save(3, {"w": w})
    w[:] = 0
    threading.Timer(0.2, slow.set).start()
    assert checkpoints.restore({"w": w}).state["w"].tolist() == [0, 1, 2, 3]


def test_two_generations_of_resume_equal_one_straight_run(tmp_path):
    step = jax.jit(
        lambda s: {"step": s["step"] + 1, "w": jnp.sin(s["w"] * 3) + s["step"]},
        donate_argnums=0,
    )

    def init():
        return {"step": jnp.int32(0), "w": jnp.linspace(0, 1, 64)}

    for _ in range(3):
        with manager.CheckpointManager(tmp_path, save="steps(5)") as checkpoints:
            restored = checkpoints.restore(init())
            state = init() if restored is None else restored.state
            first = int(state["step"])
            for number in range(first + 1, first + 6):
                state = step(state)
                checkpoints.maybe_save(number, state)
    straight = init()
    for _ in range(15):
        straight = step(straight)
    assert int(state["step"]) == 15
    assert np.array_equal(state["w"], straight["w"])


def test_leftovers_go_before_the_first_save_and_not_by_a_look(tmp_path, slow):
    _fill_gate = slow
    _fill_gate.set()
    _fill(tmp_path, 10)
    _fill_gate.clear()
    for name in ("20.orbax-checkpoint-tmp", "12.orbax-checkpoint-tmp-sealed"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "40.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.orbax-checkpoint-tmp").mkdir()
    checkpoints = manager.CheckpointManager(tmp_path)
    assert checkpoints.latest() == 10
    assert checkpoints.restore(_state(0)).step == 10
    assert len(os.listdir(tmp_path)) == 5
    assert checkpoints.save(20, _state(20))
    slow.set()
    checkpoints.wait()
    names = sorted(os.listdir(tmp_path))
    assert names == ["10", "20", "notes.orbax-checkpoint-tmp"]
    # What appears later is somebody's until a newer step is there.
    (tmp_path / "40.orbax-checkpoint-tmp").mkdir()
    assert checkpoints.save(30, _state(30))
    checkpoints.close()
    assert (tmp_path / "40.orbax-checkpoint-tmp").exists()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_taken_temporary_name_does_not_block(tmp_path, kind):
    taken = tmp_path / "30.orbax-checkpoint-tmp"
    if kind == "file":
        taken.write_text("x")
    else:
        (taken / "state").mkdir(parents=True)
    _fill(tmp_path, 30)
    assert os.listdir(tmp_path) == ["30"]


def test_a_foreign_folder_in_the_way_is_kept_aside(tmp_path):
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "mine").write_text("x")
    _fill(tmp_path, 30)
    assert (tmp_path / "30.quarantined-1" / "mine").read_text() == "x"
    assert manager.CheckpointManager(tmp_path).restore(_state(0)).step == 30


def test_retention_takes_all_that_is_too_much_and_nothing_else(tmp_path):
    _fill(tmp_path / "root", *range(1, 9))
    other = tmp_path / "other"
    _fill(other, 5)
    (tmp_path / "root" / "notes").mkdir()
    (tmp_path / "root" / "999").mkdir()
    (tmp_path / "root" / "0.quarantined-1").mkdir()
    os.symlink(other / "5", tmp_path / "root" / "0")
    events = Events()
    with manager.CheckpointManager(
        tmp_path / "root", keep="last(2) | every(4)", emit=events
    ) as checkpoints:
        checkpoints.save(9, _state(9))
    assert sorted(os.listdir(tmp_path / "root")) == sorted(
        ["0.quarantined-1", "999", "notes", "0", "4", "8", "9"]
    )
    assert sorted(event["step"] for event in events.of("deleted")) == [1, 2, 3, 5, 6, 7]
    assert (other / "5" / "run").is_dir()


def test_at_every_instant_a_committed_step_is_there(tmp_path):
    """keep=last(1): a poller never sees an empty root, nor a step that is half gone."""
    _fill(tmp_path, 1)
    stop = threading.Event()
    seen = []

    def poll():
        while not stop.is_set():
            found = layout.discover(tmp_path)
            seen.append(found.steps)
            for info in found.committed[-1:]:
                # The newest cannot be deleted: only a newer commit makes it go.
                if not os.path.isdir(os.path.join(info.path, "state")):
                    newer = layout.discover(tmp_path).steps
                    assert newer[-1] > info.step

    thread = threading.Thread(target=poll)
    thread.start()
    with manager.CheckpointManager(tmp_path, keep="last(1)") as checkpoints:
        for step in range(2, 12):
            checkpoints.save(step, _state(step), force=True)
    stop.set()
    thread.join()
    assert all(seen)
    assert manager.CheckpointManager(tmp_path).steps() == [11]


def test_a_step_removed_by_hand_does_not_disturb(tmp_path):
    _fill(tmp_path, 1, 2)
    events = Events()
    with manager.CheckpointManager(
        tmp_path, keep="last(1)", emit=events
    ) as checkpoints:
        orbax_io.remove(str(tmp_path / "1"))
        retention.delete(1, path=str(tmp_path / "1"), emit=events)
        checkpoints.save(3, _state(3))
    assert os.listdir(tmp_path) == ["3"]
    assert events.of("delete_failed") == []


def test_inside_a_running_event_loop(tmp_path):
    async def notebook():
        with manager.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, _state(1))
            checkpoints.wait()
            return checkpoints.restore(_state(0))

    assert asyncio.run(notebook()).step == 1


def test_what_comes_with_the_state_comes_back(tmp_path):
    with manager.CheckpointManager(tmp_path, clock=Clock()) as checkpoints:
        checkpoints.save(
            1,
            _state(1),
            data={"next": 7},
            run={"facts": {"mesh": (1, 8)}},
            metrics={"loss": np.float32(0.5)},
        )
        checkpoints.wait()
        restored = checkpoints.restore(_state(0), step=1)
    assert restored.data == {"next": 7}
    assert restored.run == {"facts": {"mesh": [1, 8]}}
    assert restored.metrics == {"loss": 0.5}
    assert restored.record["time"] == 1000.0
    assert restored.record["timeline"] == 0
    assert pathlib.Path(restored.path) == tmp_path / "1"


@pytest.mark.slow
def test_memory_is_flat_over_many_saves(tmp_path):
    state = {"w": jnp.ones((2**20,)), "step": 0}

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    with manager.CheckpointManager(tmp_path, keep="last(1)") as checkpoints:
        for step in range(1, 201):
            checkpoints.save(step, state | {"step": step}, force=True)
            sizes.append(resident())
    assert (sizes[-1] - sizes[50]) / 150 < 2**20
