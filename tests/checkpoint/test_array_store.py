"""Stored arrays as NumPy: every Orbax layout, in bounded parts, damage by name."""

import asyncio
import errno
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from jaxft.checkpoint import array_store, step_files

LAYOUTS = ("files-zarr2", "files-zarr3", "ocdbt-zarr2", "ocdbt-zarr3", "v1")


def _state():
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    return {
        "params": {
            "w": jax.device_put(jnp.arange(96.0).reshape(8, 12), rows),
            "b.c": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        },
        "layers": [jnp.int32(7), jnp.zeros((5, 3), jnp.float16)],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "i4": jnp.array([-8, 7], jnp.int4),
        "f8": jnp.array([0.5, -2], jnp.float8_e4m3fn),
        "bool": jnp.array([True, False]),
        "c": jnp.array([1 + 2j], jnp.complex64),
        "numpy": np.arange(5, dtype=np.int64),
        "int": 5,
        "float": 1.5,
        "text": "here",
        "x/y": "there",
        "none": None,
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Name of a layout -> item folder that an untouched Orbax wrote."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    root, state, found = tmp_path_factory.mktemp("stock"), _state(), {}
    for name in LAYOUTS[:4]:
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt="ocdbt" in name, use_zarr3="zarr3" in name
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(root / name, args=ocp.args.PyTreeSave(state))
        found[name] = root / name
    v1.save(root / "v1", state)
    found["v1"] = root / "v1" / "state"
    return found


def _expected() -> dict[str, np.ndarray]:
    import jax

    flat = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(_state())[0]:
        if isinstance(leaf, str):
            continue
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        flat[path] = np.asarray(leaf)
    return flat


@pytest.mark.device
@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_orbax_wrote_comes_back_bit_for_bit(stock, name):
    store = array_store.ArrayStore(stock[name])
    arrays = {leaf.path: leaf.name for leaf in store.leaves.values() if leaf.has_array}
    expected = _expected()
    assert arrays.keys() == expected.keys()
    for path, value in expected.items():
        read = store.read(arrays[path])
        spec = store.spec(arrays[path])
        assert (read.dtype, read.shape) == (value.dtype, value.shape), path
        assert (spec.dtype, spec.shape) == (value.dtype, value.shape), path
        assert read.tobytes() == value.tobytes(), path
        whole = np.empty_like(read)
        for offsets, part in store.read_chunks(arrays[path], max_bytes=100):
            box = tuple(
                slice(start, start + size)
                for start, size in zip(offsets, part.shape, strict=True)
            )
            whole[box] = part
        assert whole.tobytes() == value.tobytes(), path


@pytest.mark.device
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tree_is_known_without_a_target(stock, name):
    store = array_store.ArrayStore(stock[name])
    leaves = store.leaves
    assert leaves["params/b.c"].segments == ("params", "b.c")
    assert leaves["params/b.c"].name == "params.b.c"
    assert leaves["layers/1"].is_index == (False, True)
    assert leaves["key"].key_impl == "threefry2x32"
    assert leaves["keys"].key_impl == "rbg"
    assert leaves["none"].kind == "None"
    assert not leaves["none"].has_array
    assert store.texts() == {"text": "here", "x/y": "there"}
    assert store.spec("params.w").codecs[-1] == "zstd"


@pytest.mark.device
@pytest.mark.parametrize("name", ["ocdbt-zarr3", "files-zarr3"])
def test_leaves_are_measured(stock, name):
    layout = name.split("-")[0]
    store = array_store.ArrayStore(stock[name])
    step = stock[name].parent / f"step-{name}"
    step.mkdir()
    (step / "state").symlink_to(stock[name])
    files = {
        f"state/{path.relative_to(stock[name]).as_posix()}": path
        for path in stock[name].rglob("*")
        if path.is_file()
    }
    entries = {
        path: step_files.FileEntry(path=path, num_bytes=file.stat().st_size, sha256="")
        for path, file in files.items()
    }
    sizes = array_store.measure_leaves(
        step, names=store.names(), files=entries, array_layout=layout
    )
    assert sizes.keys() == set(store.names())
    assert sizes["params.w"][0] == 4
    assert sizes["int"][0] == 1
    assert all(0 < size < 500 for _, size in sizes.values())


# --- arrays of our own making -------------------------------------------------

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}


def _write_item(folder: pathlib.Path, value: np.ndarray, chunk: tuple) -> pathlib.Path:
    """An item of one leaf, `a/w`, in chunks that end in crc32c."""
    folder.mkdir()
    key = {"key": "a", "key_type": 2}, {"key": "w", "key_type": 2}
    notes = {
        "tree_metadata": {
            "('a', 'w')": {
                "key_metadata": list(key),
                "value_metadata": {"value_type": "jax.Array"},
            }
        },
        "use_ocdbt": False,
        "use_zarr3": True,
    }
    (folder / "_METADATA").write_text(json.dumps(notes))
    inner = {
        "chunk_shape": list(chunk),
        "codecs": [_BYTES, _CRC],
        "index_codecs": [_BYTES, _CRC],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{folder}/a.w/",
        "metadata": {
            "shape": list(value.shape),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(chunk)},
            },
            "data_type": str(value.dtype),
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        },
        "store_data_equal_to_fill_value": True,
        "create": True,
    }
    ts.open(spec).result().write(value).result()
    return folder


