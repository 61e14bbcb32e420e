"""A mirror on another disk: a root like any other, and nothing copied twice."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import decisions, layout, manifest, mirror, mirror_fetch

ROOT = pathlib.Path(__file__).parents[3]
A, B = np.arange(1000, dtype=np.float32), np.ones((4, 6), np.int32)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "mirror"


def test_a_step_arrives_whole_and_comes_back(root, target, sync, events, same_files):
    step = root.add(10, a=A, b=B)
    sync(target)
    assert same_files(step, target / "10")
    assert events.of("mirror_commit")[0]["step"] == 10
    assert mirror_fetch.list_steps(str(target)) == [10]
    new = root.path.parent / "new"
    path = mirror_fetch.fetch(str(target), into=new, emit=events)
    assert path == str(new / "10")
    assert same_files(step, path)
    assert not manifest.check_files(path, manifest.read(path), full=True)
    assert events.of("mirror_fetch")[0]["step"] == 10
    assert layout.discover(new).steps == layout.discover(target).steps == [10]


def test_shared_files_are_linked_and_equal_ones_written_apart_are_not(
    root, target, sync, events, same_files
):
    root.add(10, frozen=A, moving=B)
    root.add(20, frozen=A, moving=B + 1)
    sync(target)
    root.add(30, links={"frozen": 10}, moving=B + 2)
    sync(target)
    for step in (10, 20, 30):
        assert same_files(root.step_path(step), target / str(step))
    chunk = "state/frozen/c/0"
    inodes = [os.stat(target / step / chunk).st_ino for step in ("10", "20", "30")]
    assert inodes[0] == inodes[2] != inodes[1]
    moving = [os.stat(target / s / "state/moving/c/0/0").st_ino for s in ("10", "30")]
    assert moving[0] != moving[1]
    last = events.of("mirror_commit")[-1]
    assert last["num_shared_bytes"] >= A.nbytes > last["num_bytes"] > 0


def test_what_the_root_drops_goes_after_its_successor_is_there(
    root, target, sync, events
):
    for step in (10, 20):
        root.add(step, a=A)
    sync(target)
    (root.path / "10").rename(root.path / "gone")
    (root.path / "20").rename(root.path / "gone-too")
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [
        10,
        20,
    ]  # nothing newer stands for them
    root.add(30, a=A + 1)
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [30]
    assert [event["step"] for event in events.of("mirror_deleted")] == [10, 20]
    kinds = [kind for kind, _ in events.all]
    assert kinds.index("mirror_deleted") > len(kinds) - 1 - kinds[::-1].index(
        "mirror_commit"
    )


def test_a_quarantined_step_stays_on_the_mirror_and_an_abandoned_one_goes(
    root, target, sync
):
    for step in (10, 20, 30):
        root.add(step, a=A + step)
    sync(target)
    layout.quarantine(str(root.step_path(20)))
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [10, 20, 30]
    decisions.roll_back(root.path, to=10, reason="test")
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [10]
    # A good copy of what was damaged on the disk is worth more than before.
    for step in (20, 30):
        root.add(step, a=A, timeline=1)
    sync(target)
    layout.quarantine(str(root.step_path(20)))
    root.add(40, a=A, timeline=1)
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [10, 20, 30, 40]


def test_a_label_of_a_new_timeline_replaces_the_old_one(
    root, target, sync, same_files, events
):
    root.add(10, a=A)
    root.add(20, a=A)
    sync(target)
    layout.abandon(str(root.step_path(20)), timeline=0)
    new = root.add(20, a=A + 1, timeline=1)
    sync(target)
    assert same_files(new, target / "20")
    assert not events.of("mirror_failed")
    assert sorted(os.listdir(target)) == ["10", "20"]


def test_steps_of_another_root_are_left_alone(root, target, sync, events, tmp_path):
    root.add(10, a=A)
    sync(target)
    other = type(root)(tmp_path / "other")
    other.path.mkdir()
    other.add(10, a=A + 5)
    other.add(30, a=A)
    before = (target / "10" / "COMMIT").read_bytes()
    copier = mirror.Mirror(str(target), emit=events)
    copier.offer(str(other.path / "30"))
    assert copier.close()
    assert (target / "10" / "COMMIT").read_bytes() == before
    assert mirror_fetch.list_steps(str(target)) == [10, 30]
    (failed,) = events.of("mirror_failed")
    assert failed["step"] == 10
    assert "is of another root" in failed["reason"]


def test_a_root_begun_from_the_mirror_goes_on_as_the_one_that_wrote_it(
    root, target, sync, events, tmp_path
):
    root.add(10, a=A)
    sync(target)
    new = type(root)(tmp_path / "new")
    mirror_fetch.fetch(str(target), into=new.path)
    new.add(20, a=A + 1)
    (new.path / "10").rename(new.path / "gone")
    copier = mirror.Mirror(str(target), emit=events)
    copier.offer(str(new.path / "20"))
    assert copier.close()
    assert mirror_fetch.list_steps(str(target)) == [20]
    assert not events.of("mirror_failed")


def test_a_damaged_source_is_not_mirrored_and_the_others_are(
    root, target, sync, events
):
    parts = {10: "run/metadata", 20: "state/a/c/1", 30: "", 40: "manifest/metadata"}
    for step, part in parts.items():
        path = pathlib.Path(root.add(step, a=A))
        (path / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"run": ""}}')
        if step == 40:  # As if a scratch disk had been swept.
            shutil.rmtree(path / "manifest")
            shutil.rmtree(path / "run")
        elif part:
            data = bytearray((path / part).read_bytes())
            data[len(data) // 2] ^= 4
            (path / part).chmod(0o644)
            (path / part).write_bytes(data)
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [30]
    reasons = {event["step"]: event["reason"] for event in events.of("mirror_failed")}
    assert "run/metadata" in reasons[10]
    assert "leaf a" in reasons[20]
    assert "run/metadata is missing" in reasons[40]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_mirror_never_gives_a_wrong_bit(
    root, target, sync, events, damage, same_files
):
    root.add(10, a=A)
    root.add(20, a=A + 1)
    sync(target)
    new = root.path.parent / "new"
    victim = target / "20" / "state/a/c/0"
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[7] ^= 1
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(records.FaultError, match="state/a/c/0") as info:
        mirror_fetch.fetch(str(target), 20, into=new)
    assert info.value.fault.kind is records.FaultKind.NO_CHECKPOINT
    path = mirror_fetch.fetch(str(target), into=new, emit=events)
    assert same_files(path, root.step_path(10))
    assert sorted(os.listdir(new)) == ["10", "mirror-id"]
    assert events.of("mirror_failed")[0]["step"] == 20


def test_an_unhealthy_step_is_mirrored_but_no_resume_point(root, target, sync):
    root.add(10, a=A)
    root.add(20, a=A, healthy=False)
    sync(target)
    assert mirror_fetch.list_steps(str(target)) == [10, 20]
    assert mirror_fetch.list_steps(str(target), healthy_only=True) == [10]
    new = root.path.parent / "new"
    assert mirror_fetch.fetch(str(target), into=new).endswith("/10")
    assert mirror_fetch.fetch(str(target), 20, into=new).endswith("/20")


def test_what_is_not_there_is_said(root, target, sync):
    new = root.path.parent / "new"
    with pytest.raises(records.FaultError, match="no step on"):
        mirror_fetch.fetch(str(target), into=new)
    root.add(10, a=A)
    sync(target)
    with pytest.raises(records.FaultError, match=r"step 7 is not on .*; there: 10"):
        mirror_fetch.fetch(str(target), 7, into=new)
    with pytest.raises(FileExistsError, match="move it away"):
        mirror_fetch.fetch(str(target), 10, into=root.path)


@pytest.mark.parametrize("text", ["", "ftp://x/y", "s3://"])
def test_an_address_of_nothing_is_refused(text):
    with pytest.raises(ValueError, match="is no folder and no address"):
        mirror.Mirror(text)


def test_a_mirror_in_the_root_itself_is_refused(root, sync, events):
    root.add(10, a=A)
    sync(root.path)
    assert "checkpoint root itself" in events.of("mirror_failed")[0]["reason"]
    assert layout.discover(root.path).steps == [10]


def test_a_full_or_missing_disk_is_an_event_and_the_next_offer_tries_again(
    root, tmp_path, events
):
    step = root.add(10, a=A)
    blocked = tmp_path / "disk"
    blocked.write_text("a file where the mirror should be")
    copier = mirror.Mirror(str(blocked / "mirror"), emit=events)
    copier.offer(step)
    assert "disk" in events.wait_for("mirror_failed")["reason"]
    blocked.unlink()
    copier.offer(step)
    assert events.wait_for("mirror_commit")["step"] == 10
    assert copier.close()


def test_the_throttle_holds_and_close_has_a_deadline(root, target, events):
    step = root.add(10, a=A, b=B)
    size = layout.count_bytes(step)
    start = time.monotonic()
    copier = mirror.Mirror(str(target), bytes_per_sec=3 * size, emit=events)
    copier.offer(step)
    assert copier.busy_step in (-1, 10)
    assert copier.close()
    assert 0.25 < time.monotonic() - start < 10
    assert copier.busy_step == -1
    step = root.add(20, a=A)
    copier = mirror.Mirror(str(target), bytes_per_sec=size / 1000, emit=events)
    copier.offer(step)
    start = time.monotonic()
    assert not copier.close(0.2)
    assert time.monotonic() - start < 5
    assert "not over within 0.2 s" in events.of("mirror_failed")[-1]["reason"]
    assert mirror_fetch.list_steps(str(target)) == [10]


def test_a_step_that_goes_while_it_is_copied_is_no_failure(root, target, events):
    root.add(10, a=A)
    step = root.add(20, a=A)
    size = layout.count_bytes(step)
    copier = mirror.Mirror(str(target), bytes_per_sec=2 * size, emit=events)
    copier.offer(step)
    while copier.busy_step != 20:
        time.sleep(0.001)
    (root.path / "20").rename(root.path / f"20{layout.TMP_MARK}-deleted")
    assert copier.close()
    assert mirror_fetch.list_steps(str(target)) == [10]
    assert not events.of("mirror_failed")


_COPY_BY_COPYING = """
import os, shutil, signal, sys
from jaxft.checkpoint import mirror

