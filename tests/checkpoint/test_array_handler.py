"""How arrays lie on disk: checked, linked, within a budget, and plain Orbax."""

import dataclasses
import inspect
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata import (  # noqa: TID251
    array_metadata_store,
    sharding,
)
from orbax.checkpoint._src.serialization import (  # noqa: TID251
    ocdbt_utils,
    replica_slices,
    tensorstore_utils,
)

from jaxft.checkpoint import (
    array_snapshot,
    chunking,
    leaves,
    orbax_io,
    quiet,
    run_record,
)
from jaxft.checkpoint.array_handler import ArrayOptions
from jaxft.checkpoint.leaf_links import Links

pytestmark = pytest.mark.device

STORES = [(a, b) for a in ("files", "ocdbt") for b in ("raw", "lz4", "zstd")]


def make_state():
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def place(value, *axes):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    rng = np.random.default_rng(0)
    return {
        "rows": place(rng.random((24, 6), dtype=np.float32), "data"),
        "tiles": place(jnp.asarray(rng.random((8, 4)), jnp.bfloat16), "data", "model"),
        "everywhere": place(np.arange(7, dtype=np.int8)),
        "zeros": place(np.zeros(16, np.float32)),
        "one": jnp.float32(3),
        "bits": jnp.array([True, False, True]),
        "complex": jnp.array([1 + 2j], jnp.complex64),
        "four": jnp.array([-8, 7], jnp.int4),
        "key": jax.random.key(3),
        "numpy": np.arange(12.0).reshape(3, 4),
        "nested": [{"a/b": jnp.ones(3)}],
        "int": 7,
        "float": -0.0,
        "bool": True,
        "text": "t",
    }


def save(path, state, **options):
    stored, types = leaves.encode(state)
    record = run_record.make_record(1, time_secs=0.0, state=types)
    write = orbax_io.write_async(
        str(path), stored, record=record, timeout_secs=60, **options
    )
    write.begin()
    assert write.wait(60)
    if error := write.error():
        raise error


def restore(path, target, **options):
    record = run_record.read_record(path)
    return orbax_io.read_state(str(path), target, record=record, **options)


def to_plain(state):
    """Path -> bytes, for comparison."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if isinstance(leaf, jax.Array) and leaves.is_key(leaf.dtype):
            leaf = jax.random.key_data(leaf)
        name = jax.tree_util.keystr(path)
        found[name] = leaf if isinstance(leaf, str) else np.asarray(leaf).tobytes()
    return found


def make_links(step, names):
    return Links.known({name: str(step / "state" / name) for name in names})


BARE = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
sys.path.insert(0, sys.argv[2])
import test_array_handler as tests
wanted = tests.to_plain(tests.make_state())
with ocp.CheckpointManager(sys.argv[1]) as stock:
    for step in stock.all_steps():
        state = stock.restore(step)["state"]
        found = tests.to_plain(state)
        bad = [name for name in wanted if found[name] != wanted[name]]
        spec = str(state["tiles"].sharding.spec)
        print(step, len(found), bad, spec, str(jax.random.key_impl(state["key"])))
"""


def test_an_untouched_orbax_reads_every_layout_and_codec_linked_or_not(tmp_path):
    state = make_state()
    for step, (layout, codec) in enumerate(STORES):
        options = ArrayOptions(layout=layout, codec=codec)
        save(tmp_path / str(step), state, arrays=options, seal=write_manifest)
    _, types = leaves.encode(state)
    names = [path.replace("/", ".") for path in run_record.leaf_specs({"state": types})]
    names = [name for name in names if name not in ("nested.0.a.b", "text")]
    names.append("nested.0.a/b")
    links = make_links(tmp_path / "1", names)
    files = ArrayOptions(layout="files", codec="lz4")
    save(tmp_path / "6", state, arrays=files, links=links, seal=write_manifest)
    links = make_links(tmp_path / "6", names[::2])
    save(tmp_path / "7", state, arrays=files, links=links, seal=write_manifest)
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "6")
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path), str(pathlib.Path(__file__).parent)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    spec = str(PartitionSpec("data", "model"))
    rest = f"{len(jax.tree.leaves(state))} [] {spec} threefry2x32"
    assert done.stdout.splitlines() == [f"{step} {rest}" for step in (0, 2, 3, 4, 5, 7)]
    for step in (0, 2, 3, 4, 5, 7):
        assert to_plain(restore(tmp_path / str(step), state)) == to_plain(state)


