"""Verification: no bit of a step changes unseen, and what changed is named."""

import dataclasses
import importlib.util
import json
import pathlib
import random
import shutil

import ml_dtypes
import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint import step_files, verify

_spec = importlib.util.spec_from_file_location(
    "handmade", pathlib.Path(__file__).with_name("handmade.py")
)
handmade = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(handmade)

CASES = [
    pytest.param(("files", "raw"), id="files-raw"),
    pytest.param(("ocdbt", "zstd"), id="ocdbt-zstd"),
    pytest.param(("files", "lz4"), id="files-lz4", marks=pytest.mark.slow),
    pytest.param(("ocdbt", "raw"), id="ocdbt-raw", marks=pytest.mark.slow),
]
WAYS = ("cut", "empty", "delete")


def _leaves() -> dict:
    normal = np.random.default_rng(0).standard_normal
    return {
        "params/w": normal((24, 16)).astype(np.float32),
        "params/b": np.array([1, -0.0, np.nan], ml_dtypes.bfloat16),
        "opt/mu": np.zeros((24, 16), np.float32),
        "key": np.array([[1, 2], [3, 4]], np.uint32),
        "f8": np.array([1, np.inf, 2], ml_dtypes.float8_e4m3),
        "u4": np.array([1, 15], ml_dtypes.uint4),
        "i4": np.array([-8, 7], ml_dtypes.int4),
        "c": np.array([1 + 2j], np.complex64),
        "flag": np.array([True, False]),
        "int": 7,
        "float": 0.5,
        "bool": True,
        "text": "some",
    }


def _make(root: pathlib.Path, step: int, **options) -> pathlib.Path:
    return handmade.make_step(root, step, _leaves(), keys=("key",), **options)


