"""Restarts by a worker that was waiting: same bits, same surroundings, no orphans."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest

from jaxft.goodput.account import Account
from jaxft.goodput.ledger import Cause

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = {"train__num_steps": 1_000_000, "supervisor__spare": "always"}


def _spare(run: Any, number: int) -> int:
    """Process id of the spare that was ready as the `number`-th."""

    def ready() -> Any:
        found = run.events("spare")
        return len(found) >= number and found[number - 1]["spare_pid"]

    return run.wait_for(ready, timeout_secs=120.0)


def _launch(run: Any, attempt: int) -> dict[str, Any]:
    def launched() -> Any:
        found = [e for e in run.events("launch") if e["attempt"] == attempt]
        return found[-1] if found else None

    return run.wait_for(launched)


def _steps_of(run: Any, pid: int) -> list[int]:
    return [e["step"] for e in run.events("step") if e["pid"] == pid]


def _proc(pid: int, name: str) -> bytes:
    return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()


def _surroundings(pid: int) -> tuple[Any, ...]:
    status = _proc(pid, "status").decode().splitlines()
    signals = [
        line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
    ]
    environment = sorted(_proc(pid, "environ").split(b"\0"))
    place = [os.readlink(f"/proc/{pid}/{name}") for name in ("cwd", "fd/0", "exe")]
    return signals, environment, place, _proc(pid, "limits"), os.getsid(pid) == pid


def test_two_kills_later_the_bits_are_the_same(command: Any, same: Any) -> None:
    run = command("run", **LONG)
    process = run.start()
    first = _launch(run, 0)["worker_pid"]
    before = None
    for attempt in (1, 2):
        spare = _spare(run, attempt)
        held = [
            os.readlink(f"/proc/{spare}/fd/{n}")
            for n in os.listdir(f"/proc/{spare}/fd")
        ]
        assert not any(str(run.workdir) in path for path in held)
        worker = _launch(run, attempt - 1)["worker_pid"]
        before = before or _surroundings(worker)
        os.kill(worker, signal.SIGKILL)
        launch = _launch(run, attempt)
        assert (launch["worker_pid"], launch["from_spare"]) == (spare, True)
        far = max(_steps_of(run, worker))
        run.wait_for(
            lambda pid=spare, far=far: max(_steps_of(run, pid), default=0) > far
        )
        assert _surroundings(spare) == before
        words = [w for w in _proc(spare, "cmdline").decode().split("\0") if w]
        start = [e for e in run.events("start") if e["pid"] == spare][-1]
        assert words[3:] == start["argv"][1:]
        assert f"--attempt={attempt}" in words
    process.send_signal(signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert first not in [e["worker_pid"] for e in run.events("launch")][1:]
    step = run.events("save_commit")[-1]["step"]
    reference = command("reference", train__num_steps=step)
    assert reference.run(timeout_secs=200.0)[0] == 0
    same(run, reference, step)


def test_the_way_to_the_first_step_is_accounted_for(command: Any) -> None:
    run = command("run", **LONG)
    run.start()
    spare = _spare(run, 1)
    os.kill(_launch(run, 0)["worker_pid"], signal.SIGKILL)
    run.wait_for(lambda: _steps_of(run, spare))
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 75
    account = Account()
    for event in run.events():
        account.take(event, at_secs=event["time"])
    way = account.costs.recoveries[-1]
    assert way.attempt == 1
    assert way.imports_secs < 0.5 * account.costs.recoveries[0].imports_secs
    assert account.ledger.secs()[Cause.UNKNOWN] < 0.01 * account.ledger.wall_secs


def test_its_death_is_none_and_it_dies_with_the_supervisor(
    command: Any,
) -> None:
    run = command("run", **LONG)
    process = run.start()
    os.kill(_spare(run, 1), signal.SIGKILL)
    worker = _launch(run, 0)["worker_pid"]
    run.wait_for(
        lambda: (
            not pathlib.Path(f"/proc/{run.events('spare')[0]['spare_pid']}").exists()
        )
    )
    assert run.events("worker_exit") == []
    os.kill(worker, signal.SIGKILL)
    launch = _launch(run, 1)
    assert not launch["from_spare"]
    pids = [launch["worker_pid"], _spare(run, 2)]
    process.kill()
    process.communicate()
    for pid in pids:
        run.process = None
        run.wait_for(lambda pid=pid: not _lives(pid))


@pytest.mark.parametrize("victim", [0, 1])
def test_each_process_of_a_job_has_one(job: Any, victim: int) -> None:
    one = job(**LONG)
    one.start()
    _spare(one.run, 2)
    one.kill("worker", victim)
    far = one.newest_step()
    one.wait_for_step(far + 50)
    launches = one.run.events("launch")
    assert [e["from_spare"] for e in launches] == [False, False, True, True]
    spares = {e["spare_pid"] for e in one.run.events("spare")[:2]}
    assert {e["worker_pid"] for e in launches[2:]} == spares
    os.kill(one.pid("supervisor", 0), signal.SIGTERM)
    assert one.finish()[0] == 75
    step = one.run.events("save_commit")[-1]["step"]
    reference = job("reference", train__num_steps=step)
    reference.start()
    assert reference.finish()[0] == 0
    one.run.settings["train.num_steps"] = step
    one.check_same(reference)


def _lives(pid: int) -> bool:
    try:
        return _proc(pid, "stat").rpartition(b")")[2].split()[0] not in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
