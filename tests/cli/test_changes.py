"""`ckpt prune`, `ckpt pin` and `ckpt rollback`: nothing goes that was not named."""

import os
import shutil

import pytest

from jaxft import records
from jaxft.checkpoint import decisions, policies, retention
from jaxft.recovery.workdir import WorkdirLock


@pytest.fixture
def crowded(root):
    """With one folder of each kind beside the steps."""
    shutil.copytree(root / "10", root / "5.quarantined-1")
    shutil.copytree(root / "10", root / "6.abandoned-t0")
    shutil.copytree(root / "10", root / "60.orbax-checkpoint-tmp-x")
    (root / "notes").mkdir()
    return root


KINDS = {
    "quarantined": "5.quarantined-1",
    "abandoned": "6.abandoned-t0",
    "unfinished": "60.orbax-checkpoint-tmp-x",
}


@pytest.mark.parametrize("kind", KINDS)
def test_prune_deletes_the_kind_that_is_named(ckpt, ckpt_json, crowded, kind):
    before = set(os.listdir(crowded))
    code, out, _ = ckpt("prune", crowded, f"--{kind}", "--dry-run")
    assert code == 0
    assert out.startswith(f"would delete {crowded / KINDS[kind]} (")
    assert set(os.listdir(crowded)) == before
    code, found = ckpt_json("prune", crowded.parent, f"--{kind}")
    assert code == 0
    assert [one["path"] for one in found["deleted"]] == [str(crowded / KINDS[kind])]
    assert found["num_bytes"] > 1000
    assert before - set(os.listdir(crowded)) == {KINDS[kind]}


def test_prune_follows_no_link_out_of_the_root(ckpt, root, tmp_path):
    precious = tmp_path / "precious"
    shutil.copytree(root / "10", precious)
    (root / "7.quarantined-1").symlink_to(precious)
    assert ckpt("prune", root, "--quarantined")[0] == 0
    assert not os.path.lexists(root / "7.quarantined-1")
    assert (precious / "run/metadata").is_file()


def test_rollback_sets_later_steps_aside(ckpt, ckpt_json, root):
    code, found = ckpt_json("rollback", root, "--to=10", "--reason=bad data")
    assert code == 0
    assert (found["from"], found["to"], found["timeline"]) == (30, 10, 1)
    assert [os.path.basename(path) for path in found["aside"]] == [
        "20.abandoned-t0",
        "30.abandoned-t0",
    ]
    assert decisions.discover(root).steps == [10]
    assert decisions.read(root).rollbacks[0].reason == "bad data"
    code, out, _ = ckpt("rollback", root, "--to=10", "--reason=again")
    assert code == 0
    assert "on timeline 2" in out


def test_rollback_leaves_batches_out(ckpt, ckpt_json, root):
    words = ("rollback", root, "--reason=spike")
    code, found = ckpt_json(*words, "--to=20", "--skip=20:26")
    assert (code, found["skip"]) == (0, [20, 26])
    assert decisions.read(root).skips_since(0) == [(20, 26)]
    code, out, _ = ckpt(*words, "--to=10", "--skip=11:12")
    assert code == 0
    assert "batches 11 to 11 are left out" in out
    assert ckpt_json(*words, "--to=10")[1]["skip"] is None
    assert decisions.read(root).skips_since(0) == [(20, 26), (11, 12)]


def test_a_pinned_step_outlives_every_policy(ckpt, ckpt_json, root, handmade, leaves):
    handmade.make_step(root, 40, leaves, keys=("key",))
    code, out, _ = ckpt("pin", root.parent, 10, "--reason=best of  all")
    assert code == 0
    assert f"step 10 of {root} is kept for ever" in out
    assert decisions.read(root).pins[0].reason == "best of all"
    code, found = ckpt_json("pin", root, 10, "--reason=again")
    assert (code, found["is_new"]) == (0, False)
    assert len(decisions.read(root).pins) == 1
    keep = policies.parse_keep("last(1)")
    retention.retain(
        str(root),
        keep=keep,
        committed=40,
        in_flight=None,
        emit=records.ignore_event,
    )
    assert decisions.discover(root).steps == [10, 40]
    rows = ckpt_json("ls", root)[1]["steps"]
    assert {row["step"]: row["pinned"] for row in rows} == {10: True, 40: False}
    code, _, err = ckpt("pin", root, 20, "--reason=too late")
    assert code == 66
    assert "there: 10, 40" in err


@pytest.mark.parametrize(
    "words", [("--to=15", "--reason=x"), ("--to=99", "--reason=x")]
)
def test_rollback_to_what_is_not_there_is_66(ckpt, root, words):
    code, _, err = ckpt("rollback", root, *words)
    assert code == 66
    assert "there: 10, 20, 30" in err
    assert decisions.discover(root).steps == [10, 20, 30]


def test_rollback_to_a_damaged_or_unhealthy_step_is_refused(
    ckpt, root, handmade, leaves
):
    (root / "10/state/params.w/c/0/0").unlink()
    code, _, err = ckpt("rollback", root, "--to=10", "--reason=x")
    assert code == 66
    assert "is damaged: state/params.w/c/0/0 of leaf params/w: is missing" in err
    # The values count as well: the later steps would be gone.
    chunk = root / "20/state/params.w/c/0/0"
    good = chunk.read_bytes()
    chunk.chmod(0o600)
    chunk.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    code, _, err = ckpt("rollback", root, "--to=20", "--reason=x")
    assert code == 66
    assert "is damaged: state/params.w/c/0/0 of leaf params/w: " in err
    chunk.write_bytes(good)
    handmade.make_step(root, 25, leaves, keys=("key",), healthy=False)
    code, _, err = ckpt("rollback", root, "--to=25", "--reason=x")
    assert code == 66
    assert "not healthy" in err
    code, _, err = ckpt("rollback", root, "--to=20", "--reason= ")
    assert code == 78
    assert decisions.discover(root).steps == [10, 20, 25, 30]


def test_nothing_changes_while_a_run_has_the_workdir(ckpt, crowded):
    before = sorted(os.listdir(crowded))
    with WorkdirLock.acquire(crowded.parent):
        for words in (
            ("rollback", crowded, "--to=10", "--reason=x"),
            ("pin", crowded, 10, "--reason=x"),
            ("prune", crowded.parent, "--unfinished"),
        ):
            code, _, err = ckpt(*words)
            assert code == 73
            assert f"workdir {crowded.parent} is in use by process {os.getpid()}" in err
        assert ckpt("ls", crowded)[0] == 0
    assert sorted(os.listdir(crowded)) == before
    assert ckpt("prune", crowded, "--unfinished")[0] == 0


def test_a_root_without_a_workdir_gets_no_lock(ckpt, root):
    assert ckpt("rollback", root, "--to=10", "--reason=x")[0] == 0
    assert not (root.parent / "lock").exists()


@pytest.mark.parametrize("words", [("rollback", "--to=10"), ("pin", "30")])
def test_a_full_disk_is_named_and_changes_nothing(
    ckpt, root, tmp_path, mount_disk, words
):
    disk = mount_disk(tmp_path / "disk", "2m")
    full = shutil.copytree(root.parent, disk / "run") / root.name
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free))
    command = (words[0], full, *words[1:], "--reason=x")
    code, out, err = ckpt(*command)
    assert (code, out) == (74, "")
    assert err == (
        f"jaxft: {full}/decisions/1.json: No space left on device; "
        "nothing was changed\n"
    )
    assert os.listdir(full / "decisions") == []
    assert decisions.discover(full).steps == [10, 20, 30]
    (disk / "ballast").unlink()
    assert ckpt(*command)[0] == 0
