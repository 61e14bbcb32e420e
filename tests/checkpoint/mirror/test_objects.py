"""A mirror in an object store, over a wire that is late, torn or dead."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxft import records
from jaxft.checkpoint import layout, mirror, mirror_fetch, mirror_mark, mirror_objects

A, B = np.arange(1000, dtype=np.float32), np.ones((4, 6), np.int32)


def _blobs(s3) -> list[str]:
    return [key for key in s3.list_keys() if "/blobs/" in key]


def test_a_step_arrives_whole_and_comes_back(root, s3, sync, events, same_files):
    step = root.add(10, a=A, b=B)
    sync(s3.url())
    assert mirror_fetch.list_steps(s3.url()) == [10]
    new = root.path.parent / "new"
    path = mirror_fetch.fetch(s3.url(), into=new)
    assert same_files(step, path)
    # Equal files of one step are one object.
    distinct = {
        file.read_bytes() for file in root.step_path(10).rglob("*") if file.is_file()
    }
    assert events.of("mirror_commit")[0]["num_bytes"] == sum(map(len, distinct))
    assert sorted(os.listdir(new)) == ["10", "mirror-id"]


@pytest.mark.slow
def test_files_in_pieces_and_in_batches(
    root, s3, sync, events, same_files, monkeypatch
):
    monkeypatch.setattr(mirror_mark, "PIECE_BYTES", 1000)
    step = root.add(10, a=A, b=B)
    sync(s3.url())
    assert any(key.endswith(".1") for key in _blobs(s3))
    path = mirror_fetch.fetch(s3.url(), into=root.path.parent / "new")
    assert same_files(step, path)


def test_shared_files_are_sent_once_and_go_with_their_last_step(
    root, s3, sync, events, same_files
):
    root.add(10, frozen=A, moving=B)
    root.add(20, frozen=A, moving=B)
    sync(s3.url())
    root.add(30, links={"frozen": 10}, moving=B + 2)
    sync(s3.url())
    last = events.of("mirror_commit")[-1]
    assert last["num_shared_bytes"] >= A.nbytes > last["num_bytes"]
    # What was written apart lies apart, though equal: 10 and 20 share no object.
    assert len([key for key in _blobs(s3) if key.endswith(".20")]) > 4
    (root.path / "10").rename(root.path / "gone")
    sync(s3.url())
    assert mirror_fetch.list_steps(s3.url()) == [20, 30]
    path = mirror_fetch.fetch(s3.url(), 30, into=root.path.parent / "new")
    assert same_files(path, root.step_path(30))
    (root.path / "30").rename(root.path / "gone-too")
    root.add(40, a=A)
    sync(s3.url())
    assert mirror_fetch.list_steps(s3.url()) == [20, 40]
    assert not [key for key in _blobs(s3) if key.endswith((".10", ".30"))]


@pytest.mark.slow
def test_a_label_of_a_new_timeline_replaces_the_old_one(root, s3, sync, same_files):
    root.add(10, a=A)
    root.add(20, a=A)
    sync(s3.url())
    layout.abandon(str(root.step_path(20)), timeline=0)
    new = root.add(20, a=A + 1, timeline=1)
    sync(s3.url())
    path = mirror_fetch.fetch(s3.url(), 20, into=root.path.parent / "new")
    assert same_files(new, path)
    files = {
        file.read_bytes() for file in root.step_path(20).rglob("*") if file.is_file()
    }
    assert len([key for key in _blobs(s3) if key.endswith(".20")]) == len(files)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("kind", ["chunk", "mark"])
def test_a_damaged_object_never_gives_a_wrong_bit(
    root, s3, sync, same_files, damage, kind
):
    root.add(10, a=A)
    root.add(20, a=A + 1)
    sync(s3.url())
    store = s3.store()
    key = "mirror/20/COMMIT"
    if kind == "chunk":
        sizes = {k: len(store.read(k).result().value) for k in _blobs(s3)}
        key = next(k for k in _blobs(s3) if k.endswith(".20") and sizes[k] == 2004)
    data = bytearray(store.read(key).result().value)
    data[len(data) // 2] ^= 1
    bad = {"flip": bytes(data), "truncate": bytes(data[:-3]), "delete": None}[damage]
    store.write(key, bad).result()
    new = root.path.parent / "new"
    with pytest.raises(records.FaultError, match="step 20"):
        mirror_fetch.fetch(s3.url(), 20, into=new)
    assert same_files(mirror_fetch.fetch(s3.url(), into=new), root.step_path(10))


def test_late_torn_and_refused_requests_are_ridden_out(
    root, s3, wire, sync, events, same_files
):
    step = root.add(10, a=A, b=B)
    wire.latency_secs, wire.num_cuts, wire.num_errors = 0.01, 2, 2
    sync(s3.url(port=wire.port))
    assert (wire.num_cut, wire.num_errors) == (2, 0)
    assert [event["step"] for event in events.of("mirror_commit")] == [10]
    wire.num_cuts = 1
    path = mirror_fetch.fetch(s3.url(port=wire.port), into=root.path.parent / "new")
    assert wire.num_cut == 3
    assert same_files(step, path)


def test_a_dead_server_costs_an_event_and_the_next_commit_tries_again(
    root, s3, wire, events
):
    step = root.add(10, a=A)
    wire.is_dead = True
    copier = mirror.Mirror(s3.url(port=wire.port), emit=events, timeout_secs=1)
    start = time.monotonic()
    copier.offer(step)
    assert time.monotonic() - start < 0.9
    failed = events.wait_for("mirror_failed")
    assert "did not answer within 1 s" in failed["reason"]
    assert failed["step"] == -1  # It is not about one of them.
    assert mirror_fetch.list_steps(s3.url()) == []
    with pytest.raises(mirror_mark.MirrorError, match="did not answer within 1 s"):
        mirror_fetch.fetch(s3.url(port=wire.port), into=root.path, timeout_secs=1)
    wire.is_dead = False
    copier.offer(root.add(20, a=A + 1))
    events.wait_for("mirror_commit", num=2)
    assert copier.close()
    # The newest first.
    assert [event["step"] for event in events.of("mirror_commit")] == [20, 10]


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_leaves_no_mark(root, s3, wire, events):
    root.add(10, a=A)
    step = root.add(20, a=A + 1)
    copier = mirror.Mirror(
        s3.url(port=wire.port), bytes_per_sec=4000, emit=events, timeout_secs=1
    )
    copier.offer(step)
    end = time.monotonic() + 30
    while copier.busy_step != 20 or wire.num_connections == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    wire.is_dead = True
    assert events.wait_for("mirror_failed")["step"] == 20
    assert mirror_fetch.list_steps(s3.url()) == []
    wire.is_dead = False
    assert not copier.close(0.1) or copier.close(0.1)


@pytest.mark.slow
def test_a_refusing_server_says_so_within_seconds(root, s3, events):
    step = root.add(10, a=A)
    copier = mirror.Mirror(s3.url(port=1), emit=events, timeout_secs=20)
    copier.offer(step)
    assert "connect" in events.wait_for("mirror_failed", timeout_secs=15)["reason"]
    assert copier.close(30)


@pytest.mark.slow
def test_a_missing_bucket_is_named(root, s3, events):
    step = root.add(10, a=A)
    address = s3.url().replace(s3.bucket, "no-such-bucket")
    copier = mirror.Mirror(address, emit=events, timeout_secs=20)
    copier.offer(step)
    assert "no-such-bucket" in events.wait_for("mirror_failed")["reason"]
    assert copier.close(30)


_COPY = """
import sys
from jaxft.checkpoint import mirror, mirror_fetch, mirror_mark
mirror_mark.PIECE_BYTES = 1000
copier = mirror.Mirror(sys.argv[1], bytes_per_sec=float(sys.argv[3]))
copier.offer(sys.argv[2])
copier.close(60)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_no_step_and_the_next_run_completes(
    root, s3, sync, events, same_files, monkeypatch
):
    step = root.add(10, a=A, b=B)
    here = os.path.dirname(os.path.dirname(os.path.dirname(mirror.__file__)))
    worker = subprocess.Popen(
        [sys.executable, "-c", _COPY, s3.url(), step, "2000"],
        env=os.environ | {"PYTHONPATH": here},
    )
    try:
        end = time.monotonic() + 60
        while not _blobs(s3):
            assert time.monotonic() < end
            assert worker.poll() is None
            time.sleep(0.02)
    finally:
        worker.kill()
        worker.wait()
    assert mirror_fetch.list_steps(s3.url()) == []
    assert _blobs(s3)
    monkeypatch.setattr(mirror_mark, "PIECE_BYTES", 1000)
    sync(s3.url())
    assert mirror_fetch.list_steps(s3.url()) == [10]
    path = mirror_fetch.fetch(s3.url(), into=root.path.parent / "new")
    assert same_files(step, path)