@pytest.fixture
def item(tmp_path: pathlib.Path) -> pathlib.Path:
    value = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    return _write_item(tmp_path / "state", value, (2, 8))


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "delete"])
def test_a_damaged_chunk_is_named_with_its_leaf(item, kind):
    chunk = item / "a.w/c/1/0"
    data = bytearray(chunk.read_bytes())
    if kind == "delete":
        chunk.unlink()
    else:
        data[5] ^= 4
        new = {"flip": data, "cut": data[:-7], "empty": b""}[kind]
        chunk.chmod(0o644)
        chunk.write_bytes(bytes(new))
    store = array_store.ArrayStore(item)
    for read in (store.read, lambda name: list(store.read_chunks(name))):
        with pytest.raises(array_store.ArrayError, match="leaf a/w: ") as caught:
            read("a.w")
        assert caught.value.leaf == "a/w"
        assert caught.value.file == str(chunk)
        assert "\n" not in str(caught.value)
        assert "tensorstore_spec" not in str(caught.value)


def test_a_lost_description_is_named(item):
    (item / "a.w/zarr.json").unlink()
    with pytest.raises(array_store.ArrayError, match=r"leaf a/w: .*zarr\.json"):
        array_store.ArrayStore(item).spec("a.w")


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"tree_metadata": {"a": 1}}'])
def test_no_item_folder_is_refused(item, text):
    (item / "_METADATA").unlink()
    if text is not None:
        (item / "_METADATA").write_text(text)
    with pytest.raises(array_store.ArrayError, match="_METADATA"):
        array_store.ArrayStore(item)


def test_a_database_that_does_not_belong_there_is_refused(item):
    (item / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(array_store.ArrayError, match="no database"):
        array_store.ArrayStore(item)


@pytest.mark.device
def test_parts_that_were_never_merged_are_no_lost_database(stock, tmp_path):
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    async def write():  # As if killed before it is finalised.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
        item = ocp.args.PyTreeSave({"w": jnp.arange(8.0)})
        for future in await handler.async_save(path, args=item):
            future.result()

    path = epath.Path(tmp_path / "parts")
    path.mkdir()
    asyncio.run(write())
    with pytest.raises(array_store.ArrayError, match="incomplete: what one process"):
        array_store.ArrayStore(path)
    merged = shutil.copytree(stock["ocdbt-zarr3"], tmp_path / "merged")
    (merged / "manifest.ocdbt").unlink()
    with pytest.raises(array_store.ArrayError, match=r"manifest\.ocdbt is missing"):
        array_store.ArrayStore(merged)


def test_an_unknown_name_is_refused(item):
    with pytest.raises(array_store.ArrayError, match="not among the arrays"):
        array_store.ArrayStore(item).read("a.v")


def test_two_leaves_in_one_array_are_refused(item):
    notes = json.loads((item / "_METADATA").read_text())
    twin = {"key": "a.w", "key_type": 2}
    notes["tree_metadata"]["('a.w',)"] = {
        "key_metadata": [twin],
        "value_metadata": {"value_type": "jax.Array"},
    }
    (item / "_METADATA").write_text(json.dumps(notes))
    store = array_store.ArrayStore(item)
    assert store.names() == ["a.w"]
    with pytest.raises(array_store.ArrayError, match=r"shares the array a\.w"):
        store.read("a.w")


def test_parts_keep_within_their_bytes(tmp_path):
    value = np.zeros((64, 2**14), np.float32)  # 4 MiB in 64 chunks of 64 kiB
    item = _write_item(tmp_path / "state", value, (1, 2**14))
    store = array_store.ArrayStore(item)
    sizes = [part.nbytes for _, part in store.read_chunks("a.w", max_bytes=2**20)]
    assert max(sizes) == 2**19
    assert sum(sizes) == value.nbytes
    assert store.spec("a.w").num_chunks == 64


@pytest.mark.parametrize(
    ("shape", "step", "num_elements"),
    [
        ((), (), 1),
        ((7,), (3,), 1),
        ((7,), (3,), 100),
        ((5, 6, 7), (2, 3, 4), 1),
        ((5, 6, 7), (2, 3, 4), 50),
        ((5, 6, 7), (2, 3, 4), 84),
        ((5, 6, 7), (2, 3, 4), 10**6),
        ((0, 3), (1, 3), 10),
    ],
)
def test_boxes_cover_an_array_once(shape, step, num_elements):
    seen = np.zeros(shape, int)
    boxes = list(array_store.plan_boxes(shape, step=step, num_elements=num_elements))
    for offsets, size in boxes:
        assert all(
            start % chunk == 0 for start, chunk in zip(offsets, step, strict=True)
        )
        assert np.prod(size) <= max(num_elements, np.prod(step))
        seen[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))] += 1
    assert (seen == 1).all()
    assert [offsets for offsets, _ in boxes] == sorted(o for o, _ in boxes)


@pytest.mark.parametrize("number", ["EIO", "EACCES", "EMFILE"])
def test_what_cannot_be_read_now_is_no_damage(item, number):
    class Future:
        def result(self) -> None:
            raise ValueError(f"UNKNOWN: read [{os.strerror(getattr(errno, number))}]")

    with pytest.raises(OSError, match="read") as caught:
        array_store.ArrayStore(item)._result("a.w", Future())
    assert caught.value.errno == getattr(errno, number)


def test_a_store_opens_by_path_and_by_address(tmp_path):
    for url in (str(tmp_path / "one"), f"file://{tmp_path}/two", "memory://three"):
        store = array_store.open_kvstore(url)
        store.write("a/b", b"here").result()
        assert store.read("a/b").result().value == b"here"
    assert (tmp_path / "one/a/b").read_bytes() == b"here"
    assert (tmp_path / "two/a/b").read_bytes() == b"here"
    with pytest.raises(ValueError, match="nosuch"):
        array_store.open_kvstore("nosuch://x")
