"""A mirror on a disk that is really full: it gives back space and finds its way out."""

import os
import time

import numpy as np
import pytest

from jaxft.checkpoint import decisions, mirror, mirror_fetch, policies

_DISK_BYTES = 1 << 20
A = np.arange(50_000, dtype=np.float32)  # 200 kB a step: the disk holds four


@pytest.fixture
def disk(tmp_path, mount_disk):
    return mount_disk(tmp_path / "disk", str(_DISK_BYTES))


def _fill(disk, *, num_free_bytes=0):
    left = os.statvfs(disk)
    size = left.f_bavail * left.f_frsize - num_free_bytes
    (disk / "ballast").write_bytes(b"x" * size)


def _forget(root, *steps):
    for step in steps:
        (root.path / str(step)).rename(root.path / f"gone-{step}")


def test_a_failed_copy_gives_its_space_back(root, disk, events):
    """Each time, not only when the same step is tried again."""
    _fill(disk, num_free_bytes=150_000)
    copier = mirror.Mirror(str(disk), emit=events)
    for number, step in enumerate((10, 20, 30), start=1):
        copier.offer(root.add(step, a=A + step))
        reason = events.wait_for("mirror_failed", num=number)["reason"]
        assert "No space left" in reason
        assert os.listdir(disk) == ["ballast"]
    (disk / "ballast").unlink()
    copier.offer(root.add(40, a=A))
    assert copier.close()
    assert mirror_fetch.list_steps(str(disk)) == [10, 20, 30, 40]
    assert sorted(os.listdir(disk)) == ["10", "20", "30", "40"]


def test_a_stopped_copy_gives_its_space_back(root, disk, events):
    copier = mirror.Mirror(str(disk), bytes_per_sec=1000, emit=events)
    copier.offer(root.add(10, a=A))
    assert not copier.close(0.3)
    end = time.monotonic() + 30
    while os.listdir(disk):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_root_let_go_makes_room_but_for_the_newest_good_step(
    root, disk, sync, events
):
    for step in (1, 2, 3):
        root.add(step, a=A + step)
    root.add(4, a=A + 4, healthy=False)
    sync(disk)
    root.add(10, a=A + 10)
    root.add(11, a=A + 11)
    _forget(root, 1, 2, 3, 4)
    _fill(disk)
    sync(disk)
    assert mirror_fetch.list_steps(str(disk)) == [10, 11]
    assert not events.of("mirror_failed")
    told = [
        (kind, fields["step"])
        for kind, fields in events.all[4:]
        if kind in ("mirror_commit", "mirror_deleted")
    ]
    deleted, committed = "mirror_deleted", "mirror_commit"
    assert told == [
        (deleted, 1),
        (deleted, 2),
        (committed, 11),
        (committed, 10),
        (deleted, 3),
        (deleted, 4),
    ]


def test_the_newest_good_step_is_never_given_up_for_room(root, disk, sync, events):
    root.add(1, a=A)
    sync(disk)
    root.add(2, a=A + 1)
    _forget(root, 1)
    _fill(disk)
    sync(disk)
    assert mirror_fetch.list_steps(str(disk)) == [1]
    assert "No space left" in events.of("mirror_failed")[0]["reason"]
    (disk / "ballast").unlink()
    sync(disk)
    assert mirror_fetch.list_steps(str(disk)) == [2]


def test_a_root_that_began_anew_makes_no_room(root, disk, sync, events):
    """What it lost is newer than all that it has."""
    for step in (1, 2, 3):
        root.add(step, a=A + step)
    sync(disk)
    _forget(root, 1, 2, 3)
    root.add(1, a=A)
    _fill(disk)
    sync(disk)
    assert mirror_fetch.list_steps(str(disk)) == [1, 2, 3]
    assert events.of("mirror_failed")


def test_pinned_steps_stay_and_abandoned_ones_make_room(root, disk, sync, events):
    """What was decided is acted on although the mirror has no room to keep it."""
    for step in (1, 2, 3, 4):
        root.add(step, a=A + step)
    sync(disk)
    decisions.pin(str(root.path), 1, reason="a test")
    decisions.roll_back(str(root.path), to=3, reason="a test")
    root.add(5, a=A + 5, timeline=1)
    _forget(root, 1, 2)
    _fill(disk)
    sync(disk)
    assert mirror_fetch.list_steps(str(disk)) == [1, 3, 5]
    assert not events.of("mirror_failed")
    kept = os.listdir(disk / "decisions")
    assert sorted(kept) == ["1.json", "2.json"]


def test_who_begins_from_a_full_mirror_drops_by_the_policy(
    root, tmp_path, disk, sync, events
):
    for step in (1, 2, 3, 4):
        root.add(step, a=A + step)
    sync(disk)
    new = type(root)(tmp_path / "new" / "checkpoints")
    mirror_fetch.fetch(str(disk), into=new.path, emit=events)
    new.add(5, a=A + 5)
    _fill(disk)
    copier = mirror.Mirror(str(disk), keep=policies.parse_keep("last(2)"), emit=events)
    copier.offer(str(new.step_path(5)))
    assert copier.close()
    assert not events.of("mirror_failed")
    assert mirror_fetch.list_steps(str(disk)) == [4, 5]
