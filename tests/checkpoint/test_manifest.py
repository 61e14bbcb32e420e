"""The manifest: every bit of it, and of what it vouches for, counts."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re

import pytest

from jaxft import fingerprints, records
from jaxft.checkpoint import manifest as manifests
from jaxft.checkpoint import step_files

CHECKED = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
SHARDED = [
    {
        "name": "sharding_indexed",
        "configuration": {"codecs": CHECKED, "index_codecs": CHECKED},
    }
]
PLAIN = CHECKED[:1]


@pytest.fixture
def step(tmp_path: pathlib.Path) -> pathlib.Path:
    """Something with the names of a step in it; no array is ever opened."""
    files = {
        "_CHECKPOINT_METADATA": b"{}",
        "run/metadata": b'{"step": 3}',
        "state/_METADATA": b"{}",
        "state/a.w/zarr.json": json.dumps({"codecs": SHARDED}).encode(),
        "state/a.w/c/0/0": b"one",
        "state/a.w/c/0/1": b"other",
        "state/c/zarr.json": json.dumps({"codecs": CHECKED}).encode(),
        "state/c/c": b"scalar",
        "state/plain/zarr.json": json.dumps({"codecs": PLAIN}).encode(),
        "state/plain/c/0": b"unchecked",
        "state/loose/c/0": b"belongs to no array",
        "manifest/older": b"does not count",
    }
    for name, data in files.items():
        path = tmp_path / "3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "3"


def _manifest(step: pathlib.Path, array_layout: str = "files") -> manifests.Manifest:
    leaf = manifests.LeafEntry(
        path="a/w",
        name="a.w",
        dtype="float32",
        shape=(2, 3),
        fingerprint=fingerprints.Fingerprint(1, 2),
        written_at=1,
        num_links=2,
        num_chunks=2,
        num_bytes=8,
        num_nonfinite=1,
    )
    return manifests.Manifest(
        step=3,
        timeline=1,
        array_layout=array_layout,
        codec="raw",
        healthy=False,
        unhealthy=("a/w",),
        leaves={"a/w": leaf, "c": dataclasses.replace(leaf, path="c", name="c")},
        files=step_files.collect_files(step, array_layout=array_layout),
    )


def test_it_comes_back_as_it_was_written(step):
    manifest = _manifest(step)
    manifests.write(step, manifest)
    assert manifests.read(step) == manifest
    assert not manifests.check_files(step, manifest, full=True)


def test_it_is_never_written_over(step):
    manifests.write(step, _manifest(step))
    with pytest.raises(FileExistsError):
        manifests.write(step, _manifest(step))


def test_only_chunks_that_end_in_a_checksum_have_no_digest(step):
    files = step_files.collect_files(step, array_layout="files")
    without = {path for path, entry in files.items() if not entry.sha256}
    assert without == {"state/a.w/c/0/0", "state/a.w/c/0/1", "state/c/c"}
    assert "manifest/older" not in files
    entry = files["run/metadata"]
    assert (entry.num_bytes, entry.sha256) == (
        11,
        hashlib.sha256(b'{"step": 3}').hexdigest(),
    )
    assert files["state/c/c"].crc32c == b"alar".hex()
    assert {path for path, entry in files.items() if entry.crc32c} == without
    ocdbt = step_files.collect_files(step, array_layout="ocdbt")
    assert ocdbt.keys() == files.keys()
    assert all(entry.sha256 for entry in ocdbt.values())


def test_a_linked_file_is_what_it_was_when_it_was_written(step):
    known = step_files.collect_files(step, array_layout="files")
    paths = step_files.of_leaves(known, {"a.w"})
    assert paths == [path for path in known if path.startswith("state/a.w/")]
    for path in ("state/a.w/zarr.json", "state/a.w/c/0/0"):
        data = (step / path).read_bytes()
        (step / path).write_bytes(data.replace(b"e", b"d"))
    shorter = step / "state/a.w/c/0/1"
    shorter.write_bytes(shorter.read_bytes()[1:])
    linked = {path: known[path] for path in paths}
    found = step_files.collect_files(step, array_layout="files", known=linked)
    differing = {path for path in known if found[path] != known[path]}
    assert differing == {"state/a.w/c/0/1"}


def test_only_large_data_files_of_a_database_have_no_digest(step):
    small, large = bytes(step_files.MAX_DIGESTED_BYTES), bytes(2**22 + 1)
    names = ["state/d/1", "state/ocdbt.process_0/d/2", "state/a.w/x/d/3", "run/d/4"]
    for name in names:
        for end, data in (("", large), (".small", small)):
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            (step / f"{name}{end}").write_bytes(data)
    files = step_files.collect_files(step, array_layout="ocdbt")
    assert {path for path, entry in files.items() if not entry.sha256} == {*names[:2]}
    # A leaf may be called like their folder.
    files = step_files.collect_files(step, array_layout="files")
    assert all(files[name].sha256 for name in names)


def test_any_flipped_bit_and_any_cut_of_it_is_damage(step):
    manifests.write(step, _manifest(step))
    data = (step / "manifest/metadata").read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(manifests.ManifestError, match="own digest"):
            manifests.decode(bytes(damaged), source="here")
    for length in range(len(data)):
        with pytest.raises(manifests.ManifestError, match="here is damaged"):
            manifests.decode(data[:length], source="here")


def _sealed(value: object) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + b',"sha256":"' + digest.encode() + b'"}\n'


def test_a_newer_one_is_refused_by_name(step):
    value = json.loads(manifests.encode(_manifest(step)))
    del value["sha256"]
    assert manifests.decode(_sealed(value), source="x").step == 3
    value["format"]["version"] = 2
    with pytest.raises(records.FaultError, match="jaxft-manifest 2, this") as caught:
        manifests.decode(_sealed(value), source="x")
    assert caught.value.fault.kind is records.FaultKind.CONFIG


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("step", -1),
        ("timeline", "0"),
        ("files", {"../outside": [1, ""]}),
        ("files", {"/etc/passwd": [1, ""]}),
        ("files", {"a//b": [1, ""]}),
        ("files", {"a": [1]}),
        ("leaves", {"a": {}}),
        ("leaves", []),
        ("unhealthy", [1]),
    ],
)
def test_what_cannot_be_understood_is_damage(step, name, wrong):
    value = json.loads(manifests.encode(_manifest(step)))
    del value["sha256"]
    value[name] = wrong
    with pytest.raises(manifests.ManifestError, match="cannot be understood"):
        manifests.decode(_sealed(value), source="x")


def test_missing_short_and_changed_files_are_named_with_their_leaf(step):
    manifest = _manifest(step)
    (step / "state/a.w/c/0/0").unlink()
    (step / "state/c/c").write_bytes(b"")
    (step / "state/plain/c/0").write_bytes(b"unchekced")
    (step / "run/metadata").unlink()
    (step / "run/metadata").mkdir()
    short = manifests.check_files(step, manifest, full=False)
    assert {(p.path, p.leaf) for p in short} == {
        ("run/metadata", ""),
        ("state/a.w/c/0/0", "a/w"),
        ("state/c/c", "c"),
    }
    assert str(short[1]) == "state/a.w/c/0/0 of leaf a/w: is missing"
    full = manifests.check_files(step, manifest, full=True)
    assert {p.path for p in full} - {p.path for p in short} == {"state/plain/c/0"}
    assert re.search("sha256", full[-1].reason)


def test_a_file_that_may_not_be_read_is_no_damage(step):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    manifest = _manifest(step)
    (step / "run/metadata").chmod(0)
    with pytest.raises(PermissionError):
        manifests.check_files(step, manifest, full=True)
