"""The workdir's lock where members of a job share it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxft.records import FaultError, FaultKind
from jaxft.recovery.job_lock import JobLock
from jaxft.recovery.workdir import WorkdirLock, is_in_use


def join(workdir, member, job="4 processes at h:1", takeover_secs=0.05):
    return JobLock.join(workdir, job=job, member=member, takeover_secs=takeover_secs)


def refusal(call):
    with pytest.raises(FaultError) as caught:
        call()
    assert caught.value.fault.kind is FaultKind.WORKDIR_IN_USE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_members_share_it_and_others_are_refused(tmp_path):
    with join(tmp_path / "run", "process-0") as one:
        assert is_in_use(one.workdir)
        with join(tmp_path / "run", "process-1") as two:
            assert len(two.filenos()) == 3
            owner = f"process {os.getpid()} on"
            other = lambda: join(tmp_path / "run", "process-0", job="another")
            assert owner in refusal(other)
            alone = lambda: WorkdirLock.acquire(tmp_path / "run", takeover_secs=0.05)
            assert owner in refusal(alone)
        assert not one.problem()
    assert not is_in_use(tmp_path / "run")
    with WorkdirLock.acquire(tmp_path / "run"):
        refusal(lambda: join(tmp_path / "run", "process-0"))


def test_it_goes_on_without_whoever_came_first(tmp_path):
    first = join(tmp_path, "process-0")
    second = join(tmp_path, "process-1")
    first.release()
    refusal(lambda: join(tmp_path, "process-0", job="another"))
    with join(tmp_path, "process-0"):
        second.release()
    with join(tmp_path, "process-0", job="another"):
        refusal(lambda: join(tmp_path, "process-1"))


def test_a_member_is_there_once(tmp_path):
    with join(tmp_path, "process-0"), join(tmp_path, "process-1"):
        text = refusal(lambda: join(tmp_path, "process-1"))
    assert "process-1 of this job is there already" in text
    with join(tmp_path, "process-1"):
        pass


def test_what_a_dead_member_left_running_is_waited_for(tmp_path):
    lock = join(tmp_path, "process-0")
    program = "import sys; sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        stdin=subprocess.PIPE,
        pass_fds=lock.filenos(),
    )
    lock.release()
    refusal(lambda: join(tmp_path, "process-0"))
    with join(tmp_path, "process-1"):
        child.communicate()
        with join(tmp_path, "process-0", takeover_secs=30.0):
            pass


def test_a_start_that_is_refused_leaves_nothing_of_its_own(tmp_path):
    one = join(tmp_path / "run", "process-0")
    two = join(tmp_path / "run", "process-1")
    one.release(undo=True)
    assert (tmp_path / "run" / "lock").exists()  # The other one still has it.
    two.release(undo=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "lock"])
def test_a_start_that_is_refused_leaves_what_was_there(tmp_path, name):
    (tmp_path / name).write_text("")
    for folder in ("members", "generations"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.json").write_text("")
    one = join(tmp_path, "process-0")
    two = join(tmp_path, "process-1")
    one.release(undo=True)
    two.release(undo=True)
    assert (tmp_path / name).exists()
    assert (tmp_path / "generations" / "1.json").exists()
    assert (tmp_path / "members" / "1.json").exists()


def test_a_start_that_is_refused_removes_what_its_members_told_and_no_more(tmp_path):
    (tmp_path / "members").mkdir()
    (tmp_path / "members" / "mine.txt").write_text("mine")
    one = join(tmp_path, "process-0")
    (tmp_path / "generations").mkdir()
    for path in ("generations/1.json", "generations/1.down.process-0.json"):
        (tmp_path / path).write_text("{}")
    for path in ("members/process-0.json", "members/.process-0.abc"):
        (tmp_path / path).write_text("{}")
    one.release(undo=True)
    left = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")]
    assert sorted(left) == ["members", "members/mine.txt"]
