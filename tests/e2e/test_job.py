"""Jobs of several processes: whatever is killed, the same numbers at the end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(360)

NUM_STEPS = 40
# Who is killed, and when: at a step, or inside the save of that step.
KILLS = [
    ("worker", 0, 17),
    ("worker", 1, 17),
    ("supervisor", 1, 13),
    ("supervisor", 0, 23),
    ("worker", 0, -20),
    ("worker", 1, -20),
]


def break_it(job: Any, who: str, index: int, when: int) -> None:
    job.start()
    job.wait_for_save(-when) if when < 0 else job.wait_for_step(when)
    down_secs = job.kill(who, index)
    code, out, err = job.finish()
    assert code == 0, err
    assert down_secs < job.down_secs + job.busy_secs
    assert re.search(r"^(\[0\] )?run +finished$", out, re.MULTILINE), out
    first, *others = job.generations()
    assert len(others) == 1, [one.reason for one in others]
    assert [seat.name for seat in others[0].members] == ["process-0", "process-1"]
    assert others[0].attempt == 1
    assert others[0].coordinator != first.coordinator
    cause = "SIGKILL" if who == "worker" else "ended together with its supervisor"
    assert cause in others[0].reason


@pytest.mark.slow
@pytest.mark.parametrize(("who", "index", "when"), KILLS)
def test_a_kill_changes_no_number(
    job: Any, reference: Any, who: str, index: int, when: int
) -> None:
    one = job()
    break_it(one, who, index, when)
    one.check_same(reference(2))


@pytest.mark.slow
def test_a_stopped_worker_hangs_the_job_for_a_while(job: Any, reference: Any) -> None:
    one = job(hang__min_secs=4.0, hang__factor=2.0, hang__margin_secs=2.0)
    one.start()
    one.wait_for_step(25)
    os.kill(one.pid("worker", 1), signal.SIGSTOP)
    code, _, err = one.finish()
    assert code == 0, err
    reasons = [generation.reason for generation in one.generations()]
    assert len(reasons) == 2
    assert "no progress" in reasons[1], reasons
    one.check_same(reference(2))


@pytest.mark.slow
def test_a_stop_is_one_for_all(job: Any, reference: Any) -> None:
    one = job()
    one.start()
    one.wait_for_step(13)
    os.kill(one.pid("supervisor", 1), signal.SIGTERM)
    code, out, err = one.finish()
    assert code == 75, err
    assert "the same command goes on from here (exit 75)" in out
    ends = [e["step"] for e in one.run.events("end")]
    assert len(ends) == 2
    assert len(set(ends)) == 1
    one.start()
    code, _, err = one.finish()
    assert code == 0, err
    second = one.generations()[1]
    assert (second.number, second.attempt) == (2, 0)
    one.check_same(reference(2))


@pytest.mark.slow
def test_members_that_do_not_see_each_other_for_a_while(
    job: Any, reference: Any
) -> None:
    one = job(elastic__host_lost_secs=4.0, hang__enabled=False)
    one.start()
    one.wait_for_step(12)
    folder = one.run.workdir / "members"
    away = folder.with_name("away")
    # Nobody's beats can be read; its workers go on stepping, and nothing is lost.
    folder.rename(away)
    folder.write_text("in the way")
    one.wait_for_step(NUM_STEPS - 5)
    folder.unlink()
    away.rename(folder)
    code, _, err = one.finish()
    assert code == 0, err
    assert len(one.generations()) == 1
    one.check_same(reference(2))


@pytest.mark.slow
def test_a_wrong_setting_is_told_once(job: Any) -> None:
    one = job(model__num_heads=5)
    one.start()
    code, _, err = one.finish()
    assert code == 78
    lines = [line for line in err.splitlines() if "num_heads" in line]
    assert len(lines) == 1, err
    # The workdir is as it was found.
    assert {path.name for path in one.run.workdir.iterdir()} <= {"compile_cache"}


@pytest.mark.slow
def test_a_second_job_is_refused(job: Any) -> None:
    one = job()
    one.start()
    one.wait_for_step(2)
    other = job()
    other.start()
    code, _, err = other.finish()
    assert code == 73
    assert "is in use by process" in err
    code, _, err = one.finish()
    assert code == 0, err


@pytest.mark.slow
def test_hosts_that_share_no_disk_say_where_they_looked(hosts: Any) -> None:
    settings = {"elastic__wait_secs": 5.0}
    apart = hosts("here", **settings)
    apart.commands[1].workdir = apart.commands[1].workdir.with_name("there")
    apart.start()
    for index, command in enumerate(apart.commands):
        code, _, err = command.finish()
        assert code == 69
        folder = command.workdir / "members"
        who = f"process-{1 - index} did not come within 5 s, in {folder}"
        assert f"{who}, which all hosts must share" in err
        assert {path.name for path in command.workdir.glob("*")} <= {"compile_cache"}


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_half_as_many_and_all_again(
    hosts: Callable[..., Any], same_samples: Any, num_hosts: int
) -> None:
    """Hosts that are gone for a while: same order, same losses within rounding."""
    steps, half = 3000 // num_hosts, num_hosts // 2
    settings = {
        "num_hosts": num_hosts,
        "train__num_steps": steps,
        # Rounding grows with the steps that it goes through; so it does not.
        "optimizer__learning_rate": 1e-5,
        "checkpoint__save": "steps(50)",
        "checkpoint__keep": "last(3) | every(50)",
        "elastic__min_processes": 1,
        "elastic__wait_secs": 1.0,
        "elastic__host_lost_secs": 4.0,
    }
    plain = hosts("plain", **settings)
    plain.start()
    plain.finish()
    broken = hosts("broken", **settings)
    broken.start()
    run = broken.commands[0]
    run.wait_for(lambda: run.events("step")[59:], timeout_secs=150)
    lost = range(half, num_hosts)
    broken.kill_hosts(*lost)
    (shrunk, *_) = run.wait_for(lambda: run.events("elastic"), timeout_secs=90)
    assert (shrunk["num_processes"], shrunk["num_configured"]) == (half, num_hosts)
    assert shrunk["num_microbatches"] == 2
    broken.start(*lost)
    broken.finish()
    sizes = [len(generation.members) for generation in broken.generations()]
    # Those that come back need not all do it at one moment.
    assert (sizes[0], sizes[1], sizes[-1]) == (num_hosts, half, num_hosts)
    assert sizes[1:] == sorted(sizes[1:])
    assert "came back" in broken.generations()[-1].reason
    assert run.events("regroup")
    restores = run.events("restore")
    assert {event["verify"] for event in restores} == {"full"}
    same_samples(run, plain.commands[0])
    ours, theirs = (losses_of(one.commands[0]) for one in (broken, plain))
    assert sorted(ours) == sorted(theirs) == list(range(1, steps + 1))
    worst = max(abs(ours[s] - theirs[s]) / abs(theirs[s]) for s in theirs)
    assert worst < 3e-6


def losses_of(run: Any) -> dict[int, float]:
    """Step -> loss as it was computed last."""
    return {event["step"]: event["metrics"]["loss"] for event in run.events("step")}
