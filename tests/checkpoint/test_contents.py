"""Looking inside a step: what was saved, and in which dtype."""

import importlib.util
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from jaxft.checkpoint import contents, run_record
from jaxft.checkpoint.stored_tree import ArrayError

_spec = importlib.util.spec_from_file_location(
    "handmade", pathlib.Path(__file__).with_name("handmade.py")
)
handmade = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(handmade)

LEAVES = {
    "a/w": np.arange(12, dtype=np.float32).reshape(4, 3),
    "f8": np.array([1, np.inf], ml_dtypes.float8_e4m3),
    "u4": np.array([1, 15], ml_dtypes.uint4),
    "key": np.array([1, 2], np.uint32),
    "n": 7,
    "x": 0.5,
    "yes": True,
    "text": "some",
}


def _read(step: contents.Contents, path: str) -> np.ndarray:
    dtype, shape = step.value_type(path)
    value = np.empty(shape, dtype)
    for offsets, part in step.read_parts(path):
        box = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
        value[box] = part
    return value


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_values_come_back_in_the_dtype_that_was_saved(tmp_path, layout):
    made = handmade.make_step(tmp_path, 1, LEAVES, keys=("key",), layout=layout)
    step = contents.Contents(made)
    assert list(step.leaves) == list(LEAVES)
    assert {path: leaf.type_text for path, leaf in step.leaves.items()} == {
        "a/w": "float32[4,3]",
        "f8": "float8_e4m3[2]",
        "u4": "uint4[2]",
        "key": "key<fry>[]",
        "n": "int64[]",
        "x": "float64[]",
        "yes": "bool[]",
        "text": "str",
    }
    for path, value in LEAVES.items():
        if path == "text":
            assert step.texts == {"text": "some"}
            continue
        read = _read(step, path)
        assert read.dtype == np.asarray(value).dtype, path
        assert read.tobytes() == np.asarray(value).tobytes(), path
        assert step.leaves[path].entry.path == path
    box = step.read_box("a/w", (1, 1), shape=(2, 1))
    assert (box == [[4], [7]]).all()


def test_what_changed_is_not_handed_out(tmp_path):
    good = handmade.make_step(tmp_path / "good", 1, {"w": np.zeros(8, np.float32)})
    other = handmade.make_step(tmp_path / "bad", 1, {"w": np.ones(8, np.float32)})
    for name in ("0", "1"):
        file = good / "state/w/c" / name
        file.chmod(0o644)
        file.write_bytes((other / "state/w/c" / name).read_bytes())
    with pytest.raises(ArrayError, match="leaf w: its values have changed"):
        list(contents.Contents(good).read_parts("w"))


def test_a_damaged_manifest_is_told_and_a_damaged_record_refused(tmp_path):
    made = handmade.make_step(tmp_path, 1, LEAVES, keys=("key",))
    for name in ("manifest/metadata", "run/metadata"):
        (made / name).chmod(0o644)
    (made / "manifest/metadata").write_text("{")
    step = contents.Contents(made)
    assert step.manifest is None
    assert "damaged" in step.manifest_problem
    assert step.leaves["a/w"].entry is None
    (made / "run/metadata").write_text("{")
    with pytest.raises(run_record.RecordError, match="not JSON"):
        contents.Contents(made)


def test_a_leaf_without_elements_and_one_without_array(tmp_path):
    made = handmade.make_step(tmp_path, 1, {"w": np.ones(2, np.float32)})
    file = made / "run/metadata"
    record = json.loads(file.read_text())
    record["state"] |= {"none": "array float32[0,3]", "lost": "array float32[2]"}
    file.chmod(0o644)
    file.write_text(json.dumps(record))
    step = contents.Contents(made)
    assert step.value_type("none") == (np.dtype(np.float32), (0, 3))
    assert list(step.read_parts("none")) == []
    with pytest.raises(ArrayError, match="leaf lost: there is no array of it"):
        step.value_type("lost")


def test_the_item_is_found(tmp_path):
    made = handmade.make_step(tmp_path, 1, {"w": np.ones(2, np.float32)})
    assert contents.find_item(made) == str(made / "state")
    assert contents.find_item(made / "state") == str(made / "state")
    (made / "state").rename(made / "mine")
    assert contents.find_item(made) == str(made / "mine")
    (made / "two").mkdir()
    (made / "two/_METADATA").write_text("{}")
    with pytest.raises(ArrayError, match="several items: mine, two"):
        contents.find_item(made)
    with pytest.raises(ArrayError, match="is no checkpoint"):
        contents.find_item(tmp_path / "nothing")
