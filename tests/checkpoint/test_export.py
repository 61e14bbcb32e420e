"""Exported files: what other programs read is what was saved."""

import importlib.util
import json
import os
import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest

from jaxft.checkpoint import export
from jaxft.checkpoint.stored_tree import ArrayError

_spec = importlib.util.spec_from_file_location(
    "handmade", pathlib.Path(__file__).with_name("handmade.py")
)
handmade = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(handmade)

PLAIN = {
    "params/w": np.arange(40, dtype=np.float32).reshape(8, 5),
    "params/h": np.arange(3, dtype=np.float16),
    "mask": np.array([True, False, True]),
    "c": np.array([1 + 2j], np.complex64),
    "key": np.array([3, 4], np.uint32),
    "n": 7,
    "x": 0.5,
}
WIDE = {
    **PLAIN,
    "params/b": np.array([1, np.nan], ml_dtypes.bfloat16),
    "f8": np.array([1, 2, 3], ml_dtypes.float8_e4m3fn),
}


@pytest.fixture
def step(tmp_path):
    leaves = {**WIDE, "text": "some"}
    return handmade.make_step(tmp_path, 30, leaves, keys=("key",))


def _parse_safetensors(path: pathlib.Path) -> tuple[dict, dict]:
    """After the format's own description, without any library."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    more = header.pop("__metadata__", {})
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == len(data) - 8 - size
    assert size % 8 == 0
    names = {text: name for name, text in export._SAFETENSORS.items()}
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        dtype = np.dtype(names[entry["dtype"]])
        arrays[name] = np.frombuffer(raw, dtype).reshape(entry["shape"])
    return arrays, more


@pytest.mark.parametrize("memory_bytes", [1, export.MEMORY_BYTES])
def test_safetensors(step, tmp_path, memory_bytes):
    done = export.export(step, tmp_path / "x.safetensors", memory_bytes=memory_bytes)
    arrays, more = _parse_safetensors(tmp_path / "x.safetensors")
    assert arrays.keys() == {path.replace("/", ".") for path in WIDE}
    for path, value in WIDE.items():
        read = arrays[path.replace("/", ".")]
        assert read.dtype == np.asarray(value).dtype
        assert read.shape == np.shape(value)
        assert read.tobytes() == np.asarray(value).tobytes()
    assert more == {"jaxft_step": "30"}
    assert done.left_out == ("text",)
    assert done.is_proven
    assert done.num_bytes == os.path.getsize(done.path)


def test_its_own_library_reads_it(step, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    export.export(step, tmp_path / "x.safetensors", paths="**, !f8, !params/b")
    arrays = safetensors.load_file(tmp_path / "x.safetensors")
    for path, value in PLAIN.items():
        read = arrays[path.replace("/", ".")]
        assert read.dtype == np.asarray(value).dtype
        assert read.tobytes() == np.asarray(value).tobytes()


def test_npz(step, tmp_path):
    export.export(step, tmp_path / "x.npz", paths="**, !f8, !params/b")
    with np.load(tmp_path / "x.npz") as arrays:
        assert set(arrays) == {path.replace("/", ".") for path in PLAIN}
        for path, value in PLAIN.items():
            read = arrays[path.replace("/", ".")]
            assert read.dtype == np.asarray(value).dtype
            assert read.shape == np.shape(value)
            assert read.tobytes() == np.asarray(value).tobytes()
    assert sorted(os.listdir(tmp_path)) == ["30", "x.npz"]


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("x.npz", "**", "params/b is bfloat16, which .npz does not have: use .safe"),
        ("x.pt", "**", "ends in neither .safetensors nor .npz"),
        ("x.npz", "nothing", "no array of .* is named by 'nothing'"),
        ("x.npz", "text", "no array of"),
    ],
)
def test_what_cannot_be_exported_is_refused(step, tmp_path, name, paths, message):
    with pytest.raises(export.ExportError, match=message):
        export.export(step, tmp_path / name, paths=paths)
    assert os.listdir(tmp_path) == ["30"]


def test_a_dtype_that_no_format_has_is_refused(tmp_path):
    made = handmade.make_step(tmp_path, 1, {"w": np.array([1], ml_dtypes.uint4)})
    for suffix in export.SUFFIXES:
        with pytest.raises(export.ExportError, match=r"uint4, which .*: leave it out"):
            export.export(made, tmp_path / f"x{suffix}")


def test_nothing_is_written_over_unless_asked(step, tmp_path):
    out = tmp_path / "x.npz"
    out.write_text("mine")
    with pytest.raises(export.ExportError, match="is there already"):
        export.export(step, out, paths="mask")
    assert out.read_text() == "mine"
    export.export(step, out, paths="mask", overwrite=True)
    with np.load(out) as arrays:
        assert list(arrays) == ["mask"]


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_damage_leaves_no_file(step, tmp_path, suffix):
    chunk = step / "state/params.w/c/1/0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.chmod(0o644)
    chunk.write_bytes(data)
    with pytest.raises(ArrayError, match="leaf params/w"):
        export.export(step, tmp_path / f"x{suffix}", paths="params/w")
    assert os.listdir(tmp_path) == ["30"]
