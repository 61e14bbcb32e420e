import errno
import json
import os
import pathlib

import pytest

from jaxft import records
from jaxft.checkpoint import layout, run_record


def test_names_are_the_segments_joined_by_dots():
    assert layout.leaf_names([("a", "b"), ("c",)]) == {"a/b": "a.b", "c": "c"}


@pytest.mark.parametrize(
    "paths",
    [
        [("a.b",), ("a", "b")],
        [("a/b",), ("a", "b")],
        [("a",), ("a/c/0",)],
    ],
)
def test_a_collision_names_both_paths(paths):
    with pytest.raises(layout.LeafError) as error:
        layout.leaf_names(paths)
    assert "a" in str(error.value)
    assert "rename one of the keys" in str(error.value)


@pytest.mark.parametrize(
    "segments", [("",), ("a", ""), (".",), ("..",), ("a/../b",), ("a\0",), ("a\n",)]
)
def test_what_cannot_be_a_file_name_is_refused(segments):
    with pytest.raises(layout.LeafError, match="cannot be a file name"):
        layout.leaf_names([segments])


def test_a_long_name_is_refused_by_bytes():
    layout.leaf_names([("x" * 200,)])
    with pytest.raises(layout.LeafError, match="202 bytes"):
        layout.leaf_names([("\u00e9" * 101,)])


def test_leaf_specs_come_back_from_their_text():
    kind = run_record.LeafKind
    specs = {
        "a": run_record.LeafSpec(kind.ARRAY, "key<fry>", ()),
        "b/0": run_record.LeafSpec(kind.NUMPY, "float8_e4m3fn", (3, 0)),
        "b/1": run_record.LeafSpec(kind.TEXT),
    }
    tree = {
        "a": str(specs["a"]),
        "b": [str(specs["b/0"]), str(specs["b/1"])],
        "n": None,
    }
    assert run_record.leaf_specs({"state": tree}) == specs
    with pytest.raises(run_record.RecordError, match="complex"):
        run_record.parse_leaf("complex")


def _record(step=3, **content):
    return run_record.make_record(step, time_secs=1.0, state={"w": "int"}, **content)


def _write(folder, record):
    run = pathlib.Path(folder, "run")
    run.mkdir(parents=True)
    text = record if isinstance(record, str) else json.dumps(record)
    (run / "metadata").write_text(text)


def test_a_record_comes_back(tmp_path):
    data = {"next": 4, "epochs": [1.5, None, "x", True]}
    record = _record(data=data, metrics={"loss": float("nan"), "bits": 2})
    data["epochs"].append("later")
    _write(tmp_path / "3", record)
    read = run_record.read_record(tmp_path / "3")
    assert read["data"] == {"next": 4, "epochs": [1.5, None, "x", True]}
    assert read["metrics"]["bits"] == 2.0
    assert read["metrics"]["loss"] != read["metrics"]["loss"]
    # No NaN token: any JSON reader takes it.
    json.loads((tmp_path / "3/run/metadata").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"a": {1: 2}}, "data.a"),
        ({"a": [object()]}, r"data.a\[0\]"),
        ({"a": float("inf")}, "data.a"),
    ],
)
def test_what_json_would_change_is_refused(data, where):
    with pytest.raises((TypeError, ValueError), match=where):
        _record(data=data)


def test_an_unknown_format_is_refused_by_name(tmp_path):
    record = _record()
    record["format"]["version"] = 7
    _write(tmp_path / "3", record)
    with pytest.raises(records.FaultError, match="jaxft-checkpoint 7") as error:
        run_record.read_record(tmp_path / "3")
    assert error.value.fault.kind is records.FaultKind.CONFIG


@pytest.mark.parametrize(
    "text",
    [
        *("{", "", "[]", "null", '{"a": 1}', "[" * 100_000, "\udcff"),
        json.dumps(_record()).replace("jaxft-checkpoint", "jaxft-checkpoins"),
        '{"format": {"name": "jaxft-checkpoint", "version": 1}}',
    ],
)
def test_what_is_no_record_is_damage(tmp_path, text):
    _write(tmp_path / "3", "")
    (tmp_path / "3/run/metadata").write_text(text, errors="surrogateescape")
    with pytest.raises(run_record.RecordError):
        run_record.read_record(tmp_path / "3")


