"""What a start does with what it finds."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxft import config, records
from jaxft.checkpoint import (
    judge,
    layout,
    leaf_requests,
    manager,
    manifest,
    restore,
    step_files,
)

pytestmark = [
    pytest.mark.device,
    # Reads that Orbax leaves behind when another one fails may end after the test.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self if name == kind]


def _state(step):
    rng = np.random.default_rng(step)
    return {
        "w": jnp.asarray(rng.normal(size=(64, 8)).astype(np.float32)),
        "zeros": jnp.zeros((32, 8)),
        "n": np.arange(step, step + 5),
        "text": f"step {step}",
        "rng": jax.random.key(step),
        "step": step,
    }


def _fill(root, *steps):
    with manager.CheckpointManager(root, keep="last(99)") as checkpoints:
        for step in steps:
            assert checkpoints.save(step, _state(step), force=True)


def _assert_is(restored, step):
    assert restored.step == step
    wanted = _state(step)
    for name in ("w", "zeros", "n"):
        assert np.array_equal(restored.state[name], wanted[name]), name
    assert restored.state["text"] == wanted["text"]
    assert jnp.all(
        jax.random.key_data(restored.state["rng"]) == jax.random.key_data(wanted["rng"])
    )


def test_nothing_there_is_a_fresh_start(tmp_path):
    events = Events()
    assert restore.restore_newest(tmp_path / "no", _state(0), emit=events) is None
    assert len(events.of("fresh_start")) == 1
    assert not (tmp_path / "no").exists()


def test_only_unfinished_steps_are_a_fresh_start_that_says_so(tmp_path):
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "6.orbax-checkpoint-tmp-sealed").mkdir()
    events = Events()
    assert restore.restore_newest(tmp_path, _state(0), emit=events) is None
    assert "2 unfinished" in events.of("fresh_start")[0]["reason"]


def test_a_foreign_folder_named_like_a_step_is_reported_and_left(tmp_path):
    _fill(tmp_path, 100)
    (tmp_path / "999").mkdir()
    events = Events()
    restored = restore.restore_newest(tmp_path, _state(0), emit=events)
    _assert_is(restored, 100)
    assert events.of("not_a_checkpoint")[0]["path"] == str(tmp_path / "999")
    assert (tmp_path / "999").is_dir()
    assert manager.CheckpointManager(tmp_path).latest() == 100


@pytest.mark.parametrize("part", ["state", "manifest", "run", "_CHECKPOINT_METADATA"])
def test_a_rename_that_copies_and_is_killed_makes_no_step(tmp_path, part):
    """As in a folder of an object store: part of a step, and all of it beside it."""
    _fill(tmp_path, 10, 20)
    step, sealed = tmp_path / "20", tmp_path / "20.orbax-checkpoint-tmp-sealed"
    step.rename(sealed)
    step.mkdir()
    copy = shutil.copytree if (sealed / part).is_dir() else shutil.copy
    copy(sealed / part, step / part)
    with manager.CheckpointManager(tmp_path) as checkpoints:
        _assert_is(checkpoints.restore(_state(0)), 10)
        assert checkpoints.save(20, _state(20))
    _assert_is(restore.restore_newest(tmp_path, _state(0)), 20)
    assert not layout.discover(tmp_path).unfinished


def test_what_somebody_else_put_beside_a_sealed_step_is_not_ours(tmp_path):
    _fill(tmp_path, 10, 20)
    (tmp_path / "20").rename(tmp_path / "20.orbax-checkpoint-tmp-sealed")
    theirs = tmp_path / "20" / "params" / "data"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    assert [path for path, _ in layout.discover(tmp_path).foreign] == [
        str(tmp_path / "20")
    ]
    with manager.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(30, _state(30))
    assert theirs.read_text() == "theirs"


def test_an_explicit_step_is_never_replaced(tmp_path):
    _fill(tmp_path, 10, 20)
    _assert_is(restore.restore_newest(tmp_path, _state(0), step=10), 10)
    for root, step in ((tmp_path, 15), (tmp_path / "typo", 10)):
        with pytest.raises(records.FaultError, match=f"step {step} is not in") as error:
            restore.restore_newest(root, _state(0), step=step)
        assert error.value.fault.exit_code == 66
    shutil.rmtree(tmp_path / "10" / "state" / "w")
    with pytest.raises(records.FaultError, match=r"step 10 .* cannot be read"):
        restore.restore_newest(tmp_path, _state(0), step=10)
    assert (tmp_path / "10").is_dir()


def test_an_unreadable_root_is_neither_empty_nor_damaged(tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(records.FaultError) as error:
        restore.restore_newest(tmp_path / "root", _state(0))
    assert error.value.fault.kind is records.FaultKind.CONFIG
    assert (tmp_path / "root").read_text() == "a file"


def _files(folder):
    return sorted(
        os.path.relpath(os.path.join(where, file), folder)
        for where, _, files in os.walk(folder)
        for file in files
    )


@pytest.mark.parametrize("damage", ["delete", "truncate", "empty"])
def test_damage_of_any_one_file_falls_back_and_is_never_a_wrong_value(
    tmp_path, damage, full
):
    _fill(tmp_path / "good", 10, 20)
    # What flipped bits do is in test_flips.py.
    names = _files(tmp_path / "good/20")[:: 1 if full else 4]
    fallbacks = 0
    for name in names:
        root = tmp_path / "root"
        shutil.copytree(tmp_path / "good", root)
        victim = root / "20" / name
        victim.chmod(0o644)
        if damage == "delete":
            victim.unlink()
        else:
            size = victim.stat().st_size
            os.truncate(victim, size // 2 if damage == "truncate" else 0)
        events = Events()
        restored = restore.restore_newest(root, _state(0), emit=events)
        if restored.step == 20:
            _assert_is(restored, 20)
        else:
            fallbacks += 1
            _assert_is(restored, 10)
            (event,) = events.of("quarantine")
            assert event["step"] == 20
            assert event["reason"]
            assert event["path"] == str(root / "20.quarantined-1")
            assert os.path.isdir(event["path"])
            # The next start goes the same way without a word.
            _assert_is(restore.restore_newest(root, _state(0)), 10)
        shutil.rmtree(root)
    assert fallbacks == len(names)


def test_a_folder_is_gone(tmp_path):
    _fill(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "20" / "state")
    _assert_is(restore.restore_newest(tmp_path, _state(0)), 10)
    assert (tmp_path / "20.quarantined-1").is_dir()


def test_a_step_under_another_name_is_damage(tmp_path):
    _fill(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / "30")
    events = Events()
    _assert_is(restore.restore_newest(tmp_path, _state(0), emit=events), 10)
    assert events.of("quarantine")[0]["reason"] == "it says that it is step 10"


def _change(record, change):
    record.chmod(0o644)
    record.write_text(json.dumps(change(json.loads(record.read_text()))))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record | {"format": {"name": "jaxft-checkpoins", "version": 1}},
        lambda record: record | {"run": None},
        lambda record: record | {"metrics": []},
        lambda record: record | {"data": {"step": 7}},
        lambda record: record | {"state": {"w": "int"}} | {"step": None},
    ],
)
def test_a_record_that_cannot_be_understood_is_damage(tmp_path, change):
    with manager.CheckpointManager(tmp_path) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, _state(step), data={"step": step}, force=True)
    _change(tmp_path / "20/run/metadata", change)

    def check(record):
        return "" if record["data"]["step"] == record["step"] else "another position"

    events = Events()
    with manager.CheckpointManager(tmp_path, emit=events) as checkpoints:
        assert checkpoints.latest() == 20
        _assert_is(checkpoints.restore(_state(0), check=check), 10)
        assert checkpoints.last_committed == 10
        assert events.of("quarantine")[0]["step"] == 20
        assert checkpoints.save(20, _state(20))
    assert sorted(os.listdir(tmp_path)) == ["10", "20", "20.quarantined-1"]
    _assert_is(restore.restore_newest(tmp_path, _state(0)), 20)


def test_a_step_without_its_record_is_still_ours(tmp_path):
    _fill(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "20/run")
    _assert_is(restore.restore_newest(tmp_path, _state(0)), 10)
    assert (tmp_path / "20.quarantined-1/state").is_dir()


@pytest.mark.parametrize("item", ["default", "state"])
@pytest.mark.parametrize("ours", [(), (10,), (10, 40)])
def test_steps_of_a_plain_orbax_are_never_passed_over(tmp_path, item, ours):
    _fill(tmp_path, *ours)
    saved = ocp.args.PyTreeSave({"w": np.ones(3)})
    args = saved if item == "default" else ocp.args.Composite(state=saved)
    with ocp.CheckpointManager(tmp_path) as theirs:
        for step in (20, 30):
            theirs.save(step, args=args)
    before = _files(tmp_path)
    if 40 in ours:  # An older one is no reason to stop.
        _assert_is(restore.restore_newest(tmp_path, _state(0)), 40)
        manager.CheckpointManager(tmp_path).check(_state(0))
    else:
        with pytest.raises(records.FaultError) as fault:
            restore.restore_newest(tmp_path, _state(0))
        assert fault.value.fault.kind is records.FaultKind.CONFIG
        with pytest.raises(config.ConfigError) as error:
            manager.CheckpointManager(tmp_path).check(_state(0))
        for line in (str(fault.value), str(error.value)):
            assert str(tmp_path / "30") in line or str(tmp_path / "20") in line
            assert "use another workdir, or move it away" in line
            assert "\n" not in line
    assert _files(tmp_path) == before


def test_none_left_is_an_error_and_stays_one(tmp_path):
    _fill(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / str(step) / "run" / "metadata").unlink()
    for _ in range(2):
        with pytest.raises(records.FaultError, match="no readable step") as error:
            restore.restore_newest(tmp_path, _state(0))
        assert error.value.fault.exit_code == 66
    assert sorted(os.listdir(tmp_path)) == ["10.quarantined-1", "20.quarantined-1"]


def test_a_newer_format_stops_and_leaves_everything(tmp_path):
    _fill(tmp_path, 10, 20)
    record = tmp_path / "20/run/metadata"
    text = record.read_text().replace('"version": 1', '"version": 2')
    record.chmod(0o644)
    record.write_text(text)
    with pytest.raises(records.FaultError, match="jaxft-checkpoint 2"):
        restore.restore_newest(tmp_path, _state(0))
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_a_target_that_differs_never_quarantines(tmp_path):
    _fill(tmp_path, 10, 20)
    with pytest.raises(
        leaf_requests.TargetMismatchError, match="extra: not in the checkpoint"
    ):
        restore.restore_newest(tmp_path, _state(0) | {"extra": 1})
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_a_failure_that_is_not_the_files_never_quarantines(tmp_path, monkeypatch):
    """The same bytes can be read without the target: so they are not at fault."""
    _fill(tmp_path, 10, 20)

    def fail(*args, **kwargs):
        raise ValueError("devices are gone")

    monkeypatch.setattr(judge.orbax_io, "read_state", fail)
    with pytest.raises(ValueError, match="devices are gone"):
        restore.restore_newest(tmp_path, _state(0))
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
FORBIDDEN = """
import os, sys
import jax.numpy as jnp
from jaxft import records
from jaxft.checkpoint import manager
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for root in sys.argv[1:]:
    checkpoints = manager.CheckpointManager(root, emit=records.ignore_event)
    for ask in (checkpoints.latest, lambda: checkpoints.restore({"w": jnp.ones(3)})):
        try:
            print(ask())
        except records.FaultError as error:
            print(int(error.fault.exit_code), error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_may_not_be_read_is_left_alone():
    """Another user's run: neither damaged nor absent, and never a fresh start."""
    # Not below tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        good = pathlib.Path(folder, "good")
        with manager.CheckpointManager(good) as checkpoints:
            for step in (10, 20):
                checkpoints.save(step, {"w": jnp.zeros(3)}, force=True)
        parts = [".", "20", *(f"20/{name}" for name in _parts(good / "20"))]
        roots = [pathlib.Path(folder, str(i)) for i in range(len(parts))]
        for root, closed in zip(roots, parts, strict=True):
            shutil.copytree(good, root)
            os.chmod(root / closed, 0o700)
        _need_an_interpreter_for_all()
        done = subprocess.run(
            [sys.executable, "-c", FORBIDDEN, *map(str, roots)],
            # The programs of this session are not that user's to write.
            env={k: v for k, v in os.environ.items() if k != _PROGRAMS},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        answers = iter(done.stdout.splitlines())
        for root, closed in zip(roots, parts, strict=True):
            latest, restored = next(answers), next(answers)
            assert sorted(os.listdir(root)) == ["10", "20"], (closed, restored)
            if "step=20" in restored:
                assert closed not in NEEDED
                continue
            assert restored.startswith(f"78 checkpoints cannot be read: {root}")
            assert str((root / closed).resolve()) in restored, (closed, restored)
            assert latest == (restored if closed == "." else "20")
            assert "Permission denied" in restored


def _need_an_interpreter_for_all():
    """Skips where the environment or the checkout is closed to other users."""
    enter = FORBIDDEN.partition("for root in")[0]
    enter += "import jax\nfor module in (jax, manager): open(module.__file__)\n"
    done = subprocess.run([sys.executable, "-c", enter], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"another user cannot run jaxft here: {done.stderr[-200:]}")


NEEDED = (
    *(".", "20", "20/run", "20/run/metadata", "20/state", "20/state/_METADATA"),
    *("20/manifest", "20/manifest/metadata", "20/state/w", "20/state/w/zarr.json"),
)


def _parts(step):
    """Every file and folder below a step."""
    return [str(path.relative_to(step)) for path in sorted(step.rglob("*"))]


@pytest.mark.parametrize(
    "number",
    [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EACCES],
)
def test_a_store_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, number):
    """Nobody can make a mount go away in a test: `open` says so of one file."""
    _fill(tmp_path, 10, 20)
    victim = tmp_path / "20/state/w/zarr.json"
    real = open

    def fail(path, *args, **kwargs):
        if os.fspath(path) == os.fspath(victim):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    for module in (judge, manifest, step_files):
        monkeypatch.setattr(module, "open", fail, raising=False)
    with pytest.raises(records.FaultError, match=os.strerror(number)) as error:
        restore.restore_newest(tmp_path, _state(0))
    assert error.value.fault.kind is records.FaultKind.CONFIG
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]
    monkeypatch.undo()
    _assert_is(restore.restore_newest(tmp_path, _state(0)), 20)


def test_a_process_without_files_is_no_damage(tmp_path, monkeypatch):
    _fill(tmp_path, 10, 20)

    def fail(path, *args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files", path)

    for module in (judge, manifest, step_files):
        monkeypatch.setattr(module, "open", fail, raising=False)
    with pytest.raises(OSError, match="Too many open files"):
        restore.restore_newest(tmp_path, _state(0))
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_an_input_output_error_at_the_step_itself_is_damage(tmp_path):
    _fill(tmp_path, 10)
    os.symlink(tmp_path / "20", tmp_path / "20")  # a loop
    events = Events()
    _assert_is(restore.restore_newest(tmp_path, _state(0), emit=events), 10)
    assert events.of("quarantine")[0]["step"] == 20
    assert events.of("not_a_checkpoint") == []
