"""A stop in each phase, found by its events: a committed step or a clean leave.

With `--full` each phase is stopped ten times, one start after the other on one run,
which then goes on to the end: the same bits as the run that nothing happened to.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS = 60
# Generous: the machine may be busy. The grace time itself is 30 s.
LEAVE_SECS = 20.0
ROWS = """
import pathlib, time
import numpy as np
from jaxft.data.sources import Sources

def obey(name):
    while pathlib.Path(f"block_{name}").exists():
        pathlib.Path(f"blocked_{name}").touch()
        time.sleep(0.02)

class Rows:
    fingerprint = "rows that wait"

    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def __getitem__(self, index):
        if index:  # The first one is read by the build as well.
            obey("row")
        row = (np.arange(33) * (index + 1) % 251).astype(np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    obey("build")
    return Sources(Rows(256), Rows(3200))
"""


def since(run: Any, start: float, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """Events of this start of the command."""
    return [
        event
        for event in run.events(kind)
        if event["time"] >= start
        and all(event[name] == value for name, value in wanted.items())
    ]


class Phase:
    """How a run is brought into a phase, and how one sees that it was there.

    Args:
        settings: beside those of all.
        arrive: called as soon as it has started; returns when it is there.
        was_there: whether the request came while it was; with the run and its start.
        is_early: before anything was trained.
        blocked: what the data holds back: `build` or `row`; empty for nothing.
        is_cold: without a compile cache.
    """

    def __init__(
        self,
        arrive: Callable[[Any, float], Any],
        was_there: Callable[[Any, float], bool],
        *,
        is_early: bool = False,
        blocked: str = "",
        is_cold: bool = False,
        **settings: Any,
    ):
        self.arrive = arrive
        self.was_there = was_there
        self.is_early = is_early
        self.blocked = blocked
        self.is_cold = is_cold
        self.settings = settings


def phase_is(name: str) -> Callable[[Any, float], Any]:
    return lambda run, start: run.wait_for(
        lambda: since(run, start, "phase", name=name)
    )


def last_phase_was(name: str) -> Callable[[Any, float], bool]:
    """At the request, by the history's own order of this worker's events."""

    def was_there(run: Any, start: float) -> bool:
        (stop,) = since(run, start, "stop_request")
        phases = [
            e["name"] for e in since(run, start, "phase") if e["time"] <= stop["time"]
        ]
        return phases[-1] == name

    return was_there


def lock_is_taken(run: Any, start: float) -> None:
    # The file stays; the owner's line in it is of this start.
    pid = str(run.process.pid)
    run.wait_for(
        lambda: pid in (run.workdir / "lock").read_text() if _has_lock(run) else 0
    )


def _has_lock(run: Any) -> bool:
    return (run.workdir / "lock").exists()


def is_blocked(name: str) -> Callable[[Any, float], None]:
    def arrive(run: Any, start: float) -> None:
        if name == "row":  # Let it train first: what was read ahead is used up.
            run.wait_for(lambda: since(run, start, "step"))
            pathlib.Path("block_row").touch()
        run.wait_for(pathlib.Path(f"blocked_{name}").exists)
        if name == "row":
            time.sleep(0.5)

    return arrive


def save_is_written(run: Any, start: float) -> None:
    run.wait_for(lambda: since(run, start, "save_start"))


def was_in_flight(run: Any, start: float) -> bool:
    """The request came between the beginning of a periodic save and its commit."""
    (stop,) = since(run, start, "stop_request")
    began = [e for e in since(run, start, "save_start") if e["time"] < stop["time"]]
    (commit,) = since(run, start, "save_commit", step=began[-1]["step"])
    return commit["time"] > stop["time"]


def always(run: Any, start: float) -> bool:
    return True


PHASES = {
    "start": Phase(lock_is_taken, always, is_early=True),
    "build": Phase(is_blocked("build"), always, is_early=True, blocked="build"),
    "init": Phase(
        phase_is("init"), last_phase_was("init"), is_early=True, is_cold=True
    ),
    "compile": Phase(
        phase_is("compile"), last_phase_was("compile"), is_early=True, is_cold=True
    ),
    "restore": Phase(phase_is("restore"), last_phase_was("restore"), is_early=True),
    "data": Phase(is_blocked("row"), last_phase_was("train"), blocked="row"),
    "step": Phase(
        lambda run, start: run.wait_for(lambda: since(run, start, "step")),
        last_phase_was("train"),
    ),
    "evaluate": Phase(
        phase_is("evaluate"),
        last_phase_was("evaluate"),
        eval__every_steps=20,
        eval__num_batches=400,
    ),
    # About a second for one save.
    "save": Phase(
        save_is_written,
        was_in_flight,
        checkpoint__save="steps(5)",
        faults__inject="slow_disk@0-100000:1MBps",
    ),
    # Steps of 17 MB at the smallest rate there is, and a grace time that is no help.
    "mirror": Phase(
        phase_is("mirror"),
        last_phase_was("mirror"),
        checkpoint__mirror_rate="1MiB",
        model__width=256,
        preemption__grace_secs=2.0,
    ),
}
PHASE_CASES = [
    pytest.param(name, marks=[] if name == "save" else pytest.mark.slow)
    for name in PHASES
]


@pytest.mark.parametrize("name", PHASE_CASES)
def test_a_stop_in_each_phase(
    command: Any,
    undisturbed: Any,
    same: Any,
    full: bool,
    name: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase, num_stops = PHASES[name], 10 if full else 1
    (tmp_path / "rows_that_wait.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    basic = {"train__num_steps": NUM_STEPS, "data__factory": "rows_that_wait:make_data"}
    basic |= {k: v for k, v in phase.settings.items() if k.startswith("model__")}
    reference = undisturbed(**basic)
    if name == "mirror":
        phase.settings["checkpoint__mirror"] = str(tmp_path / "mirror")
    if name == "restore":
        seed = command("run", **basic | {"train__num_steps": 20})
        assert seed.run()[0] == 0
    # Many stops on one way: each finds something left to do.
    num_steps = 100_000 if name in ("data", "step", "save") else NUM_STEPS
    run = command(
        "run",
        cold=phase.is_cold,
        **basic | phase.settings | {"train__num_steps": num_steps},
    )
    draw = random.Random(name)
    counted = 0
    for attempt in range(3 * num_stops + 3):
        committed = _newest(run)
        counted += stop_once(run, phase, delay_secs=draw.random() * 0.05 * attempt)
        assert _newest(run) >= committed
        if counted == num_stops:
            break
    assert counted == num_stops, "the phase was over too soon, again and again"
    if num_steps != NUM_STEPS:
        num_steps = max(NUM_STEPS, _newest(run) + 20)
        run.settings["train.num_steps"] = num_steps
        reference = undisturbed(**basic | {"train__num_steps": num_steps})
    code, out, err = run.run()
    assert code == 0, (out, err)
    same(run, reference, num_steps)
    # Over two epochs and all stops: each step was done once, and none was left out.
    done = [(e["first_step"], e["step"]) for e in run.events("step")]
    assert sorted(done) == [(step, step) for step in range(1, num_steps + 1)]


def _newest(run: Any) -> int:
    root = run.workdir / "checkpoints"
    return max((int(p.name) for p in root.glob("*") if p.name.isdigit()), default=-1)


def stop_once(run: Any, phase: Phase, *, delay_secs: float) -> bool:
    """One start and one stop; whether it came in the phase."""
    for path in pathlib.Path().glob("block*_*"):
        path.unlink()
    if phase.blocked == "build":
        pathlib.Path("block_build").touch()
    if phase.is_cold:
        for path in run.workdir.glob("compile_cache/*/*"):
            path.unlink()
    before = _newest(run)
    start = time.time()
    process = run.start()
    phase.arrive(run, start)
    time.sleep(delay_secs)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    secs = time.monotonic() - asked
    for path in pathlib.Path().glob("block*_*"):
        path.unlink()
    assert code == 75, (out, err)
    assert secs < LEAVE_SECS, (secs, out, err)
    assert "Traceback" not in out + err
    assert "stopped by SIGTERM" in out + err
    if not since(run, start, "stop_request"):
        assert not since(run, start, "preflight_done")  # Nothing had begun.
        return phase.is_early and phase.was_there is always
    if not phase.was_there(run, start):
        return False
    (end,) = since(run, start, "end")
    if phase.is_early:
        assert end["step"] == -1
        assert _newest(run) == before
    else:
        assert end["step"] == _newest(run)
    return True
