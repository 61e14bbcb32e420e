"""What the manager proves: health, links, manifests, and that a restore is equal."""

import functools
import itertools
import json
import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft import config, records
from jaxft.checkpoint import judge, manager, manifest, orbax_io, run_record, verify

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


def _state(step, *, bad=None):
    state = {
        "step": step,
        "params": {"w": jnp.full((64, 4), step, jnp.float32), "b": jnp.zeros(4)},
        "opt": {"mu": jnp.full((8,), -jnp.inf, jnp.float32)},
        "frozen": jnp.arange(4096.0),
    }
    if bad is not None:
        state["params"]["w"] = state["params"]["w"].at[3, 1].set(bad)
    return state


def _fill(root, *steps, **settings):
    settings = {"keep": "last(99)", "layout": "files"} | settings
    with manager.CheckpointManager(root, **settings) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, _state(step), force=True)


def _inode(root, step, leaf="frozen"):
    return os.stat(root / str(step) / "state" / leaf / "zarr.json").st_ino


# --- health -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_a_state_that_is_not_finite_is_never_a_resume_point(tmp_path, bad):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, keep="last(1)", emit=events)
    assert checkpoints.save(10, _state(10))
    checkpoints.wait()
    for step in (15, 20):
        assert checkpoints.save(step, _state(step, bad=bad), force=True)
    # It is no failed save: nothing is raised, now or later.
    checkpoints.close()
    assert checkpoints.error() is None
    told = events.of("save_unhealthy")
    assert told == [{"step": s, "leaves": ["params/w"]} for s in (15, 20)]
    assert events.of("save_failed") == []
    assert os.listdir(tmp_path) == ["10"]
    assert checkpoints.last_committed == 10
    assert checkpoints.restore(_state(0)).step == 10
    assert checkpoints.save(25, _state(25))
    checkpoints.close()
    assert os.listdir(tmp_path) == ["25"]


def test_what_must_be_finite_is_the_users_to_say(tmp_path):
    events = Events()
    with manager.CheckpointManager(
        tmp_path / "all", health="**", emit=events
    ) as checkpoints:
        checkpoints.save(1, _state(1))
    assert events.of("save_unhealthy") == [{"step": 1, "leaves": ["opt/mu"]}]
    with manager.CheckpointManager(tmp_path / "none", health="") as checkpoints:
        checkpoints.save(1, _state(1, bad=jnp.nan))
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize(
    ("state", "health", "is_refused"),
    [
        ({"w": np.nan}, None, True),
        ({"mine": {"w": np.nan}}, None, True),
        ({"params": {"w": 1.0}, "best": np.inf}, None, False),
        ({"w": np.nan}, "", False),
    ],
    ids=["bare", "own names", "outside of params", "off"],
)
def test_a_tree_of_ones_own_names_is_asked_as_a_whole(
    tmp_path, state, health, is_refused
):
    state = jax.tree.map(jnp.float32, state)
    chosen = {} if health is None else {"health": health}
    with manager.CheckpointManager(tmp_path, **chosen) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        assert checkpoints.steps() == ([] if is_refused else [1])


@pytest.mark.parametrize("mode", ["full", "sample", "off"])
def test_an_unhealthy_step_of_somebody_else_is_passed_over(tmp_path, mode):
    _fill(tmp_path, 10, 20)
    proof = manifest.read(tmp_path / "20")
    (tmp_path / "20/manifest/metadata").unlink()
    sick = {"healthy": False, "unhealthy": ("params/w",)}
    manifest.write(tmp_path / "20", manifest.dataclasses.replace(proof, **sick))
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, verify=mode, emit=events)
    assert checkpoints.restore(_state(0)).step == 10
    assert events.of("unhealthy") == [{"step": 20, "leaves": ["params/w"]}]
    assert events.of("corrupt") == []
    assert "params/w" in events.of("quarantine")[0]["reason"]


@pytest.mark.parametrize("is_there", [True, False])
def test_only_who_asks_for_no_proof_goes_on_without_a_manifest(tmp_path, is_there):
    _fill(tmp_path, 10, 20)
    file = tmp_path / "20/manifest/metadata"
    data = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(data[:-9])
    restored = manager.CheckpointManager(tmp_path, verify="off").restore(_state(0))
    assert (restored.step, restored.manifest) == (20, None)
    assert manager.CheckpointManager(tmp_path).restore(_state(0)).step == 10


# --- links --------------------------------------------------------------------