left = int(sys.argv[3])
rename = os.rename

def one_file(act):
    def counted(*args, **options):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return act(*args, **options)
    return counted

def rename_by_copying(old, new):
    if not os.path.isdir(old):
        return rename(old, new)
    shutil.copytree(old, new, copy_function=one_file(shutil.copy2), dirs_exist_ok=True)
    for folder, _, files in os.walk(old):
        for file in files:
            one_file(os.unlink)(os.path.join(folder, file))
    shutil.rmtree(old)

os.rename = rename_by_copying
copier = mirror.Mirror(sys.argv[1])
copier.offer(sys.argv[2])
assert copier.close(60)
"""


def test_where_a_rename_copies_file_by_file_a_kill_leaves_no_half_step(
    root, target, sync, same_files, full
):
    """As of an object store that is mounted as a folder."""
    root.add(1, a=A, b=B)
    sync(target)
    steps = {1: shutil.move(root.path / "1", root.path.parent / "gone")}
    steps[2] = step = root.add(2, a=A + 1, b=B)
    num_files = sum(path.is_file() for path in pathlib.Path(step).rglob("*"))
    shutil.copytree(target, before := target.with_name("before"))
    kills = [num_files // 2, num_files + 2]  # while it copies, while it deletes
    for num_before in range(5 * num_files) if full else kills:
        shutil.rmtree(target)
        shutil.copytree(before, target)
        command = [sys.executable, "-c", _COPY_BY_COPYING, target, step, num_before]
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
        killed = done.returncode == -signal.SIGKILL
        there = mirror_fetch.list_steps(str(target))
        assert there == ([1] if num_before < 2 * num_files else [2])
        assert same_files(steps[there[0]], target / str(there[0]))
        sync(target)
        assert os.listdir(target) == ["2"]
        assert same_files(step, target / "2")
        if not killed:
            assert not done.returncode
            break
    assert killed == (not full)


_COPY = """
import sys
from jaxft.checkpoint import mirror, mirror_fetch
copier = mirror.Mirror(sys.argv[1], bytes_per_sec=float(sys.argv[3]))
copier.offer(sys.argv[2])
print("on", flush=True)
copier.close(60)
"""


def test_a_kill_in_the_middle_leaves_no_step_and_the_next_run_completes(
    root, target, sync, same_files
):
    step = root.add(10, a=A, b=B)
    rate = layout.count_bytes(step) / 100
    worker = subprocess.Popen(
        [sys.executable, "-c", _COPY, str(target), step, str(rate)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        end = time.monotonic() + 60
        while not list(target.glob("10*/*/*")):
            assert time.monotonic() < end
            assert worker.poll() is None
            time.sleep(0.01)
    finally:
        worker.kill()
        worker.wait()
    assert mirror_fetch.list_steps(str(target)) == []
    assert len(layout.discover(target).unfinished) == 1
    sync(target)
    assert same_files(step, target / "10")
    assert os.listdir(target) == ["10"]