def write_manifest(folder):
    (folder / "manifest").mkdir()
    (folder / "manifest" / "metadata").write_text('{"made": "by the seal"}')


def test_what_the_seal_writes_is_committed_and_what_it_raises_fails_the_save(tmp_path):
    seen = []

    def seal(folder):
        seen.append((folder.name, (tmp_path / "1").exists()))
        assert (folder / "state/_METADATA").exists()
        assert (folder / "run/metadata").exists()
        write_manifest(folder)

    save(tmp_path / "1", {"a": jnp.ones(2)}, seal=seal)
    assert seen == [("1.orbax-checkpoint-tmp-sealed", False)]
    assert (tmp_path / "1/manifest/metadata").stat().st_mode & 0o222 == 0

    def refuse(folder):
        raise ArithmeticError("not this one")

    with pytest.raises(ArithmeticError, match="not this one"):
        save(tmp_path / "2", {"a": jnp.ones(2)}, seal=refuse)
    assert not (tmp_path / "2").exists()


def test_a_linked_leaf_shares_its_files_and_survives_the_first_step(tmp_path):
    state = {"a": jnp.arange(5.0), "b": jnp.ones(3), "n": 4, "m": np.ones(2)}
    files = ArrayOptions(layout="files")
    save(tmp_path / "1", state, arrays=files)
    links = make_links(tmp_path / "1", ["a", "n", "m"])
    save(tmp_path / "2", state | {"b": jnp.zeros(3)}, arrays=files, links=links)
    for name, num_links in {"a": 2, "b": 1, "n": 2, "m": 2}.items():
        found = [p for p in (tmp_path / "2/state" / name).rglob("*") if p.is_file()]
        assert len(found) == 2
        assert {path.stat().st_nlink for path in found} == {num_links}
        assert {path.stat().st_mode & 0o222 for path in found} == {0}
    text = (tmp_path / "2/state/array_metadatas/process_0").read_text()
    entries = json.loads(text)["array_metadatas"]
    assert sorted(e["array_metadata"]["param_name"] for e in entries) == ["a", "b"]
    assert len(json.loads((tmp_path / "2/state/_sharding").read_text())) == 2
    shutil.rmtree(tmp_path / "1")
    found = restore(tmp_path / "2", state)
    assert to_plain(found) == to_plain(state | {"b": jnp.zeros(3)})


def test_links_that_cannot_be_made_fail_the_save(tmp_path):
    state = {"a": jnp.arange(5.0)}
    files = ArrayOptions(layout="files")
    with pytest.raises(FileNotFoundError):
        save(
            tmp_path / "2",
            state,
            arrays=files,
            links=make_links(tmp_path / "1", ["a"]),
        )
    with pytest.raises(ValueError, match="ocdbt has no files to link"):
        save(tmp_path / "3", state, links=make_links(tmp_path / "1", ["a"]))
    assert not (tmp_path / "2").exists()
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize("memory_bytes", [2**30, 64])
def test_what_is_linked_may_be_decided_later(tmp_path, memory_bytes):
    """Unless not all leaves can be held until then: there it is waited for."""
    state = {name: jnp.arange(8.0) + i for i, name in enumerate("abc")}
    state |= {"n": np.arange(4), "m": 3}
    files = ArrayOptions(layout="files", memory_bytes=memory_bytes)
    save(tmp_path / "1", state, arrays=files)
    asked = []

    def decide():
        asked.append(threading.current_thread() is threading.main_thread())
        return make_links(tmp_path / "1", ["a", "n"]).decide()

    links = Links(possible=frozenset("abn"), decide=decide)
    save(tmp_path / "2", state, arrays=files, links=links)
    assert any(asked) == (memory_bytes == 64)
    for name in ("a", "b", "c", "n", "m"):
        files = [p for p in (tmp_path / "2/state" / name).rglob("*") if p.is_file()]
        is_linked = {path.stat().st_nlink == 2 for path in files}
        assert is_linked == {name in "an"}
    shutil.rmtree(tmp_path / "1")
    assert to_plain(restore(tmp_path / "2", state)) == to_plain(state)


def test_a_decision_that_fails_fails_the_save(tmp_path):
    def decide():
        raise OSError("no digest")

    links = Links(possible=frozenset("a"), decide=decide)
    files = ArrayOptions(layout="files")
    with pytest.raises(OSError, match="no digest"):
        save(tmp_path / "2", {"a": jnp.zeros(3)}, arrays=files, links=links)
    assert not (tmp_path / "2").exists()


