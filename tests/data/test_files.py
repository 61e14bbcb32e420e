import pathlib
import sysconfig

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.config import ConfigError
from jaxft.data.files import find_stdlib, find_text, plan_holdout, read_files


def write(folder, name, text="x"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_stdlib_is_the_librarys_own_source():
    files = find_stdlib(pathlib.Path(sysconfig.get_path("stdlib")))
    assert list(files) == sorted(files)
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} <= files.keys()
    for name, path in files.items():
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "site-packages", "__pycache__"} & set(folders)
        assert path.suffix == ".py"


def test_stdlib_leaves_out_tests_builds_and_what_was_installed(tmp_path):
    kept = ["a.py", "lib2to3/main.py", "unittest/case.py", "testing.py"]
    left_out = [
        "test/test_a.py",
        "lib2to3/tests/data/x.py",
        "idlelib/idle_test/t.py",
        "site-packages/x/y.py",
        "dist-packages/y.py",
        "__pycache__/a.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "lib-dynload/x.py",
        "_sysconfigdata__linux_.py",
        "a.txt",
    ]
    for name in kept + left_out:
        write(tmp_path, name)
    assert list(find_stdlib(tmp_path)) == sorted(kept)


def test_glob_finds_files_in_a_stable_order(tmp_path):
    for name in ["b.txt", "deep/er/a.txt", "a.txt", "a.md"]:
        write(tmp_path, name)
    found = find_text(str(tmp_path / "**" / "*.txt"))
    assert list(found) == ["a.txt", "b.txt", "deep/er/a.txt"]
    assert found["b.txt"] == tmp_path / "b.txt"


def test_glob_may_start_at_home_or_here(tmp_path, monkeypatch):
    write(tmp_path, "my texts/a.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(find_text("~/my texts/*.txt")) == ["a.txt"]
    monkeypatch.chdir(tmp_path)
    assert list(find_text("my texts/*.txt")) == ["a.txt"]


def test_a_name_with_glob_characters_is_taken_at_its_word(tmp_path):
    path = write(tmp_path, "draft [2].txt")
    assert list(find_text(str(path)).values()) == [path]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("*.txt", "matches no file"),
        ("folder", "is a folder; give a glob, e.g. 'folder/\\*\\*/\\*.txt'"),
        ("fold*", "matches no file"),
        ("bro\nken", "matches no file"),
    ],
)
def test_no_match_says_where_it_looked(tmp_path, monkeypatch, path, problem):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem) as caught:
        find_text(path)
    assert caught.value.path == "data.path"
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_named():
    # A file that opens for everybody and that nobody can read from the start.
    path = pathlib.Path("/proc/self/mem")
    if not path.is_file():
        pytest.skip("no /proc")
    with pytest.raises(ConfigError, match=r"cannot read '/proc/self/mem': \S+") as e:
        read_files({"mem": path}, setting="data.path")
    assert "\n" not in str(e.value)


SIZES = st.dictionaries(st.text(max_size=4), st.integers(1, 1000), max_size=20)


@settings(deadline=None)
@given(sizes=SIZES, fraction=st.floats(0, 0.999))
def test_holdout_stays_within_its_share_and_leaves_something(sizes, fraction):
    held = plan_holdout(sizes, fraction=fraction)
    share = fraction * sum(sizes.values())
    taken = sum(sizes[name] for name in held)
    assert taken <= share + 1e-6
    assert not held or taken >= share / 2 - 1e-6
    assert held < sizes.keys() or not sizes
    # Independent of the order in which files are found.
    assert held == plan_holdout(dict(reversed(sizes.items())), fraction=fraction)


def test_holdout_comes_close_to_its_share():
    sizes = {f"{i}.py": 100 + i for i in range(400)}
    held = plan_holdout(sizes, fraction=0.05)
    share = sum(sizes[name] for name in held) / sum(sizes.values())
    assert 0.045 < share <= 0.05
    # By hash, not by place: not all from one end of the alphabet.
    assert {int(name[:-3]) // 100 for name in held} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sizes", "fraction"),
    [({"a": 1000}, 0.5), ({"a": 1000, "b": 1000}, 0.1), ({"a": 900, "b": 1}, 0.1)],
)
def test_no_whole_file_is_held_out_where_none_fits_well(sizes, fraction):
    assert plan_holdout(sizes, fraction=fraction) == frozenset()
