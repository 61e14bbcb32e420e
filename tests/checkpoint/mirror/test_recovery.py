"""After the disk is gone: what the mirror keeps, and what must not come back."""

import contextlib
import os
import resource
import shutil
import sys
import threading

import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import (
    decisions,
    layout,
    mirror,
    mirror_fetch,
    policies,
)

A = np.arange(100, dtype=np.float32)


@pytest.fixture(params=["folder", "s3"])
def target(request, tmp_path):
    """The address of a mirror of either kind."""
    if request.param == "folder":
        return str(tmp_path / "mirror")
    return request.getfixturevalue("s3").url()


def _drop(root, *steps):
    for step in steps:
        shutil.rmtree(root.step_path(step))


def _lose(root):
    shutil.rmtree(root.path)


@pytest.mark.parametrize(
    ("keep", "after"),
    [
        ("last(2) | every(10)", [10, 20, 30, 36, 37]),
        ("last(9)", [10, 20, 30, 34, 35, 36, 37]),
        ("last(1)", [36, 37]),
        ("best(1, loss) | last(1)", [20, 36, 37]),
        (None, [10, 20, 30, 34, 36, 37]),
    ],
)
def test_who_begins_from_the_mirror_leaves_the_rest_to_the_policy(
    root, tmp_path, sync, events, keep, after
):
    target = str(tmp_path / "mirror")
    losses = {10: 3.0, 20: 1.0}
    for step in (10, 20, 30, 34, 35):
        root.add(step, a=A + step, metrics={"loss": losses.get(step, 2.0)})
    sync(target)
    _lose(root)
    assert mirror_fetch.fetch(target, into=root.path).endswith("/35")
    policy = keep and policies.parse_keep(keep)
    sync(target, keep=policy)
    # 35 is all that the root has: by itself no reason to delete anything.
    if keep is None or "every" in keep:
        assert mirror_fetch.list_steps(target) == [10, 20, 30, 34, 35]
    root.add(36, a=A)
    root.add(37, a=A)
    sync(target, keep=policy)
    _drop(root, *({35} - set(after)))
    sync(target, keep=policy)
    assert mirror_fetch.list_steps(target) == after
    assert not events.of("mirror_failed")


def test_the_policy_leaves_no_two_neighbours_with_one_file(root, tmp_path, sync):
    target = str(tmp_path / "mirror")
    root.add(10, frozen=A)
    root.add(11, frozen=A)
    root.add(20, links={"frozen": 10})
    root.add(21, frozen=A)
    sync(target)
    _lose(root)
    assert mirror_fetch.fetch(target, 21, into=root.path)
    sync(target, keep=policies.parse_keep("last(1) | every(10)"))
    # 10 and 20 are one file: what lies between them stays.
    assert mirror_fetch.list_steps(target) == [10, 11, 20, 21]
    sync(target, keep=policies.parse_keep("last(1)"))
    assert mirror_fetch.list_steps(target) == [21]


def test_what_was_rolled_back_does_not_come_back(root, target, sync, events):
    for step in (10, 20, 30):
        root.add(step, a=A + step)
    sync(target)
    decisions.roll_back(root.path, to=10, reason="spike", skip=(10, 20))
    # The steps were pruned before the mirror heard of it.
    for path in layout.discover(root.path).set_aside:
        shutil.rmtree(path)
    sync(target)
    assert mirror_fetch.list_steps(target) == [10]
    decided = decisions.read(root.path)
    assert len(decided.rollbacks) == 1
    _lose(root)
    assert mirror_fetch.fetch(target, into=root.path).endswith("/10")
    assert decisions.read(root.path) == decided
    assert decisions.read(root.path).skips_since(0) == [(10, 20)]
    # And the timeline goes on from there.
    root.add(20, a=A, timeline=1)
    sync(target)
    assert mirror_fetch.list_steps(target) == [10, 20]
    decisions.roll_back(root.path, to=10, reason="again")
    sync(target)
    assert mirror_fetch.list_steps(target) == [10]
    assert not events.of("mirror_failed")


def test_a_decision_counts_before_its_steps_are_gone(root, tmp_path, sync):
    target = str(tmp_path / "mirror")
    root.add(10, a=A)
    root.add(20, a=A)
    sync(target)
    # The step has still its name here, and its copy on the mirror.
    decisions.roll_back(root.path, to=10, reason="spike")
    (aside,) = layout.discover(root.path).set_aside
    os.rename(aside, root.path / "20")
    assert mirror_fetch.list_steps(target) == [10, 20]
    assert mirror_fetch.list_steps(target, into=root.path) == [10]
    with pytest.raises(records.FaultError, match="step 20 is not on"):
        mirror_fetch.fetch(target, 20, into=root.path)
    copies = decisions.texts(root.path)
    sync(target)
    assert mirror_fetch.list_steps(target) == [10]
    # A mirror of one root is a root that knows what was decided.
    assert decisions.texts(target) == copies