# Reads that Orbax leaves behind when another one fails may end after the test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("layout", "codec"), STORES)
def test_a_flipped_bit_in_a_chunk_is_an_error_and_no_value(tmp_path, layout, codec):
    values = np.random.default_rng(0).random(4096, dtype=np.float32)
    state = {"w": jnp.asarray(values), "n": values.astype(np.float64)}
    save(tmp_path / "1", state, arrays=ArrayOptions(layout=layout, codec=codec))
    assert to_plain(restore(tmp_path / "1", state)) == to_plain(state)
    for seed in range(4):
        path = max(
            (p for p in (tmp_path / "1").rglob("*") if p.is_file()),
            key=lambda p: p.stat().st_size,
        )
        path.chmod(0o600)
        good = path.read_bytes()
        bad = bytearray(good)
        size = min(len(bad), 8192)
        bad[np.random.default_rng(seed).integers(size)] ^= 1 << seed
        path.write_bytes(bad)
        with quiet.quiet_orbax():
            with pytest.raises(Exception, match=r"(?s)."):
                restore(tmp_path / "1", state)
            quiet.drain()
        path.write_bytes(good)


def test_a_missing_chunk_is_an_error_whatever_the_notes_of_orbax_say(tmp_path):
    state = {"w": jnp.zeros(4)}
    save(tmp_path / "1", state, arrays=ArrayOptions(layout="files"))
    assert (tmp_path / "1/state/w/c/0").exists()  # though it is all zeros
    notes = tmp_path / "1/state/_METADATA"
    notes.chmod(0o600)
    text = notes.read_text()
    changed = text.replace(
        '"store_array_data_equal_to_fill_value": true',
        '"store_array_data_equal_to_fill_value": false',
    )
    assert changed != text
    notes.write_text(changed)
    (tmp_path / "1/state/w/c/0").unlink()
    with pytest.raises(ValueError, match="missing"):
        restore(tmp_path / "1", state)


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_a_small_budget_only_costs_time(tmp_path, layout):
    mesh = jax.make_mesh((8,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    big = np.random.default_rng(0).random((1031, 1024), dtype=np.float32)
    state = {
        "prime": jnp.asarray(big),
        "rows": jax.device_put(big[:1024], rows),
        "numpy": big[:500],
    }
    small = ArrayOptions(layout=layout, memory_bytes=2**19)
    save(tmp_path / "1", state, arrays=small)
    if layout == "files":
        chunks = [p for p in (tmp_path / "1/state").rglob("c/**/*") if p.is_file()]
        assert max(p.stat().st_size for p in chunks) <= small.chunk_bytes + 4
        assert len(chunks) > 100
    target = state | {"rows": jax.device_put(big[:1024], columns)}
    for memory_bytes in (2**19, 2**40):
        found = restore(tmp_path / "1", target, memory_bytes=memory_bytes)
        assert found["rows"].sharding == columns
        assert to_plain(found) == to_plain(state)


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_what_is_written_before_the_call_returns_finds_its_folder(tmp_path, layout):
    """Leaves beyond the budget are; Orbax would make the folder in another thread."""
    state = {"large": jnp.arange(2.0**18), "small": jnp.ones(3), "n": np.ones(9)}
    small = ArrayOptions(layout=layout, memory_bytes=2**18)
    for step in range(12):
        save(tmp_path / str(step), state, arrays=small)
    found = restore(tmp_path / "11", state)
    np.testing.assert_array_equal(found["large"], state["large"])


def test_leaves_are_taken_in_groups_that_fit():
    pairs = [(jnp.zeros(n), n) for n in (64, 128, 128, 300, 1)]
    groups = array_snapshot.split(pairs, max_bytes=1024)
    assert [[n for _, n in group] for group in groups] == [[64, 128], [128], [300], [1]]
    assert array_snapshot.split([], max_bytes=1024) == [[]]
    assert array_snapshot.split(pairs, max_bytes=2**40) == [pairs]


def test_chunks_cover_their_part_and_fit():
    shapes = [(7,), (1031, 3), (64, 1024), (3, 5, 7), (1, 4096), (2, 1, 513), ()]
    for shape in shapes:
        for divisor in (1, 2, 4):
            if divisor > 1 and (not shape or shape[0] % divisor):
                continue
            part = (shape[0] // divisor, *shape[1:]) if shape else ()
            for max_bytes in (8, 100, 5000, 10**6):
                chunk = chunking.choose_chunk_shape(
                    shape, part, item_bytes=4, max_bytes=max_bytes
                )
                assert len(chunk) == len(shape)
                assert all(1 <= c <= p for c, p in zip(chunk, part, strict=True))
                assert math.prod(chunk) * 4 <= max(max_bytes, 4)
                if divisor > 1:
                    assert part[0] % chunk[0] == 0
                boxes = list(
                    chunking.cut(
                        chunking.make_box([slice(None)] * len(shape), shape), chunk
                    )
                )
                sizes = [chunking.count_elements(box) for box in boxes]
                assert sum(sizes) == math.prod(shape)


def test_a_part_of_prime_length_stays_whole_rather_than_falling_to_pieces():
    chunk = chunking.choose_chunk_shape(
        (2 * 65537,), (65537,), item_bytes=4, max_bytes=2**16
    )
    assert chunk == (65537,)


def test_others_in_the_process_use_orbax_as_it_is(tmp_path):
    state = {"w": np.arange(64.0), "j": jnp.arange(8)}
    save(tmp_path / "1", state, arrays=ArrayOptions(layout="files"))
    assert type(ocp.type_handlers.get_type_handler(jax.Array)) is (
        ocp.type_handlers.ArrayHandler
    )
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    ) as stock:
        stock.save(tmp_path / "2", args=ocp.args.PyTreeSave(state))
    ours = json.loads((tmp_path / "1/state/j/zarr.json").read_text())
    theirs = json.loads((tmp_path / "2/j/zarr.json").read_text())
    assert [codec["name"] for codec in ours["codecs"]] == ["bytes", "crc32c"]
    assert [codec["name"] for codec in theirs["codecs"]] == ["sharding_indexed"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_ocdbt": True, "use_zarr3": True},
        {"use_ocdbt": True, "use_zarr3": False},
        {"use_ocdbt": False, "use_zarr3": True},
        {"use_ocdbt": False, "use_zarr3": False},
    ],
    ids=["ocdbt-zarr3", "ocdbt-zarr2", "files-zarr3", "files-zarr2"],
)
def test_what_stock_handlers_wrote_is_read(tmp_path, options):
    state = make_state()
    if not options["use_zarr3"]:
        state.pop("four")
    if not options["use_ocdbt"]:
        state.pop("nested")  # stock Orbax does not find the folder of `a/b` again
    stored, types = leaves.encode(state)
    record = run_record.make_record(1, time_secs=0.0, state=types)
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            state=ocp.PyTreeCheckpointHandler(**options),
            run=ocp.JsonCheckpointHandler(),
        )
    ) as stock:
        items = {
            "state": ocp.args.PyTreeSave(stored),
            "run": ocp.args.JsonSave(record),
        }
        stock.save(tmp_path / "1", args=ocp.args.Composite(**items))
    assert to_plain(restore(tmp_path / "1", state)) == to_plain(state)


