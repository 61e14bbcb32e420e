"""Jobs in which one process hangs, has no disk, is not seen, or wakes too late.

Each fault is told by its name, within its limit, and the end is the same to the bit.
"""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxft.recovery.generations import Generation, Seat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

# What decides on hangs is soon at its limits.
SOON = {"hang__min_secs": 4.0, "hang__factor": 2.0, "hang__margin_secs": 2.0}


def causes(job: Any) -> list[str]:
    """Of the restarts, in order."""
    return [e["cause"] for e in job.run.events("decision") if e["action"] == "restart"]


@pytest.mark.parametrize("kind", ["hang", "hang_gil"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_hang_in_one_process(job: Any, reference: Any, kind: str, index: int) -> None:
    one = job(faults__inject=f"{kind}@25 process={index}", **SOON)
    one.start()
    code, _, err = one.finish()
    assert code == 0, err
    (injected,) = one.run.events("injected")
    assert injected["process"] == index
    assert causes(one) == ["hang"]
    (decided,) = (e for e in one.run.events("decision") if e["action"] == "restart")
    # The limit, the margins of both who watch, and the end of the workers.
    limit_secs = max(e["limit_secs"] for e in one.run.events("hang")) + 2 * 2.0
    took_secs = decided["time"] - injected["time"]
    assert took_secs < limit_secs + one.down_secs + one.busy_secs
    one.check_same(reference(2))


def test_a_disk_that_is_full_for_one_process(job: Any, reference: Any) -> None:
    one = job()
    one.start()
    one.wait_for_step(3)
    # No file of it may grow beyond this; its successor has room again.
    resource.prlimit(one.pid("worker", 1), resource.RLIMIT_FSIZE, (512, 512))
    code, _, err = one.finish()
    assert code == 0, err
    assert causes(one) == ["save_failed"]
    assert "failed in process 1: file too large" in one.generations()[1].reason
    one.check_same(reference(2))


@pytest.mark.parametrize("index", [0, 1])
def test_a_second_signal_to_one_member_means_now_for_all(job: Any, index: int) -> None:
    slow = "slow_disk@0-100000:1kBps"
    one = job(
        train__num_steps=100_000,
        checkpoint__save="steps(100000)",
        faults__inject=f"{slow}; {slow} process=1",
        preemption__grace_secs=120,
    )
    one.start()
    one.wait_for_step(12)
    member = one.pid("supervisor", index)
    os.kill(member, signal.SIGTERM)
    time.sleep(5.0)
    assert len(one.running("worker")) == 2  # They save, and that takes minutes.
    began = time.monotonic()
    os.kill(member, signal.SIGTERM)
    code, out, err = one.finish()
    assert code == 75, err
    assert "the same command goes on from here (exit 75)" in out
    assert "none yet in" in out
    # A second is left for last words.
    assert time.monotonic() - began < 1.0 + one.down_secs + one.busy_secs


@pytest.mark.parametrize("index", [0, 1])
def test_a_whole_host_is_gone_and_comes_back(
    hosts: Any, reference: Any, index: int, record_property: Callable[..., None]
) -> None:
    two = hosts(elastic__host_lost_secs=4.0)
    two.start()
    two.wait_for_step(15)
    down_secs = two.kill_hosts(index)
    record_property(f"host {index} gone: all down, seconds", down_secs)
    assert down_secs < two.down_secs + two.busy_secs
    two.start(index)
    two.finish()
    first, second = two.generations()
    assert f"process-{index} ended together with its supervisor" in second.reason
    assert second.coordinator != first.coordinator
    two.check_same(reference(2))


def test_a_job_that_has_begun_anew_elsewhere_leaves_old_workers_nothing_to_write(
    job: Any, reference: Any
) -> None:
    """The fence alone: nobody is there to take the old workers down."""
    one = job(hang__enabled=False)
    one.start()
    one.run.wait_for(lambda: one.run.events("save_commit"), timeout_secs=150)
    (first,) = one.generations()
    supervisors = one.running("supervisor").values()
    for pid in supervisors:
        os.kill(pid, signal.SIGSTOP)
    elsewhere = Generation(
        number=2,
        members=tuple(Seat(name=s.name, incarnation="x") for s in first.members),
        coordinator=first.coordinator,
        attempt=1,
        num_configured=2,
    )
    files = one.files()
    assert files.propose(elsewhere)
    step = one.newest_step()
    one.run.wait_for(lambda: not one.running("worker"), timeout_secs=60)
    told = [e["evidence"] for e in one.run.events("fault")]
    assert any("generation 2 of the job has begun" in text for text in told), told
    root = one.run.workdir / "checkpoints"
    # One that was past the fence when the file came may still be there.
    assert max(int(p.name) for p in root.iterdir() if p.name.isdigit()) <= step + 10
    for pid in supervisors:
        os.kill(pid, signal.SIGCONT)
    code, _, err = one.finish()
    assert code == 0, err
    assert one.generations()[2].members == first.members
    one.check_same(reference(2))


ELASTIC = {
    "elastic__min_processes": 1,
    "elastic__wait_secs": 1.0,
    "elastic__host_lost_secs": 4.0,
    "train__num_steps": 100_000,
    "checkpoint__save": "steps(50)",
}


def commits_after(job: Any, pid: int, secs: float) -> list[int]:
    """Steps that a process has told as committed since then."""
    commits = job.run.events("save_commit")
    return [e["step"] for e in commits if e["pid"] == pid and e["time"] > secs]


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_was_stopped_wakes_into_a_job_that_went_on(
    hosts: Any, index: int
) -> None:
    two = hosts(**ELASTIC)
    two.start()
    two.wait_for_step(60)
    asleep = [two.pid(role, index) for role in ("supervisor", "worker")]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    began = time.time()
    two.run.wait_for(lambda: len(two.generations()) == 2, timeout_secs=60)
    (alone,) = two.generations()[1].members
    assert alone.name == f"process-{1 - index}"
    step = two.newest_step()
    two.wait_for_step(step + 60)
    # First the worker: nobody ends it, and what it was at is still its own.
    os.kill(asleep[1], signal.SIGCONT)
    time.sleep(3.0)
    os.kill(asleep[0], signal.SIGCONT)
    two.run.wait_for(lambda: len(two.generations()) == 3, timeout_secs=60)
    assert len(two.generations()[2].members) == 2
    assert commits_after(two, asleep[1], began + 1.0) == []
    stop(two)


class Curtain:
    """Hides the members of a job from one of its hosts, in that one's own mounts."""

    def __init__(self, pid: int, folder: pathlib.Path):
        self._inside = ["nsenter", "-t", str(pid), "-m"]
        self._folder = str(folder)

    def close(self) -> None:
        mount = ["mount", "-t", "tmpfs", "tmpfs", self._folder]
        subprocess.run([*self._inside, *mount], check=True)

    def open(self) -> None:
        subprocess.run([*self._inside, "umount", "-l", self._folder], check=True)


@pytest.fixture
def curtain() -> Callable[..., Curtain]:
    """Host 1 gets mounts of its own; skipped where that is not allowed."""
    private = ["unshare", "--mount", "--propagation", "private"]
    try:
        subprocess.run([*private, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts of one's own here: {error}")

    def start(two: Any) -> Curtain:
        two.commands[1].prefix = private
        two.start()
        pid = two.pid("supervisor", 1)
        return Curtain(pid, two.run.workdir / "members")

    return start


def part(two: Any, between: Curtain) -> None:
    """Neither host sees the other, and no step goes on that would say it lives."""
    between.close()
    # First the beats: else one could still count as there when it is looked for.
    time.sleep(2.5)
    os.kill(two.pid("worker", 1), signal.SIGSTOP)
    two.run.wait_for(lambda: not two.running("worker"), timeout_secs=60)
    reasons = [e["reason"] for e in two.run.events("call_off")]
    assert any("is silent for" in reason for reason in reasons), reasons


def test_two_halves_that_do_not_see_each_other(
    hosts: Any, reference: Any, curtain: Callable[..., Curtain]
) -> None:
    """Neither goes on alone, for it may not; then both do."""
    steps = {"train__num_steps": 400}
    two = hosts(elastic__host_lost_secs=4.0, hang__enabled=False, **steps)
    between = curtain(two)
    two.wait_for_step(2)
    began = time.monotonic()
    part(two, between)
    while time.monotonic() < began + 20.0:
        assert two.running("worker") == {}
        time.sleep(0.1)
    assert len(two.generations()) == 1
    between.open()
    two.finish()
    assert "is silent for" in two.generations()[1].reason
    assert len(two.generations()) == 2
    two.check_same(reference(2, **steps))


def test_of_two_halves_that_may_go_on_alone_one_does(
    hosts: Any, curtain: Callable[..., Curtain]
) -> None:
    two = hosts(**ELASTIC, hang__enabled=False)
    between = curtain(two)
    two.wait_for_step(60)
    part(two, between)
    two.run.wait_for(lambda: len(two.generations()) == 2, timeout_secs=60)
    (alone,) = two.generations()[1].members
    index = int(alone.name.partition("-")[2])
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        assert set(two.running("worker")) <= {index}
        time.sleep(0.1)
    assert len(two.generations()) == 2
    between.open()
    two.run.wait_for(lambda: len(two.generations()) == 3, timeout_secs=60)
    assert len(two.generations()[2].members) == 2
    stop(two)


def stop(two: Any) -> None:
    """After some steps more, together; and what has been done is all there."""
    two.wait_for_step(two.newest_step() + 20)
    for command in two.commands:
        command.process.send_signal(signal.SIGTERM)
    two.finish(code=75)
    check_losses(two)


def check_losses(job: Any) -> None:
    """A step that was done again gave the same, within rounding; none is missing."""
    losses: dict[int, float] = {}
    for event in job.run.events("step"):
        loss = event["metrics"]["loss"]
        before = losses.setdefault(event["step"], loss)
        assert before == pytest.approx(loss, rel=1e-3)
    assert sorted(losses) == list(range(1, max(losses) + 1))