def test_unchanged_leaves_are_linked_and_neighbours_share_nothing(tmp_path):
    events = Events()
    steps = range(1, 25)
    _fill(tmp_path, *steps, full_every=6, emit=events)
    inodes = [_inode(tmp_path, step) for step in steps]
    assert all(a != b for a, b in itertools.pairwise(inodes))
    written = {step: manifest.read(tmp_path / str(step)).leaves for step in steps}
    ages = [step - written[step]["frozen"].written_at for step in steps]
    assert max(ages) <= 6
    assert sum(age > 0 for age in ages) >= len(ages) // 2
    assert all(step == written[step]["params/w"].written_at for step in steps)
    commits = {event["step"]: event for event in events.of("save_commit")}
    for step in steps:
        linked = [e for e in written[step].values() if e.written_at != step]
        assert commits[step]["num_linked"] == len(linked)
        assert commits[step]["linked_bytes"] == sum(e.num_bytes for e in linked)
    starts = events.of("save_start")
    assert all(0 <= e["planning_secs"] <= e["blocking_secs"] for e in starts)
    for step in (1, 2, 3, 12, 24):
        assert verify.verify_step(tmp_path / str(step)) == []


def test_links_go_on_after_a_restart_and_outlive_what_they_came_from(tmp_path):
    keep = "last(2)"
    for step in range(1, 7):
        _fill(tmp_path, step, keep=keep)
    assert sorted(os.listdir(tmp_path)) == ["5", "6"]
    entry = manifest.read(tmp_path / "6").leaves["frozen"]
    assert entry.written_at < 5
    checkpoints = manager.CheckpointManager(tmp_path)
    assert checkpoints.restore(_state(0)).num_proven == 5
    assert verify.verify_step(tmp_path / "6") == []


@pytest.mark.parametrize("file", ["zarr.json", "c/0"])
@pytest.mark.parametrize("place", [0, -1])
def test_what_rots_before_it_is_linked_is_not_taken_for_what_was_written(
    tmp_path, file, place
):
    _fill(tmp_path, 1, 2)
    path = tmp_path / "1/state/frozen" / file
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)
    _fill(tmp_path, 3)
    assert _inode(tmp_path, 3) == _inode(tmp_path, 1)
    problems = verify.verify_step(tmp_path / "3")
    assert any(problem.path.startswith("state/frozen") for problem in problems)
    restored = manager.CheckpointManager(tmp_path).restore(_state(0))
    assert restored.step == 2


@pytest.mark.parametrize("settings", [{"full_every": 0}, {"layout": "ocdbt"}])
def test_where_nothing_is_linked(tmp_path, settings):
    events = Events()
    _fill(tmp_path, 1, 2, 3, 4, emit=events, **settings)
    assert [event["num_linked"] for event in events.of("save_commit")] == [0] * 4


def test_a_base_is_not_deleted_while_a_save_links_to_it(tmp_path, monkeypatch):
    """Retention of the save before runs while the next one has not linked yet."""
    gate, planned = threading.Event(), threading.Event()
    events = Events()
    checkpoints = manager.CheckpointManager(
        tmp_path, keep="last(1)", layout="files", emit=events
    )
    retain = checkpoints._retain

    def wait(committed):
        if committed == 2:
            assert planned.wait(60)
        retain(committed)
        gate.set()

    monkeypatch.setattr(checkpoints, "_retain", wait)
    checkpoints.save(1, _state(1), force=True)
    gate.clear()
    checkpoints.save(2, _state(2), force=True)
    real = orbax_io.write_async

    def start(*args, **settings):
        assert settings["links"]
        planned.set()
        assert gate.wait(60)
        return real(*args, **settings)

    monkeypatch.setattr(orbax_io, "write_async", start)
    checkpoints.save(3, _state(3), force=True)
    checkpoints.close()
    assert events.of("save_failed") == []
    assert os.listdir(tmp_path) == ["3"]
    assert verify.verify_step(tmp_path / "3") == []


# --- layouts ------------------------------------------------------------------


def test_auto_says_once_which_layout_and_why(tmp_path):
    events = Events()
    _fill(tmp_path, 1, 2, 3, layout="auto", emit=events)
    (told,) = events.of("checkpoint_layout")
    assert told["layout"] == "files"
    assert told["reason"]


