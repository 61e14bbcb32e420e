"""Half a deletion is no step, and does not stay."""

import collections
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxft import records
from jaxft.checkpoint import decisions, layout, manager, manifest, policies, retention

pytestmark = pytest.mark.device


def _state(step):
    return {"step": step, "w": jnp.full((4,), step, jnp.float32)}


def test_a_killed_deletion_is_finished_by_the_next_start(tmp_path):
    """Also when nothing is saved afterwards; a save of somebody's stays."""
    with manager.CheckpointManager(tmp_path, keep="last(9)") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, _state(step), force=True)
    os.rename(tmp_path / "10", tmp_path / "10.orbax-checkpoint-tmp-deleted")
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    deleted = []

    def emit(kind, /, **fields):
        if kind == "deleted":
            deleted.append(fields["step"])

    with manager.CheckpointManager(tmp_path, emit=emit) as checkpoints:
        assert checkpoints.restore(_state(0)).step == 20
    assert sorted(os.listdir(tmp_path)) == ["20", "5.orbax-checkpoint-tmp"]
    assert deleted == [10]


def _fill(root, losses, *, keep):
    with manager.CheckpointManager(root, keep=keep) as checkpoints:
        for step, loss in losses.items():
            metrics = {} if loss is None else {"eval/loss": loss}
            checkpoints.save(step, _state(step), metrics=metrics, force=True)


def test_the_best_stay_and_are_known_after_a_restart(tmp_path):
    keep = "last(2) | best(2, eval/loss)"
    _fill(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 5.0}, keep=keep)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4", "5"]
    _fill(tmp_path, {6: 6.0, 7: 7.0, 8: 1.5}, keep=keep)
    assert sorted(os.listdir(tmp_path)) == ["2", "7", "8"]


def test_ever_worse_metrics_do_not_hold_the_newest_back(tmp_path):
    losses = {step: float(step) for step in range(1, 9)}
    _fill(tmp_path, losses, keep="best(3, eval/loss)")
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "8"]
    with manager.CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(_state(0)).step == 8


def _look(root):
    """Relative path -> what a change would show in."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("start", ["empty", "copied", "linked", "pointing"])
def test_a_new_root_changes_nothing_under_the_one_it_goes_on_from(tmp_path, start):
    old, new = tmp_path / "old", tmp_path / "new"
    _fill(old, {1: None, 2: None, 3: None}, keep="last(9)")
    if start == "pointing":
        new.mkdir()
        for step in old.iterdir():
            (new / step.name).symlink_to(step)
    elif start != "empty":
        copy = os.link if start == "linked" else shutil.copy2
        shutil.copytree(old, new, copy_function=copy)
    before = _look(old)
    with manager.CheckpointManager(old, keep="last(1)") as checkpoints:
        state = checkpoints.restore(_state(0)).state
    with manager.CheckpointManager(new, keep="last(1)") as checkpoints:
        if start != "empty":
            assert checkpoints.restore(_state(0)).step == 3
        for step in (4, 5, 6):
            assert checkpoints.save(step, state | {"step": step}, force=True)
    assert os.listdir(new) == ["6"]
    assert _look(old) == before


def test_a_pinned_step_stays(tmp_path):
    _fill(tmp_path, {1: None, 2: None}, keep="last(2)")
    decisions.pin(tmp_path, 1, reason="the paper")
    _fill(tmp_path, {3: None, 4: None}, keep="last(1)")
    assert sorted(os.listdir(tmp_path)) == ["1", "4", "decisions"]


def test_a_step_that_is_not_healthy_does_not_count(tmp_path):
    """As several processes leave it; what stays is told by the manifests on disk."""
    _fill(tmp_path, dict.fromkeys((1, 2, 3, 4), None), keep="last(9)")
    for step in (2, 3, 4):
        proof = manifest.read(tmp_path / str(step))
        (tmp_path / str(step) / "manifest/metadata").unlink()
        sick = {"healthy": False, "unhealthy": ("w",)}
        manifest.write(
            tmp_path / str(step), manifest.dataclasses.replace(proof, **sick)
        )
    retention._read_health.cache_clear()  # A manifest is not written twice otherwise.

    def retain():
        retention.retain(
            str(tmp_path),
            keep=policies.parse_keep("last(2)"),
            committed=4,
            in_flight=None,
            emit=records.ignore_event,
        )
        return sorted(os.listdir(tmp_path))

    # The newest one, and the newest healthy one.
    assert retain() == ["1", "4"]
    with manager.CheckpointManager(tmp_path, keep="last(1)") as checkpoints:
        checkpoints.save(5, _state(5), force=True)
    assert os.listdir(tmp_path) == ["5"]


def test_health_is_told_without_a_word_of_thousands_of_leaves(tmp_path, monkeypatch):
    _fill(tmp_path, {1: None}, keep="last(1)")
    (info,) = layout.discover(tmp_path).committed
    retention._read_health.cache_clear()
    with monkeypatch.context() as without:
        without.delattr(manifest, "read")
        assert retention._with_health(info).healthy
    proof = manifest.read(tmp_path / "1")
    (tmp_path / "1/manifest/metadata").unlink()
    sick = {"healthy": False, "unhealthy": ('"healthy":true',)}
    manifest.write(tmp_path / "1", manifest.dataclasses.replace(proof, **sick))
    retention._read_health.cache_clear()
    assert not retention._with_health(info).healthy


def test_a_damaged_manifest_keeps_nothing_from_being_deleted(tmp_path):
    _fill(tmp_path, dict.fromkeys((1, 2, 3), None), keep="last(9)")
    for step in (1, 2):
        file = tmp_path / str(step) / "manifest/metadata"
        file.chmod(0o600)
        file.write_bytes(file.read_bytes()[:-9])
    _fill(tmp_path, {4: None}, keep="last(2)")
    assert sorted(os.listdir(tmp_path)) == ["3", "4"]


def test_pins_are_those_of_one_save_and_not_of_its_label():
    pins = retention.Pins()
    given_up, again = object(), object()
    with pins.lock:
        pins.hold([1, 2], by=given_up)
        pins.hold([2, 3], by=again)
    pins.release(by=given_up)
    assert [pins.has(step) for step in (1, 2, 3)] == [False, True, True]
    pins.release(by=again)
    pins.release(by=again)
    assert not pins.has(3)


RETAIN = """
import sys
from jaxft import records
from jaxft.checkpoint import policies, retention
retention.retain(sys.argv[1], keep=policies.parse_keep("last(1)"), committed=30,
                 in_flight=None, emit=records.ignore_event)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.timeout(300)
