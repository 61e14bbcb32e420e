"""What a root must be able to do is tried, and leaves nothing behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from jaxft import records
from jaxft.checkpoint import space
from jaxft.config import ConfigError


def test_a_good_root_is_left_as_it_was(tmp_path):
    assert space.probe(str(tmp_path / "a" / "b")).has_links
    assert space.probe(str(tmp_path)).has_links
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "name", "ability"),
    [
        (os, "fsync", "fsync"),
        (os, "rename", "rename"),
        (os, "write", "write"),
        (os, "mkdir", "make a folder"),
        (fcntl, "flock", "lock"),
    ],
)
def test_what_does_not_work_is_named(tmp_path, monkeypatch, module, name, ability):
    def refuse(*args, **kwargs):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(space.SpaceError) as error:
        space.probe(str(tmp_path / "root"))
    monkeypatch.undo()
    assert ability in str(error.value)
    assert str(tmp_path / "root") in str(error.value)
    assert "not supported" in str(error.value)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []


def test_what_a_kill_left_of_a_probe_goes_with_the_next_one(tmp_path):
    """Also where the root was not there yet, and above it lies what others need."""
    root = tmp_path / "new" / "root"
    program = """
import os, signal, sys
from jaxft import records
from jaxft.checkpoint import space
from jaxft.config import ConfigError
os.rename = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
space.probe(sys.argv[1])
"""

    def kill():
        command = [sys.executable, "-c", program, str(root)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL

    kill()
    (left,) = os.listdir(tmp_path)
    # Somebody else's, who probes for another root.
    space.probe(str(tmp_path / "other"))
    assert os.listdir(tmp_path) == [left]
    space.probe(str(root))
    assert os.listdir(tmp_path) == []
    kill()
    root.mkdir(parents=True)
    space.probe(str(root))
    assert os.listdir(tmp_path) == ["new"]
    kill()
    space.probe(str(root))
    assert os.listdir(root) == []


def test_no_hard_links_is_no_failure(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert not space.probe(str(tmp_path)).has_links


def test_room_for_what_is_kept_and_one_more(tmp_path):
    def ask(*, free, kept=3, there=0):
        space.check_space(
            str(tmp_path / "root"),
            state_bytes=100,
            num_kept=kept,
            num_there=there,
            free_bytes=lambda folder: free,
        )

    ask(free=400)
    with pytest.raises(space.SpaceError, match=r"399 B free, and 4 more .* 100 B"):
        ask(free=399)
    ask(free=200, there=2)
    # What is there is deleted only after the next one has been committed.
    ask(free=100, there=50)
    with pytest.raises(space.SpaceError, match="1 more"):
        ask(free=99, there=50)


@pytest.mark.parametrize("is_linked", [False, True])
def test_what_the_next_save_deletes_first_is_room_as_well(tmp_path, is_linked):
    left = tmp_path / "40.orbax-checkpoint-tmp" / "state"
    left.mkdir(parents=True)
    (left / "chunk").write_bytes(b"x" * 40_000)
    if is_linked:  # it stays under its other name
        os.link(left / "chunk", tmp_path / "chunk")

    def ask():
        space.check_space(
            str(tmp_path),
            state_bytes=10_000,
            num_kept=3,
            num_there=0,
            leftovers=[str(left.parent), str(tmp_path / "gone")],
            free_bytes=lambda folder: 0,
        )

    if is_linked:
        with pytest.raises(space.SpaceError):
            ask()
    else:
        ask()


def test_a_real_small_disk(tmp_path, mount_disk):
    root = str(mount_disk(tmp_path / "disk", "4m") / "checkpoints")
    space.check_space(root, state_bytes=1 << 20, num_kept=1, num_there=0)
    with pytest.raises(space.SpaceError, match=r"4\.0 MiB free"):
        space.check_space(root, state_bytes=2 << 20, num_kept=3, num_there=0)


def _wrapped(number):
    """As the probe tells it: the cause is one link away."""
    error = space.SpaceError("it cannot write a file")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("error", "is_for_a_while"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (_wrapped(errno.ENOSPC), True),
        (_wrapped(errno.EDQUOT), True),
        (_wrapped(errno.EROFS), True),
        (_wrapped(errno.EIO), True),
        (space.RoomError("little room"), True),
        (_wrapped(errno.EACCES), False),
        (_wrapped(errno.EOPNOTSUPP), False),
        (space.SpaceError("no locks"), False),
        (ValueError("a leaf"), False),
    ],
)
def test_what_has_worked_before_is_no_wrong_setting(error, is_for_a_while):
    for found in (error, ConfigError("checkpoint.mirror", str(error))):
        if found is not error:
            found.__cause__ = error
        path = "checkpoint" if found is error else "checkpoint.mirror"
        fresh = space.refusal(found, newest=None)
        assert isinstance(fresh, ConfigError)
        assert (fresh.path, fresh.problem) == (path, str(error))
        again = space.refusal(found, newest=0)
        assert isinstance(again, records.FaultError) is is_for_a_while
        if is_for_a_while:
            assert (again.fault.exit_code, again.fault.step) == (74, 0)
            assert str(error) in str(again)
            assert "goes on from step 0" in str(again)
        else:
            assert str(again) == str(fresh)