def _files(step: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def _damage(file: pathlib.Path, how: str, pick: random.Random) -> None:
    data = bytearray(file.read_bytes())
    mode = file.stat().st_mode
    file.unlink()  # a linked one stays as it is elsewhere
    if how == "delete":
        return
    if how == "flip":
        data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    elif how == "cut":
        del data[pick.randrange(len(data)) :]
    else:
        data.clear()
    file.write_bytes(data)
    file.chmod(mode)


@pytest.fixture(scope="module", params=CASES)
def proven(request, tmp_path_factory) -> pathlib.Path:
    """A good step; in the layout `files` one that is linked to an older one."""
    layout, codec = request.param
    root = tmp_path_factory.mktemp("root")
    first = _make(root, 1, layout=layout, codec=codec)
    if layout == "ocdbt":
        return first
    links = dict.fromkeys(("params/w", "opt/mu"), first)
    return _make(root, 3, layout=layout, codec=codec, links=links)


def test_a_good_step_has_no_problem(proven):
    seen = []
    assert verify.verify_step(proven, progress=seen.append) == []
    assert verify.verify_step(proven, full=False) == []
    assert sum(seen) >= 2 * 24 * 16 * 4
    assert sum(seen) == verify.count_bytes(manifests.read(proven))


def test_every_damage_of_every_file_is_found(proven, tmp_path, full):
    """Each file of the step: a bit flipped, cut, emptied, deleted."""
    pick = random.Random(proven.name)
    step = tmp_path / proven.name
    shutil.copytree(proven, step)
    for index, good in enumerate(_files(proven)):
        name = good.relative_to(proven)
        ways = [*["flip"] * 10, "cut", "empty", "delete"]
        if not full:
            ways = ["flip", WAYS[index % len(WAYS)]]
        for how in ways if good.stat().st_size else ["delete"]:
            _damage(step / name, how, pick)
            problems = verify.verify_step(step)
            assert problems, (name, how)
            if how == "delete" or name.parts[0] != "state":
                assert str(problems[0]).startswith(name.as_posix()), (name, how)
            (step / name).unlink(missing_ok=True)
            shutil.copy2(good, step / name)
    assert not verify.verify_step(step)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_large_file_of_a_database_is_proven_by_its_values(
    tmp_path, monkeypatch, codec
):
    monkeypatch.setattr(step_files, "MAX_DIGESTED_BYTES", 2**16)
    values = np.random.default_rng(0).integers(0, 255, 6 << 20, np.uint8)
    leaves = {"w": values, "b": np.arange(9)}
    step = handmade.make_step(tmp_path, 1, leaves, layout="ocdbt", codec=codec)
    proof = manifests.read(step)
    # How many files a database spreads its values over is its own affair.
    all_large = [path for path, entry in proof.files.items() if not entry.sha256]
    large = max(all_large, key=lambda path: proof.files[path].num_bytes)
    assert proof.files[large].num_bytes > step_files.MAX_DIGESTED_BYTES
    assert verify.verify_step(step) == []
    file = step / large
    file.chmod(0o600)
    good = file.read_bytes()
    for share in (0.1, 0.5, 0.9):
        bad = bytearray(good)
        bad[int(share * len(bad))] ^= 1
        file.write_bytes(bad)
        assert [one.leaf for one in verify.verify_step(step)] == ["w"]
    # Only a database has files of this kind.
    file.write_bytes(good)
    other = dataclasses.replace(proof, array_layout="files")
    problems = verify.check_step(step, other, full=False)
    assert [one.path for one in problems] == all_large


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bit_of_every_byte_counts(tmp_path):
    made = handmade.make_step(
        tmp_path, 1, {"w": np.arange(6, dtype=np.float32), "n": 3}
    )
    pick = random.Random(0)
    for file in _files(made):
        good = file.read_bytes()
        file.chmod(0o644)
        for place in range(len(good)):
            data = bytearray(good)
            data[place] ^= 1 << pick.randrange(8)
            file.write_bytes(data)
            assert verify.verify_step(made), (file, place)
        file.write_bytes(good)
    assert not verify.verify_step(made)


def test_leaf_and_chunks_are_named(tmp_path):
    step = _make(tmp_path, 1)
    pick = random.Random(1)
    for chunk in ("0", "1"):
        _damage(step / f"state/params.w/c/{chunk}/0", "flip", pick)
    problems = verify.verify_step(step)
    assert [(p.path, p.leaf) for p in problems] == [
        ("state/params.w/c/0/0", "params/w"),
        ("state/params.w/c/1/0", "params/w"),
    ]
    assert all("igest mismatch" in problem.reason for problem in problems)


def test_chunks_of_a_database_are_named(tmp_path):
    step = _make(tmp_path, 1, layout="ocdbt")
    value = np.ascontiguousarray(_leaves()["params/w"])[12:].tobytes()
    for file in (step / "state/d").iterdir():
        data = bytearray(file.read_bytes())
        if (at := data.find(value)) >= 0:
            data[at + 5] ^= 2
            file.chmod(0o644)
            file.write_bytes(data)
    problems = verify.verify_step(step)
    named = [problem for problem in problems if problem.leaf == "params/w"]
    assert len(named) == 1
    assert '"params.w/c/1/0" in OCDBT' in named[0].reason


def test_values_that_were_never_saved_are_found(tmp_path):
    """Whole and well-formed chunks, but of another state."""
    step = _make(tmp_path, 1)
    leaves = _leaves()
    leaves["params/w"] = leaves["params/w"] + 1
    other = handmade.make_step(tmp_path / "other", 1, leaves, keys=("key",))
    shutil.rmtree(step / "state/params.w")
    shutil.copytree(other / "state/params.w", step / "state/params.w")
    (problem,) = verify.verify_step(step)
    assert (problem.path, problem.leaf) == ("params/w", "params/w")
    assert "values have changed" in problem.reason
    assert not verify.verify_step(step, full=False)


def test_a_step_under_another_name_is_found(tmp_path):
    step = _make(tmp_path, 1)
    for name, is_fine in [
        ("2", False),
        ("1.quarantined-1", True),
        ("1.abandoned-t0", True),
        ("2.quarantined-1", False),
        ("copy", True),
    ]:
        moved = step.rename(tmp_path / name)
        assert (not verify.verify_step(moved)) == is_fine, name
        moved.rename(step)


def test_without_a_manifest_nothing_is_proven(tmp_path):
    step = _make(tmp_path, 1, with_manifest=False)
    (problem,) = verify.verify_step(step)
    assert problem == manifests.Problem("manifest/metadata", verify.NO_MANIFEST)
    assert not verify.verify_step(step, allow_unproven=True)
    _damage(step / "state/params.w/c/0/0", "flip", random.Random(0))
    (problem,) = verify.verify_step(step, allow_unproven=True)
    assert problem.leaf == "params/w"
    (step / "state/_METADATA").unlink()
    (problem,) = verify.verify_step(step, allow_unproven=True)
    assert "_METADATA is missing" in problem.reason


def test_a_manifest_that_was_there_cannot_be_done_without(tmp_path):
    step = _make(tmp_path, 1, with_manifest=False, record={"has_manifest": True})
    problems = verify.verify_step(step, allow_unproven=True)
    assert problems == [manifests.Problem("manifest/metadata", "is missing")]


def test_a_manifest_of_other_leaves_is_found(tmp_path):
    step = _make(tmp_path, 1)
    manifest = manifests.read(step)
    leaves = dict(manifest.leaves)
    del leaves["params/w"]
    (step / "manifest/metadata").unlink()
    manifests.write(
        step,
        manifests.Manifest(**{**vars(manifest), "leaves": leaves, "timeline": 4}),
    )
    reasons = {problem.path: problem.reason for problem in verify.verify_step(step)}
    assert "no fingerprint" in reasons["params/w"]
    assert "nothing proves it" in reasons["state/params.w/c/0/0"]
    assert "timeline 0" in reasons["run/metadata"]


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("state/manifest.ocdbt", True),
        ("state/array_metadatas/process_1", True),
        ("state/params.w/.nfs0001", False),
        ("state/.DS_Store", False),
        ("notes.txt", False),
    ],
)
def test_a_file_that_came_later_counts_where_it_would_be_believed(
    tmp_path, name, is_found
):
    step = _make(tmp_path, 1)
    (step / name).write_text("{}")
    problems = verify.verify_step(step, full=False)
    assert [problem.path for problem in problems] == [name] * is_found


