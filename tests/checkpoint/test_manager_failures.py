"""Failed saves: told once to everyone who asks, and never a step."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxft import durable, records
from jaxft.checkpoint import (
    layout,
    leaves,
    manager,
    orbax_io,
    planner,
    proof,
    state_digests,
)

pytestmark = pytest.mark.device


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self if name == kind]


def _state(step):
    return {"step": step, "w": jnp.full((4,), step, jnp.float32)}


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


@pytest.fixture
def broken(monkeypatch):
    """The commit fails as long as the list is not empty."""
    errors = [OSError(28, "No space left on device")]
    commit = orbax_io._commit

    def fail(*args):
        if errors:
            raise errors[0]
        commit(*args)

    monkeypatch.setattr(orbax_io, "_commit", fail)
    return errors


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_save_that_lost_another_process_does_not_blame_the_disk(tmp_path, broken):
    said = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"
    broken[:] = [jax.errors.JaxRuntimeError(said)]
    checkpoints = manager.CheckpointManager(tmp_path)
    assert checkpoints.save(10, _state(10))
    _until(lambda: checkpoints.error() is not None)
    fault = checkpoints.error().fault
    assert (fault.kind, fault.step) == (records.FaultKind.PEER_LOST, 10)
    assert "another process is gone, or late; nothing is saved yet" in fault.evidence
    assert said in fault.evidence
    with pytest.raises(records.FaultError, match="Gloo"):
        checkpoints.close()


def test_a_failed_save_is_not_a_step_and_is_told(tmp_path, broken):
    events = Events()
    error, broken[:] = broken[0], []
    checkpoints = manager.CheckpointManager(tmp_path, keep="last(1)", emit=events)
    checkpoints.save(10, _state(10))
    checkpoints.wait()
    broken.append(error)
    assert checkpoints.save(20, _state(20))
    _until(lambda: checkpoints.error() is not None)
    fault = checkpoints.error().fault
    assert fault.kind is records.FaultKind.SAVE_FAILED
    assert fault.exit_code == 74
    assert fault.step == 20
    assert "disk full" in fault.evidence
    assert str(tmp_path / "20") in fault.evidence
    assert checkpoints.latest() == 10
    assert os.listdir(tmp_path) == ["10"]
    assert checkpoints.restore(_state(0)).step == 10
    with pytest.raises(records.FaultError, match="disk full"):
        checkpoints.close()
    # Back at 10, the next save is a real one, and makes the failure good.
    broken.clear()
    assert checkpoints.save(15, _state(15))
    checkpoints.wait()
    assert checkpoints.error() is None
    assert checkpoints.steps() == [15]
    assert len(events.of("save_failed")) == 1
    assert events.of("delete_failed") == []


def test_who_does_not_poll_is_told_by_the_next_save_once(tmp_path, broken):
    checkpoints = manager.CheckpointManager(tmp_path, save="steps(1)")
    assert checkpoints.maybe_save(1, _state(1))
    _until(lambda: checkpoints.in_flight is None)
    with pytest.raises(records.FaultError, match=r"save of step 1 .* disk full"):
        checkpoints.maybe_save(2, _state(2))
    broken.clear()
    assert checkpoints.maybe_save(3, _state(3))
    checkpoints.close()


def test_a_forced_save_tries_although_the_last_one_failed(tmp_path, broken):
    checkpoints = manager.CheckpointManager(tmp_path)
    assert checkpoints.save(1, _state(1))
    _until(lambda: checkpoints.in_flight is None)
    broken.clear()
    assert checkpoints.save(2, _state(2), force=True)
    checkpoints.close()
    assert checkpoints.steps() == [2]


def test_an_error_of_the_body_is_not_hidden_by_one_of_the_save(tmp_path, broken):
    del broken

    def run():
        with manager.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, _state(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        run()
    assert "disk full" in error.value.__notes__[0]


def test_a_save_that_never_ends_misses_its_deadline(tmp_path, slow):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, timeout_secs=0.3, emit=events)
    assert checkpoints.save(1, _state(1))
    with pytest.raises(records.FaultError, match=r"save of step 1 .* time-out"):
        checkpoints.save(2, _state(2), force=True)
    _until(lambda: checkpoints.in_flight is None)
    assert "time-out" in checkpoints.error().fault.evidence
    assert len(events.of("save_failed")) == 1
    # Others do not wait behind it.
    slow.set()
    assert checkpoints.save(3, _state(3), force=True)
    _until(lambda: checkpoints.last_committed == 3)
    assert checkpoints.error() is None


def test_the_deadline_also_reaches_who_does_not_poll(tmp_path, slow):
    checkpoints = manager.CheckpointManager(tmp_path, save="steps(1)", timeout_secs=0.2)
    assert checkpoints.maybe_save(1, _state(1))
    time.sleep(0.3)
    with pytest.raises(records.FaultError, match="time-out"):
        checkpoints.maybe_save(2, _state(2))


def test_a_root_that_cannot_be_made_is_a_failed_save(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpoints = manager.CheckpointManager(tmp_path / "file" / "root")
    with pytest.raises(records.FaultError) as error:
        checkpoints.save(1, _state(1))
    assert error.value.fault.kind is records.FaultKind.SAVE_FAILED
    assert (tmp_path / "file").read_text() == "x"


def test_warn_goes_on_and_stops_hard_at_the_limit(tmp_path, broken):
    events = Events()
    checkpoints = manager.CheckpointManager(
        tmp_path,
        save="steps(1)",
        on_save_error="warn",
        max_failed_saves=3,
        emit=events,
    )
    for step in (1, 2):
        assert checkpoints.maybe_save(step, _state(step))
        _until(lambda: checkpoints.in_flight is None)
        assert checkpoints.error() is None
    # One that commits begins the count anew.
    error, broken[:] = broken[0], []
    assert checkpoints.maybe_save(3, _state(3))
    checkpoints.wait()
    broken.append(error)
    for step in (4, 5, 6):
        assert checkpoints.error() is None
        assert checkpoints.maybe_save(step, _state(step))
        _until(lambda: checkpoints.in_flight is None)
    with pytest.raises(records.FaultError, match="save of step 6"):
        checkpoints.maybe_save(7, _state(7))
    assert len(events.of("save_failed")) == 5
    assert checkpoints.steps() == [3]


def test_warn_does_not_hide_the_last_failure(tmp_path, broken):
    checkpoints = manager.CheckpointManager(tmp_path, on_save_error="warn")
    assert checkpoints.save(1, _state(1))
    with pytest.raises(records.FaultError, match="disk full"):
        checkpoints.close()


def test_retry_saves_at_the_next_border_until_it_works(tmp_path, broken):
    events = Events()
    checkpoints = manager.CheckpointManager(
        tmp_path, save="steps(10)", on_save_error="retry(2)", emit=events
    )
    saved = []
    for step in range(10, 20):
        if step == 12:
            broken.clear()
        if checkpoints.maybe_save(step, _state(step)):
            saved.append(step)
        _until(lambda: checkpoints.in_flight is None)
    assert saved == [10, 11, 12]
    checkpoints.close()
    assert checkpoints.steps() == [12]
    assert len(events.of("save_failed")) == 2


def test_retry_ends_with_the_last_one_allowed(tmp_path, broken):
    checkpoints = manager.CheckpointManager(
        tmp_path, save="steps(10)", on_save_error="retry(2)"
    )
    for step in (10, 11, 12):
        assert checkpoints.error() is None
        assert checkpoints.maybe_save(step, _state(step))
        _until(lambda: checkpoints.in_flight is None)
    assert checkpoints.error() is not None
    assert not checkpoints.should_retry


def test_a_save_that_cannot_begin_is_borne_too(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpoints = manager.CheckpointManager(
        tmp_path / "file" / "root", save="steps(1)", on_save_error="warn"
    )
    assert not checkpoints.maybe_save(1, _state(1))
    assert checkpoints.error() is None
    with pytest.raises(records.FaultError):
        checkpoints.save(2, _state(2), force=True)


@pytest.mark.parametrize(
    ("where", "name", "kind"),
    [
        (leaves, "encode", jax.errors.JaxRuntimeError),
        (durable, "make_folders", OSError),
        (planner.proof, "Proof", MemoryError),
        (proof.Proof, "plan_links", jax.errors.JaxRuntimeError),
        (orbax_io, "write_async", jax.errors.JaxRuntimeError),
        (orbax_io, "write_async", ValueError),
        (state_digests.fingerprint, "start_digests", jax.errors.JaxRuntimeError),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_whatever_goes_wrong_is_a_failed_save_and_holds_nothing(
    tmp_path, monkeypatch, where, name, kind
):
    """A full device among them; the next save is as good as ever."""
    events = Events()
    checkpoints = manager.CheckpointManager(
        tmp_path, keep="last(2)", layout="files", on_save_error="warn", emit=events
    )
    for step in (1, 2):
        checkpoints.save(step, _state(step), force=True)
        checkpoints.wait()

    def fail(*args, **settings):
        raise kind("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(where, name, fail)
        checkpoints.save(3, _state(3))
        with pytest.raises(records.FaultError, match="RESOURCE_EXHAUSTED"):
            checkpoints.wait()
    (told,) = events.of("save_failed")
    assert told["step"] == 3
    assert checkpoints.error() is None
    assert not any(map(checkpoints._planner.pins.has, (1, 2)))
    assert checkpoints.save(4, _state(4))
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "4"]


def test_a_leaf_that_cannot_be_stored_is_no_failed_save(tmp_path):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, on_save_error="warn", emit=events)
    with pytest.raises(layout.LeafError):
        checkpoints.save(1, {"w": object()})
    with pytest.raises(TypeError):
        checkpoints.save(1, _state(1), data={"x": object()})
    assert events == []
    assert checkpoints.error() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("told", ["save_commit", "save_failed"])
def test_who_cannot_be_told_leaves_nothing_behind(tmp_path, broken, told):
    """The disk of the history is full, say."""
    error, broken[:] = broken[0], []

    def emit(kind, /, **fields):
        if kind == told and fields["step"] == 3:
            raise OSError(28, "No space left on device")

    checkpoints = manager.CheckpointManager(
        tmp_path, keep="last(1)", layout="files", emit=emit
    )
    for step in (1, 2):
        checkpoints.save(step, _state(step), force=True)
        checkpoints.wait()
    if told == "save_failed":
        broken.append(error)
    checkpoints.save(3, _state(3))
    _until(lambda: checkpoints.in_flight is None)
    checkpoints._saves.join(60)
    assert not any(map(checkpoints._planner.pins.has, (1, 2, 3)))
    # What is kept and deleted is decided all the same.
    assert os.listdir(tmp_path) == ["3" if told == "save_commit" else "2"]


def test_one_that_is_not_finite_ends_a_row_of_failures(tmp_path, broken):
    """The store has taken it: the next border is not asked to try again at once."""
    checkpoints = manager.CheckpointManager(
        tmp_path, save="steps(10)", on_save_error="retry(2)", health="w"
    )
    assert checkpoints.maybe_save(10, _state(10))
    _until(lambda: checkpoints.in_flight is None)
    broken.clear()
    assert checkpoints.should_retry
    assert checkpoints.maybe_save(
        11, {"step": 11, "w": jnp.full((4,), jnp.nan, jnp.float32)}
    )
    _until(lambda: checkpoints.in_flight is None)
    assert not checkpoints.should_retry
    assert not checkpoints.maybe_save(12, _state(12))
    # But what was to be saved is not saved yet.
    with pytest.raises(records.FaultError):
        checkpoints.wait()
    assert checkpoints.maybe_save(20, _state(20))
    checkpoints.close()
    assert checkpoints.steps() == [20]