def test_the_layout_may_change_between_runs(tmp_path):
    for step, (array_layout, codec) in enumerate(
        [("files", "raw"), ("ocdbt", "zstd"), ("files", "lz4")], 1
    ):
        _fill(tmp_path, step, layout=array_layout, codec=codec)
        checkpoints = manager.CheckpointManager(tmp_path)
        assert checkpoints.restore(_state(0)).step == step
        assert checkpoints.restore(_state(0)).num_proven == 5


# --- proofs of a restore ------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "num_proven"), [("full", 5), ("sample", 1), ("off", 0)]
)
def test_how_much_is_proven_is_told(tmp_path, mode, num_proven):
    _fill(tmp_path, 1)
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, verify=mode, emit=events)
    assert checkpoints.restore(_state(0)).num_proven == num_proven
    (told,) = events.of("restore")
    assert (told["verify"], told["num_proven"]) == (mode, num_proven)
    assert 0 <= told["verify_secs"] <= told["secs"]
    assert events.of("unverified") == []


def _flip(path, *, share=0.5):
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_leaf_called_like_a_database_folder_is_proven_as_well(tmp_path):
    """Its notes, too: a flip in them is named, whatever the reader makes of it."""
    with manager.CheckpointManager(tmp_path, layout="files") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"d": jnp.arange(8.0) + step}, force=True)
    note = tmp_path / "2/state/d/zarr.json"
    _flip(note, share=0)
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, verify="sample", emit=events)
    assert checkpoints.restore({"d": jnp.zeros(8)}).step == 1
    assert events.of("corrupt")[0]["path"] == "state/d/zarr.json"
    assert "sha256" in events.of("corrupt")[0]["reason"]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_flip_in_a_large_file_of_a_database_is_never_restored(tmp_path, share):
    target = {"w": jnp.arange(2.0**21), "b": jnp.zeros(4)}
    with manager.CheckpointManager(tmp_path, layout="ocdbt") as checkpoints:
        for step in (1, 2):
            state = {"w": target["w"] + step, "b": target["b"] + step}
            checkpoints.save(step, state, force=True)
    files = manifest.read(tmp_path / "2").files
    large = [path for path, entry in files.items() if not entry.sha256]
    assert large
    _flip(
        max((tmp_path / "2" / path for path in large), key=os.path.getsize), share=share
    )
    events = Events()
    restored = manager.CheckpointManager(tmp_path, emit=events).restore(target)
    assert restored.step == 1
    assert np.array_equal(restored.state["w"], np.arange(2.0**21) + 1)
    assert events.of("corrupt")[0]["step"] == 2


def test_a_restore_reads_the_manifest_once_and_looks_at_each_file_once(
    tmp_path, monkeypatch
):
    _fill(tmp_path, 1)
    checkpoints = manager.CheckpointManager(tmp_path)
    calls = []

    def count(real, *args, **settings):
        calls.append(real.__name__)
        return real(*args, **settings)

    for real in (manifest.read, manifest.check_files):
        counted = functools.partial(count, real)
        monkeypatch.setattr(manifest, real.__name__, counted)
    assert checkpoints.restore(_state(0)).num_proven == 5
    assert calls == ["read", "check_files"]


def _old_step(root, step):
    """As a jaxft without manifests wrote it."""
    stored, types = manager.leaves.encode(_state(step))
    record = run_record.make_record(step, time_secs=0.0, state=types)
    root.mkdir(exist_ok=True)
    write = orbax_io.write_async(
        os.fspath(root / str(step)), stored, record=record, timeout_secs=60.0
    )
    write.begin()
    assert write.wait(60)
    assert write.error() is None


def test_a_step_without_manifest_is_restored_and_told(tmp_path):
    _old_step(tmp_path, 1)
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, emit=events)
    restored = checkpoints.restore(_state(0))
    assert restored.step == 1
    assert restored.num_proven == 0
    assert np.array_equal(restored.state["frozen"], np.arange(4096.0))
    assert [event["step"] for event in events.of("unverified")] == [1]
    assert events.of("restore")[0]["verify"] == "none"
    # Its successor has one, and is not linked to it.
    checkpoints.save(2, _state(2))
    checkpoints.close()
    assert manifest.read(tmp_path / "2").leaves["frozen"].written_at == 2


def test_a_step_that_has_lost_its_manifest_is_damaged(tmp_path):
    _fill(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "2" / "manifest")
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, emit=events)
    assert checkpoints.restore(_state(0)).step == 1
    assert events.of("corrupt")[0]["path"] == "manifest/metadata"
    assert "missing" in events.of("corrupt")[0]["reason"]