def test_unknown_options_are_refused():
    for options in ({"layout": "zip"}, {"codec": "gzip"}, {"memory_bytes": 0}):
        with pytest.raises(ValueError, match=r"zip|memory_bytes"):
            ArrayOptions(**options)


def test_orbax_still_has_what_the_handlers_stand_on():
    names = {
        tensorstore_utils.build_array_write_spec: {
            "info",
            "global_shape",
            "local_shape",
            "dtype",
            "use_ocdbt",
            "process_index",
            "ext_metadata",
        },
        replica_slices.transfer_arrays_to_host: {
            "arrays",
            "replica_id",
            "use_replica_parallel",
            "min_slice_bytes_for_replica_parallel",
            "enable_pinned_host_transfer",
        },
        ocdbt_utils.get_process_index_for_subdir: {"use_ocdbt"},
        array_metadata_store.Store.write: {
            "checkpoint_dir",
            "array_metadatas",
            "process_index",
        },
        array_metadata_store.Store.read: {"checkpoint_dir"},
        sharding.from_jax_sharding: set(),
    }
    for function, arguments in names.items():
        assert arguments <= set(inspect.signature(function).parameters), function
    handler = ocp.type_handlers.ArrayHandler()
    assert {"_replica_id", "_use_replica_parallel"} <= set(vars(handler))
    fields = {field.name for field in dataclasses.fields(replica_slices.ReplicaSlices)}
    assert {"global_shape", "local_shape", "dtype"} <= fields
