"""Durable files: whole or not at all, and one winner of many."""

import contextlib
import errno
import os
import pathlib
import threading

import pytest

from jaxft import durable


@pytest.fixture
def synced(monkeypatch):
    """What was made durable, in order, and the names that its folder held then."""
    real, seen = os.fsync, []

    def fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        seen.append((path, sorted(os.listdir(folder))))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def _no_leftovers(folder):
    return not [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("write", [durable.replace, durable.write_once])
def test_the_bytes_are_durable_before_the_name_and_the_name_after(
    tmp_path, synced, write
):
    write(tmp_path / "a", b"text")
    (file, before), (folder, after) = synced
    assert os.path.basename(file).startswith(durable.UNFINISHED)
    assert "a" not in before
    assert (folder, after[-1]) == (str(tmp_path), "a")
    assert (tmp_path / "a").read_bytes() == b"text"
    assert _no_leftovers(tmp_path)


def test_a_sealed_folder_is_durable_and_read_only_and_linked_files_already_are(
    tmp_path, synced
):
    folder = tmp_path / "a"
    (folder / "b/c").mkdir(parents=True)
    for name in ("one", "b/two", "b/c/linked", "b/c/loose"):
        (folder / name).write_bytes(b"text")
    for name in ("linked", "loose"):
        os.link(folder / "b/c" / name, tmp_path / name)
    (tmp_path / "linked").chmod(0o444)
    durable.seal_folder(folder)
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o444}
    expected = {*folder.rglob("*"), folder} - {folder / "b/c/linked"}
    assert sorted(path for path, _ in synced) == sorted(map(str, expected))


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    durable.replace(path, b"one")
    durable.replace(path, b"two")
    with contextlib.suppress(ZeroDivisionError), durable.whole_file(path) as temporary:
        pathlib.Path(temporary).write_bytes(b"thr")
        raise ZeroDivisionError
    assert path.read_bytes() == b"two"
    assert _no_leftovers(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        durable.replace(tmp_path / "folder", b"four")
    assert _no_leftovers(tmp_path)


def test_of_many_writers_one_succeeds(tmp_path):
    won, barrier = [], threading.Barrier(8)

    def race(writer: int):
        for number in range(20):
            barrier.wait()
            try:
                durable.write_once(tmp_path / f"{number}.json", b"%d" % writer * 1000)
                won.append((number, writer))
            except FileExistsError:
                pass

    threads = [threading.Thread(target=race, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in won) == list(range(20))
    for number, writer in won:
        assert (tmp_path / f"{number}.json").read_bytes() == b"%d" % writer * 1000
    assert len(os.listdir(tmp_path)) == 20


def test_a_link_that_was_made_although_the_answer_was_lost_counts(
    tmp_path, monkeypatch
):
    real = os.link

    def link(source, target):
        real(source, target)
        real(source, target)  # What a client does that sends its request again.

    monkeypatch.setattr(os, "link", link)
    durable.write_once(tmp_path / "a", b"text")
    assert (tmp_path / "a").read_bytes() == b"text"
    with pytest.raises(FileExistsError):
        durable.write_once(tmp_path / "a", b"other")


def test_without_hard_links_nothing_is_written_over_either(tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EPERM, "no links here", target)

    monkeypatch.setattr(os, "link", link)
    durable.write_once(tmp_path / "a", b"text")
    with pytest.raises(FileExistsError):
        durable.write_once(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_bytes() == b"text"
    assert _no_leftovers(tmp_path)


def test_every_new_folder_is_durable_in_the_one_above(tmp_path, synced):
    durable.make_folders(tmp_path / "a" / "b")
    durable.make_folders(tmp_path / "a" / "b")
    assert [path for path, _ in synced] == [str(tmp_path), str(tmp_path / "a")]


def test_what_kills_have_left_of_one_file_is_swept(tmp_path):
    for name in ("a.json", "b.json", "[a].json"):
        (tmp_path / f"{durable.UNFINISHED}0123abcd-{name}").touch()
    (tmp_path / "a.json").touch()
    durable.sweep(tmp_path / "a.json")
    durable.sweep(tmp_path / "[a].json")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"{durable.UNFINISHED}0123abcd-b.json", "a.json"]