@pytest.mark.slow
def test_what_an_interrupted_copy_left_is_swept_at_the_next_start(root, s3, sync):
    store = s3.store()
    root.add(10, a=A)
    sync(s3.url())
    owner = (root.path / "mirror-id").read_text().strip()
    for folder in (owner, "0" * 32):
        store.write(f"mirror/blobs/{folder}/{'0' * 64}.5", b"left").result()
    sync(s3.url())
    # What another root is copying now is left alone.
    (left,) = [key for key in _blobs(s3) if key.endswith(".5")]
    assert "0" * 32 in left


@pytest.mark.slow
def test_what_a_failed_copy_left_is_swept_by_the_next_that_works(root, s3, events):
    copier = mirror.Mirror(s3.url(), emit=events)
    step = root.add(10, a=A)
    (root.step_path(10) / "state" / "a" / "c" / "1").unlink()
    copier.offer(step)
    assert events.wait_for("mirror_failed")["step"] == 10
    owner = (root.path / "mirror-id").read_text().strip()
    s3.store().write(f"mirror/blobs/{owner}/{'0' * 64}.10", b"left").result()
    assert copier.close()
    copier.offer(root.add(20, a=A))
    assert copier.close()
    assert mirror_fetch.list_steps(s3.url()) == [20]
    assert not [key for key in _blobs(s3) if key.endswith(".10")]


@pytest.mark.slow
def test_every_request_has_a_deadline(s3, wire):
    wire.is_dead = True
    store = mirror_objects.ObjectStore(s3.url(port=wire.port), timeout_secs=0.3)
    for ask in (
        lambda: store.keys("0", "9"),
        lambda: store.get(["a", "b"]),
        lambda: store.put([("a", b"1"), ("b", b"2")]),
        lambda: store.delete(["a"]),
    ):
        start = time.monotonic()
        with pytest.raises(mirror_mark.MirrorError, match=r"within 0\.3 s"):
            ask()
        assert time.monotonic() - start < 1


@pytest.mark.parametrize("address", ["gs://bucket/prefix", "s3://bucket/prefix"])
def test_both_kinds_of_stores_open(address):
    store = mirror_objects.ObjectStore(address, timeout_secs=1)
    assert store.where == address


def test_an_address_with_an_unknown_option_is_refused():
    with pytest.raises(mirror_mark.MirrorError, match="cannot be opened"):
        mirror_objects.ObjectStore("s3://bucket/prefix?end=x", timeout_secs=1)