def test_a_newer_manifest_is_no_damage(tmp_path):
    step = _make(tmp_path, 1)
    file = step / "manifest/metadata"
    value = json.loads(file.read_bytes())
    value["format"]["version"] = 99
    del value["sha256"]
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    file.chmod(0o644)
    file.write_bytes(body + manifests._seal(body))
    with pytest.raises(records.FaultError, match="jaxft-manifest 99"):
        verify.verify_step(step)


def test_memory_is_bounded(tmp_path):
    """Parts of a leaf, not the leaf: what is in memory does not grow with it."""
    value = np.random.default_rng(0).standard_normal((64, 2**15), np.float32)  # 8 MiB
    step = handmade.make_step(tmp_path, 1, {"w": value})
    sizes = []
    assert not verify.verify_step(step, memory_bytes=2**20, progress=sizes.append)
    assert sum(sizes) == value.nbytes
    # The maker cuts in two; a chunk is the least that can be read.
    assert max(sizes) == value.nbytes // 2


def test_an_interrupt_ends_it_at_once(tmp_path):
    leaves = {f"w{index:03d}": np.ones(8, np.float32) for index in range(100)}
    step = handmade.make_step(tmp_path, 1, leaves)
    calls = []

    def interrupt(num_bytes: int) -> None:
        calls.append(num_bytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify.verify_step(step, progress=interrupt)
    assert calls == [32]