def test_decisions_about_another_root_are_not_ours(root, tmp_path, sync, events):
    target = str(tmp_path / "mirror")
    root.add(10, a=A)
    root.add(20, a=A)
    sync(target)
    decisions.roll_back(root.path, to=10, reason="spike")
    sync(target)
    other = type(root)(tmp_path / "other")
    other.path.mkdir()
    other.add(15, a=A)
    other.add(30, a=A)
    copier = mirror.Mirror(target, emit=events)
    copier.offer(str(other.path / "30"))
    assert copier.close()
    assert mirror_fetch.list_steps(target) == [10, 15, 30]
    decisions.roll_back(other.path, to=15, reason="other")
    copier.offer(str(other.path / "15"))
    assert copier.close()
    assert mirror_fetch.list_steps(target) == [10, 15]
    assert not events.of("mirror_failed")
    # A step of theirs beside ours takes out none of ours.
    mirror_fetch.fetch(target, 15, into=root.path)
    assert len(decisions.read(root.path).rollbacks) == 1


def test_a_root_of_whom_something_else_was_decided_is_not_filled(root, tmp_path, sync):
    target = str(tmp_path / "mirror")
    root.add(10, a=A)
    decisions.pin(root.path, 10, reason="first")
    sync(target)
    shutil.rmtree(root.path / "decisions")
    decisions.pin(root.path, 10, reason="second")
    _drop(root, 10)
    with pytest.raises(records.FaultError, match="its copy says something else"):
        mirror_fetch.fetch(target, into=root.path)
    assert not layout.discover(root.path).unfinished


def test_a_failed_fetch_leaves_nothing(root, tmp_path, sync):
    target = str(tmp_path / "mirror")
    root.add(10, a=A)
    sync(target)
    new = tmp_path / "new"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            mirror_fetch.fetch(target, into=new)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(new) == []
    assert mirror_fetch.fetch(target, into=new).endswith("/10")


def test_what_is_saved_after_close_is_mirrored(root, tmp_path, events):
    target = str(tmp_path / "mirror")
    copier = mirror.Mirror(target, emit=events)
    assert copier.close()
    for step in (10, 20, 30):
        # From several threads at once, as commits and rollbacks come.
        path = root.add(step, a=A)
        offers = [threading.Thread(target=copier.offer, args=(path,)) for _ in range(8)]
        for offer in offers:
            offer.start()
        for offer in offers:
            offer.join()
        assert copier.close()
        assert mirror_fetch.list_steps(target)[-1] == step
    assert len(events.of("mirror_commit")) == 3
    assert not events.of("mirror_failed")


def test_one_thread_copies_and_a_stopped_one_goes_on_when_asked(root, tmp_path, events):
    target = str(tmp_path / "mirror")
    step = root.add(10, a=A)
    rate = layout.count_bytes(step) * 1.5
    copier = mirror.Mirror(target, emit=events, bytes_per_sec=rate)
    copier.offer(step)
    asked = []
    assert not copier.close(
        60, may_wait=lambda: bool(asked.append(1)) or len(asked) < 3
    )
    assert len(asked) == 3
    copier.offer(step)
    copier.offer(step)
    names = [one.name for one in threading.enumerate()]
    assert names.count("jaxft-mirror") == 1
    assert copier.close()
    assert mirror_fetch.list_steps(target) == [10]
    assert len(events.of("mirror_failed")) == 1


def test_a_pass_without_news_reads_no_mark_and_no_manifest(root, tmp_path, events):
    target = str(tmp_path / "mirror")
    for step in (10, 20, 30):
        root.add(step, a=A)
    copier = mirror.Mirror(target, emit=events)
    copier.offer(str(root.step_path(30)))
    assert copier.close()
    read = []
    with _told_of_opens(read):
        copier.offer(str(root.step_path(30)))
        assert copier.close()
    names = [os.path.basename(path) for path in read]
    assert "COMMIT" not in names
    assert not [path for path in read if path.endswith("manifest/metadata")]
    # What changes is read anew.
    victim = tmp_path / "mirror" / "20" / "COMMIT"
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:-5])
    copier.offer(str(root.step_path(30)))
    assert copier.close()
    assert "mark is damaged" in events.of("mirror_failed")[0]["reason"]


_heard: list[list[str]] = []


@contextlib.contextmanager
def _told_of_opens(paths):
    """Fills `paths` with those of the files that any thread opens meanwhile."""
    if not _heard:
        sys.addaudithook(_hear)  # It stays as long as the process.
    _heard.append(paths)
    yield
    _heard.append([])


def _hear(name, args):
    if name == "open" and _heard:
        _heard[-1].append(str(args[0]))