def test_a_newer_manifest_stops_and_leaves_everything(tmp_path):
    _fill(tmp_path, 1)
    file = tmp_path / "1/manifest/metadata"
    body = json.loads(file.read_text())
    del body["sha256"]
    body["format"]["version"] = 2
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    file.unlink()
    file.write_bytes(text + manifest._seal(text))
    with pytest.raises(records.FaultError, match="jaxft-manifest 2"):
        manager.CheckpointManager(tmp_path).restore(_state(0))
    assert os.listdir(tmp_path) == ["1"]


def test_values_that_change_on_the_way_are_this_machine_s_fault(tmp_path, monkeypatch):
    """The disk is right: nothing is quarantined, and nothing is trained on."""
    _fill(tmp_path, 1, 2)
    read = orbax_io.read_state

    def flip(*args, **settings):
        state = read(*args, **settings)
        state["frozen"] = state["frozen"].at[17].add(1.0)
        return state

    monkeypatch.setattr(judge.orbax_io, "read_state", flip)
    with pytest.raises(records.FaultError, match="frozen: its values have changed"):
        manager.CheckpointManager(tmp_path).restore(_state(0))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_random_walk_over_devices_and_meshes(tmp_path, full):
    """Twelve hops, two in the sample: the fingerprints stay those of the first step."""
    rng = np.random.default_rng(0)
    shapes = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4)]
    specs = [("a", "b"), ("b", "a"), ("a", None), (None, ("a", "b")), (None, None)]

    def placed(step, shape):
        devices = np.asarray(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        mesh = Mesh(devices, ("a", "b"))
        chosen = [specs[i] for i in rng.integers(len(specs), size=3)]

        def put(value, spec):
            sharding = NamedSharding(mesh, PartitionSpec(*spec[: value.ndim]))
            return jax.device_put(value, sharding)

        values = np.random.default_rng(1)
        return {
            "step": step,
            "w": put(values.normal(size=(16, 24)).astype(np.float32), chosen[0]),
            "h": put(jnp.asarray(values.normal(size=(8, 8)), jnp.bfloat16), chosen[1]),
            "u": put(jnp.asarray(values.integers(0, 16, (8, 8)), jnp.uint4), chosen[2]),
            "rng": put(jax.random.key(3), ()),
            "n": np.arange(5),
        }

    want = None
    previous = (1, 1)
    state = placed(0, previous)
    checkpoints = manager.CheckpointManager(tmp_path, keep="last(2)")
    for hop in range(12 if full else 2):
        checkpoints.save(hop, state | {"step": hop}, force=True)
        checkpoints.wait()
        leaves = manifest.read(tmp_path / str(hop)).leaves
        found = {p: str(e.fingerprint) for p, e in leaves.items() if p != "step"}
        want = want or found
        assert found == want, hop
        others = [shape for shape in shapes if shape != previous]
        previous = others[rng.integers(len(others))]
        target = placed(hop, previous)
        checkpoints = manager.CheckpointManager(tmp_path, keep="last(2)")
        restored = checkpoints.restore(target)
        assert restored.step == hop
        assert restored.num_proven == 6
        state = restored.state
        assert state["w"].sharding == target["w"].sharding


def test_settings_are_named_when_they_are_wrong(tmp_path):
    with pytest.raises(config.ConfigError) as error:
        manager.CheckpointManager(tmp_path, verify="strict")
    assert error.value.path == "checkpoint.verify"


def test_a_rollback_begins_a_timeline(tmp_path):
    events = Events()
    checkpoints = manager.CheckpointManager(tmp_path, keep="last(9)", emit=events)
    for step in (10, 20, 30):
        checkpoints.save(step, _state(step), force=True)
    checkpoints.rollback(10, reason="loss spike", skip=(10, 12))
    assert checkpoints.steps() == [10]
    assert checkpoints.last_committed == 10
    restored = checkpoints.restore(_state(0))
    assert (restored.step, restored.record["timeline"]) == (10, 0)
    for step in (15, 20):
        assert checkpoints.save(step, _state(step), force=True)
    checkpoints.close()
    restored = manager.CheckpointManager(tmp_path).restore(_state(0))
    assert (restored.step, restored.record["timeline"]) == (20, 1)
    assert manifest.read(tmp_path / "20").timeline == 1
    assert {"20.abandoned-t0", "30.abandoned-t0"} <= set(os.listdir(tmp_path))
    assert pathlib.Path(tmp_path, "decisions", "1.json").is_file()
