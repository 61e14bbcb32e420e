"""What a save needs is held for that save alone; a verdict is always given."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import manager, manifest, planner, run_record

pytestmark = pytest.mark.device


def _state(step):
    return {"step": step, "w": jnp.ones(4)}


def _checkpoints(root, **settings):
    settings = {"keep": "last(9)", "layout": "files"} | settings
    checkpoints = manager.CheckpointManager(root, **settings)
    for step in (1, 2):
        checkpoints.save(step, _state(step), force=True)
    checkpoints.wait()
    return checkpoints


def _plan(checkpoints, step):
    _, types = manager.leaves.encode(_state(step))
    record = run_record.make_record(step, time_secs=0.0, state=types)
    return checkpoints._planner.plan(step, state=_state(step), record=record)


def test_a_late_end_of_one_save_leaves_the_pins_of_another_of_its_label(tmp_path):
    checkpoints = _checkpoints(tmp_path)
    pins = checkpoints._planner.pins
    given_up, again = _plan(checkpoints, 3), _plan(checkpoints, 3)
    checkpoints._planner.end(given_up, committed=False)
    assert pins.has(1)
    assert pins.has(2)
    checkpoints._planner.end(again, committed=False)
    assert not pins.has(1)
    assert not pins.has(2)


def test_a_metric_that_is_not_finite_does_not_spoil_a_plan(tmp_path):
    keep = "last(2) | best(1, loss)"
    with _checkpoints(tmp_path, keep=keep) as checkpoints:
        for step, loss in ((3, float("nan")), (4, float("inf")), (5, np.float32(1))):
            metrics = {"loss": loss}
            assert checkpoints.save(step, _state(step), metrics=metrics, force=True)
    assert checkpoints.latest() == 5


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file"),
        OSError(116, "Stale file handle"),
        manifest.ManifestError("damaged"),
        records.FaultError(records.Fault(kind=records.FaultKind.CONFIG)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_verdict_is_given_whatever_can_be_read(tmp_path, monkeypatch, error):
    """In a process that is not the primary one, and did not make the manifest."""
    checkpoints = _checkpoints(tmp_path)
    one = _plan(checkpoints, 2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(planner, "_POLL_SECS", 0.01)
    read, errors = manifest.read, [error] * 3

    def fail(path):
        if errors:
            raise errors.pop()
        return read(path)

    monkeypatch.setattr(planner.manifests, "read", fail)
    # The store is asked again before a step is given up that is there.
    assert checkpoints._planner.verdict(one) == ()
    errors += [error] * 99
    monkeypatch.setattr(planner, "_SEEN_SECS", 0.05)
    (told,) = checkpoints._planner.verdict(one)
    assert told.startswith("unknown: ")
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_leaf_that_becomes_another_kind_is_written(tmp_path):
    """As NumPy's array and JAX's: other notes lie beside their chunks."""
    w = np.arange(100, dtype=np.float32)
    kinds = [w, w, jnp.asarray(w), jnp.asarray(w), jnp.asarray(w), w, w, w]
    with manager.CheckpointManager(tmp_path, keep="last(9)") as saved:
        for step, leaf in enumerate(kinds):
            saved.save(step, {"w": leaf, "x": jnp.float32(step)})
            saved.wait()
        assert saved.steps() == list(range(len(kinds)))
        for step, leaf in enumerate(kinds):
            target = {"w": leaf, "x": jnp.float32(0)}
            found = saved.restore(target, step=step).state["w"]
            assert type(found) is type(leaf)
            np.testing.assert_array_equal(found, w)


def test_a_step_that_another_writer_put_in_place_of_ours_is_seen(tmp_path):
    def save(saved, step, value):
        leaf = jnp.full(9, value, jnp.float32)
        saved.save(step, {"w": leaf, "x": jnp.float32(step)})
        saved.wait()

    with (
        manager.CheckpointManager(tmp_path, keep="last(9)") as ours,
        manager.CheckpointManager(tmp_path, keep="last(9)") as theirs,
    ):
        for step in (1, 2, 3):
            save(ours, step, 1.0)
        theirs.rollback(1, reason="a test")
        save(theirs, 2, 5.0)
        save(theirs, 3, 1.0)
        save(ours, 4, 1.0)  # Its step 2, whose bytes it would link, was another one.
        target = {"w": jnp.zeros(9), "x": jnp.float32(0)}
        assert float(ours.restore(target, step=4).state["w"][0]) == 1.0