@pytest.mark.parametrize(
    "wrong", [None, True, -1.5, "text", [], [1], {"a": []}, {"a": "b"}, {"a": 10**400}]
)
def test_a_wrong_type_anywhere_in_a_record_is_damage(tmp_path, wrong):
    """Or is taken as it is: never another exception, for whoever reads it next."""
    _write(tmp_path / "3", "")
    refused = []
    for name in _record():
        text = json.dumps(_record() | {name: wrong})
        (tmp_path / "3/run/metadata").write_text(text)
        try:
            run_record.leaf_specs(run_record.read_record(tmp_path / "3"))
        except run_record.RecordError:
            refused.append(name)
    free = set()
    if isinstance(wrong, dict):
        free |= {"data", "run"}
    if isinstance(wrong, float):
        free |= {"time"}
    if wrong in ([], {"a": []}):  # no leaf
        free |= {"state"}
    assert set(_record()) - set(refused) == free


@pytest.mark.parametrize("version", [None, True, "1", 1.0, 0, -1, []])
def test_a_version_that_never_was_is_damage(tmp_path, version):
    record = _record()
    record["format"]["version"] = version
    _write(tmp_path / "3", record)
    with pytest.raises(run_record.RecordError):
        run_record.read_record(tmp_path / "3")


def test_discovery_tells_apart_what_is_there(tmp_path):
    for step in (2, 10, 9):
        _write(tmp_path / str(step), _record(step))
    for name in ("999", "011", "notes", "4.quarantined-1", "5.abandoned-t2"):
        (tmp_path / name).mkdir()
    for name in ("12.orbax-checkpoint-tmp", "13.orbax-checkpoint-tmp-sealed"):
        (tmp_path / name).mkdir()
    (tmp_path / "77").write_text("a file")
    found = layout.discover(tmp_path)
    assert found.steps == [2, 9, 10]
    assert {os.path.basename(path): reason for path, reason in found.foreign} == {
        "77": "not a folder",
        "999": "it has no run folder",
    }
    assert sorted(step for _, step in found.unfinished) == [12, 13]
    assert len(found.set_aside) == 2


def test_absent_and_unreadable_are_two_answers(tmp_path):
    assert layout.discover(tmp_path / "absent") == layout.Discovery()
    (tmp_path / "file").write_text("")
    os.symlink(tmp_path / "not mounted", tmp_path / "link")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for name in ("file", "file/checkpoints", "link"):
        with pytest.raises(records.FaultError) as error:
            layout.discover(tmp_path / name)
        assert error.value.fault.kind is records.FaultKind.CONFIG
        assert f"{tmp_path / name}: " in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(OSError, match="symbolic links"):
        layout.discover(tmp_path / "loop")


def test_quarantine_takes_the_first_free_number(tmp_path):
    (tmp_path / "5.quarantined-1").mkdir()
    (tmp_path / "5").mkdir()
    aside = layout.quarantine(str(tmp_path / "5"))
    assert aside == str(tmp_path / "5.quarantined-2")
    assert not (tmp_path / "5").exists()


@pytest.mark.parametrize("root", ["", "gs://bucket/run"])
def test_a_remote_root_is_refused(root):
    with pytest.raises(ValueError, match="not a local folder"):
        layout.absolute_root(root)


def test_the_root_is_absolute_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert layout.absolute_root("~/a b/") == str(tmp_path / "a b")
    assert layout.absolute_root("./run/../run") == str(tmp_path / "run")


def test_a_size_is_told_as_far_as_it_can_be_read(tmp_path, monkeypatch):
    for name in ("good", "bad", "gone"):
        (tmp_path / name).write_bytes(b"x" * 100)
    lstat = os.lstat
    errors = {"bad": errno.EIO, "gone": errno.ENOENT}

    def fail(path):
        if number := errors.get(os.path.basename(path)):
            raise OSError(number, os.strerror(number))
        return lstat(path)

    monkeypatch.setattr(os, "lstat", fail)
    assert layout.count_bytes(tmp_path) == 100