def test_killed_between_any_two_acts_of_a_retention(tmp_path, full):
    """The newest step is untouched, and the next start finishes what was begun."""
    base = tmp_path / "base"
    _fill(base, {10: None, 20: None, 30: None}, keep="last(9)")
    calls = "rename,unlink,unlinkat,rmdir"
    trace = ["strace", "-f", "-qq", "-e", f"trace={calls}"]
    program = [sys.executable, "-c", RETAIN]

    def run(root, *options):
        command = [*trace, *options, *program, str(root)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    shutil.copytree(base, tmp_path / "count")
    log = tmp_path / "log"
    done = run(tmp_path / "count", "-o", str(log))
    if done.returncode:
        pytest.skip(f"strace does not work here: {done.stderr[-200:]}")
    inside = [line for line in log.read_text().splitlines() if "= 0" in line]
    found = collections.Counter(re.findall(r"(\w+)\(", "\n".join(inside)))
    assert found["rename"] == 2
    points = [(call, k) for call, number in found.items() for k in range(1, number + 1)]
    for call, k in points if full else points[:: -(-len(points) // 5)]:
        root = tmp_path / f"{call}-{k}"
        shutil.copytree(base, root)
        done = run(root, "-e", f"inject={call}:signal=SIGKILL:when={k}")
        assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), (call, k)
        assert 30 in layout.discover(root).steps
        with manager.CheckpointManager(root, keep="last(1)") as checkpoints:
            assert checkpoints.restore(_state(0)).step == 30
            checkpoints.save(40, _state(40), force=True)
        assert os.listdir(root) == ["40"], (call, k)


def test_a_metric_that_nobody_has_is_told_once():
    events = []

    def emit(kind, /, **fields):
        events.append((kind, fields))

    keep = policies.parse_keep("last(3) | best(2, los) | best(2, loss)")
    watch = retention.MetricWatch(keep, emit=emit)
    watch.look(5, {})
    assert events == []
    watch.look(10, {"loss": 1.0, "accuracy": 0.5})
    watch.look(20, {"loss": 1.0})
    known = ["accuracy", "loss"]
    assert events == [("metric_missing", {"step": 10, "metric": "los", "known": known})]


def test_of_thousands_of_steps_each_is_asked_once(tmp_path, monkeypatch):
    """Retention runs after every save: no step's file is read again by the next."""
    file = f"{layout.MANIFEST_ITEM}/{manifest.MANIFEST_FILE}"
    for step in range(5000):
        for folder in (layout.RUN_ITEM, layout.MANIFEST_ITEM):
            (tmp_path / str(step) / folder).mkdir(parents=True)
        (tmp_path / str(step) / file).write_text('{"healthy":true}')
    opened = collections.Counter()
    read = pathlib.Path.read_bytes

    def count(path):
        opened[path.parent.parent.name] += 1
        return read(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", count)
    for _ in range(2):
        retention.retain(
            str(tmp_path),
            keep=policies.parse_keep("every(1)"),
            committed=4999,
            in_flight=None,
            emit=records.ignore_event,
        )
    assert len(opened) == 5000
    assert set(opened.values()) == {1}
