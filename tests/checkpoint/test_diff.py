"""Two steps compared: structure, bits, and how far apart."""

import importlib.util
import math
import pathlib

import ml_dtypes
import numpy as np
import pytest

from jaxft.checkpoint import diff

_spec = importlib.util.spec_from_file_location(
    "handmade", pathlib.Path(__file__).with_name("handmade.py")
)
handmade = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(handmade)


def _diff(tmp_path, a, b, *, manifests=True, **options):
    left = handmade.make_step(tmp_path / "a", 1, a, with_manifest=manifests)
    right = handmade.make_step(
        tmp_path / "b", 2, b, with_manifest=manifests, layout="ocdbt"
    )
    return {leaf.path: leaf for leaf in diff.diff(left, right, **options)}


@pytest.mark.parametrize("manifests", [True, False])
def test_equal_leaves_are_equal(tmp_path, manifests):
    leaves = {
        "w": np.array([1, np.nan, -0.0], np.float32),
        "b": np.arange(4).astype(ml_dtypes.bfloat16),
        "n": 3,
        "t": "text",
    }
    found = _diff(tmp_path, leaves, leaves, manifests=manifests)
    assert list(found) == list(leaves)
    assert {leaf.change for leaf in found.values()} == {diff.Change.EQUAL}
    assert not any(leaf.num_different for leaf in found.values())


def test_equal_fingerprints_need_no_bytes(tmp_path):
    leaves = {"w": np.ones((4, 4), np.float32)}
    left = handmade.make_step(tmp_path / "a", 1, leaves)
    right = handmade.make_step(tmp_path / "b", 2, leaves)
    for chunk in (right / "state/w/c").rglob("0"):
        if chunk.is_file():
            chunk.unlink()
    (leaf,) = diff.diff(left, right)
    assert leaf.change is diff.Change.EQUAL


@pytest.mark.parametrize("memory_bytes", [1, diff.MEMORY_BYTES])
def test_differences_are_measured(tmp_path, memory_bytes):
    a = np.arange(1, 41, dtype=np.float32).reshape(10, 4)
    b = a.copy()
    b[7, 2] += 3
    b[0, 0] -= 0.5
    found = _diff(tmp_path, {"w": a}, {"w": b}, memory_bytes=memory_bytes)["w"]
    assert found.change is diff.Change.VALUES
    assert (found.num_elements, found.num_different) == (40, 2)
    assert (found.max_abs, found.max_rel) == (3.0, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "num_different", "max_abs", "max_rel"),
    [
        (np.float32([0.0]), np.float32([-0.0]), 1, 0.0, 0.0),
        (np.float32([np.nan]), np.float32([1]), 1, math.inf, math.inf),
        (np.float32([np.inf]), np.float32([1]), 1, math.inf, math.inf),
        (np.int64([2**62]), np.int64([2**62 + 1]), 1, 1.0, 2.0**-62),
        (np.uint8([0, 3]), np.uint8([255, 3]), 1, 255.0, 1.0),
        (np.complex64([3 + 4j]), np.complex64([0]), 1, 5.0, 1.0),
        (np.array([True, False]), np.array([True, True]), 1, 1.0, 1.0),
        (
            np.array([1], ml_dtypes.bfloat16),
            np.array([2], ml_dtypes.bfloat16),
            1,
            1.0,
            0.5,
        ),
        (np.array([-8], ml_dtypes.int4), np.array([7], ml_dtypes.int4), 1, 15, 1.875),
        (np.array([2], ml_dtypes.uint4), np.array([1], ml_dtypes.uint4), 1, 1.0, 0.5),
        (5, 6, 1, 1.0, 1 / 6),
    ],
    ids=str,
)
def test_every_dtype_has_a_distance(tmp_path, a, b, num_different, max_abs, max_rel):
    found = _diff(tmp_path, {"w": a}, {"w": b})["w"]
    assert found.change is diff.Change.VALUES
    assert found.num_different == num_different
    assert found.max_abs == max_abs
    assert found.max_rel == pytest.approx(max_rel, rel=1e-9)


def test_structure_and_types_are_told(tmp_path):
    a = {"x": np.ones(3, np.float32), "y": np.ones(3, np.float32), "only": 1, "t": "a"}
    b = {
        "x": np.ones(4, np.float32),
        "y": np.float16([1, 2, 1]),
        "more": np.ones(2, np.int8),
        "t": "b",
    }
    found = _diff(tmp_path, a, b)
    assert {path: str(leaf.change) for path, leaf in found.items()} == {
        "x": "type",
        "y": "type",
        "only": "only_a",
        "t": "values",
        "more": "only_b",
    }
    assert (found["x"].type_a, found["x"].type_b) == ("float32[3]", "float32[4]")
    assert (found["y"].num_different, found["y"].max_abs) == (1, 1.0)
    some = _diff(tmp_path / "again", a, b, paths="x, more")
    assert list(some) == ["x", "more"]
