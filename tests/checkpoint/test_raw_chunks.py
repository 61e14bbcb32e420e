"""Chunks that are read straight to where they belong."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jaxft.checkpoint import raw_chunks
from jaxft.checkpoint.chunking import make_box, make_codecs
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.records import FaultError

ROWS, COLS = 700, 500


def _store(path: pathlib.Path, *, chunk: tuple[int, int], codec: str = "raw"):
    value = np.random.default_rng(0).random((ROWS, COLS), np.float32)
    spec = {
        "driver": "zarr3",
        "store_data_equal_to_fill_value": True,
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": [ROWS, COLS],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": make_codecs(codec, item_bytes=4),
        },
    }
    store = ts.open(spec, create=True).result()
    store.write(value).result()
    files = [file for file in path.rglob("c/*/*") if file.is_file()]
    return store, value, {str(file): file.read_bytes()[-4:].hex() for file in files}


def _chunk(rows: slice, cols: slice = slice(None)):
    return make_box((rows, cols), (ROWS, COLS))


def test_a_run_of_rows_is_read_to_its_place(tmp_path):
    store, value, checksums = _store(tmp_path, chunk=(300, COLS))
    raw = raw_chunks.RawChunks(checksums).of(store)
    out = np.full((ROWS, COLS), np.nan, np.float32)
    # The last one is filled up with zeros on disk.
    for rows in (slice(0, 300), slice(300, 600), slice(600, 700)):
        assert raw.has(_chunk(rows))
        assert raw.read(_chunk(rows), out[rows])
    np.testing.assert_array_equal(out, value)


def test_what_is_no_run_is_left_alone(tmp_path):
    store, _, checksums = _store(tmp_path, chunk=(ROWS, 300))
    raw = raw_chunks.RawChunks(checksums).of(store)
    assert raw.has(_chunk(slice(None), slice(0, 300)))
    # It has gaps on disk, where the array ends.
    assert not raw.has(_chunk(slice(None), slice(300, COLS)))


def test_compressed_chunks_and_unknown_ones_are_left_alone(tmp_path):
    store, _, checksums = _store(tmp_path / "a", chunk=(300, COLS), codec="zstd")
    assert raw_chunks.RawChunks(checksums).of(store) is None
    store, _, _ = _store(tmp_path / "b", chunk=(300, COLS))
    assert raw_chunks.RawChunks({}).of(store) is None
    raw = raw_chunks.RawChunks({"elsewhere": "00000000"}).of(store)
    assert not raw.has(_chunk(slice(0, 300)))


@pytest.mark.parametrize("place", ["checksum", "filling", "length", "missing"])
def test_a_file_that_is_not_as_it_should_be_is_not_taken(tmp_path, place):
    store, _, checksums = _store(tmp_path, chunk=(300, COLS))
    raw = raw_chunks.RawChunks(checksums).of(store)
    file = tmp_path / "c" / "2" / "0"
    data = bytearray(file.read_bytes())
    if place == "missing":
        file.unlink()
    elif place == "length":
        file.write_bytes(data[:-1])
    else:
        data[-1 if place == "checksum" else -100] ^= 1
        file.write_bytes(data)
    out = np.empty((100, COLS), np.float32)
    assert not raw.read(_chunk(slice(600, 700)), out)


@pytest.fixture
def count_raw(monkeypatch):
    """How many chunks were read in this way."""
    taken = []
    read = raw_chunks.RawArray.read

    def count(self, chunk, out):
        taken.append(read(self, chunk, out))
        return taken[-1]

    monkeypatch.setattr(raw_chunks.RawArray, "read", count)
    return taken


def _state():
    values = np.random.default_rng(1).random((2000, 2500), np.float32)
    return {
        "w": jnp.asarray(values),
        "half": jnp.asarray(values[:1999], jnp.bfloat16),
        "bytes": jnp.asarray(values * 100, jnp.int8),
        "flags": jnp.asarray(values > 0.5),
        "key": jax.random.key(3),
        "small": jnp.arange(5.0),
    }


@pytest.mark.parametrize(("verify", "num_raw"), [("full", 4), ("sample", 0)])
def test_a_restore_that_proves_all_values_reads_so(
    tmp_path, count_raw, verify, num_raw
):
    state = _state()
    with CheckpointManager(tmp_path, layout="files", verify=verify) as manager:
        manager.save(1, state, force=True)
        manager.wait()
        restored = manager.restore(jax.tree.map(jnp.zeros_like, state))
    # Of `w` two chunks; truth values are read by who knows what else is no 0 and no 1.
    assert count_raw == [True] * num_raw
    for name, value in state.items():
        if name == "key":
            value, restored.state[name] = map(
                jax.random.key_data, (value, restored.state[name])
            )
        np.testing.assert_array_equal(value, restored.state[name])


@pytest.mark.parametrize("offset", [7, -2])
def test_a_flipped_bit_is_found_whether_of_a_value_or_of_a_checksum(tmp_path, offset):
    events = []
    emit = lambda kind, /, **fields: events.append((kind, fields))
    state = _state()
    with CheckpointManager(tmp_path, layout="files", emit=emit) as manager:
        manager.save(1, state, force=True)
        manager.wait()
        file = tmp_path / "1/state/w/c/1/0"
        os.chmod(file, 0o644)
        data = bytearray(file.read_bytes())
        data[offset] ^= 4
        file.write_bytes(data)
        with pytest.raises(FaultError):
            manager.restore(state)
    ((_, corrupt),) = [event for event in events if event[0] == "corrupt"]
    assert corrupt["path"] == "state/w/c/1/0"
