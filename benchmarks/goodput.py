"""Goodput of a real run that is killed again and again, and what was predicted.

Command:   python benchmarks/goodput.py [--secs=600] [--mean-secs=30] [--save=auto]
Hardware:  any; the run is configs/tiny_lm.py without evaluations
Time:      --secs and one cold start
Expected:  the predicted goodput within 5 % of the real one

The worker gets a SIGKILL at exponential times, from the first step on. The real goodput
is that of the ledger: time of steps that were done for the first time. The prediction
is the simulator's, with the costs that the history of this very run tells, once for
these kills and once for random ones of the same mean; a step beside a save counts as
long as it took in both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from jaxft.events import read_events
from jaxft.goodput import simulator
from jaxft.goodput.account import account_of_workdir
from jaxft.goodput.experience import read_experience
from jaxft.goodput.failure_times import draw_failures
from jaxft.goodput.ledger import Cause
from jaxft.goodput.simulator import AutoSecs, Costs, EverySecs, Outcome, SavePlan
from jaxft.records import ExitCode

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_lm.py"
_START_SECS = 300.0
_STOP_SECS = 120.0


def start(
    workdir: pathlib.Path, *, save: str, expected_secs: float
) -> subprocess.Popen[bytes]:
    """The command, for as long as somebody lets it."""
    settings = {
        "checkpoint.save": save,
        "checkpoint.expected_failure_hours": expected_secs / 3600,
        "eval.every_steps": 0,
        "train.num_steps": 10_000_000,
        "supervisor.max_restarts": 100_000,
        "log.event_secs": 0.2,
        "log.progress": "never",
    }
    argv = [sys.executable, "-m", "jaxft.main"]
    argv += [f"--config={CONFIG}", f"--workdir={workdir}"]
    argv += [f"--config.{name}={value}" for name, value in settings.items()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=quiet, stderr=quiet)


def _first_step_secs(workdir: pathlib.Path, command: subprocess.Popen[bytes]) -> float:
    """When the first step was over, since the epoch."""
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline and command.poll() is None:
        for event in read_events(workdir / "events"):
            if event["kind"] == "step":
                return event["time"]
        time.sleep(0.2)
    raise RuntimeError(f"the run in {workdir} does not begin: {command.poll()}")


def kill_for(
    workdir: pathlib.Path,
    *,
    begun_secs: float,
    secs: float,
    mean_secs: float,
    rng: random.Random,
) -> list[float]:
    """Kills the worker of the moment at exponential times; when that was, from begin.

    A time at which there is no worker kills none, and nothing else happens at it.
    """
    supervise = next((workdir / "events").glob("*-supervise-*.jsonl"))
    kills, now = [], 0.0
    while (now := now + rng.expovariate(1 / mean_secs)) < secs:
        time.sleep(max(0.0, begun_secs + now - time.time()))
        launches = [
            event["worker_pid"]
            for event in read_events(supervise.parent)
            if event["kind"] == "launch"
        ]
        with contextlib.suppress(ProcessLookupError):
            os.kill(launches[-1], signal.SIGKILL)
            kills.append(time.time() - begun_secs)
    time.sleep(max(0.0, begun_secs + secs - time.time()))
    return kills


def _productive_share(found: Outcome, costs: Costs, *, secs: float) -> np.ndarray:
    """Steps that stayed, and what they were slower beside saves, of `secs`."""
    stayed = found.work_secs / np.maximum(found.work_secs + found.lost_secs, 1e-9)
    slow_secs = found.num_saves * costs.save.slow_secs
    return (found.work_secs + stayed * slow_secs) / secs


def predict(
    plan: SavePlan, costs: Costs, *, kills: list[float], secs: float, mean_secs: float
) -> tuple[Outcome, float, np.ndarray]:
    """What comes of these kills, the goodput of that, and those of 200 random runs.

    A simulated run begins with a restart, the measured one with its first step.
    """
    horizon_secs = secs + costs.restart_secs
    own = np.array([[*(costs.restart_secs + kill for kill in kills), np.inf]])
    drawn = draw_failures(host_mtbf_secs=mean_secs, horizon_secs=horizon_secs)
    found = [
        simulator.simulate(plan, costs, failures=times, horizon_secs=horizon_secs)
        for times in (own, drawn)
    ]
    shares = [_productive_share(one, costs, secs=secs) for one in found]
    return found[0], float(shares[0][0]), shares[1]


def main(argv: list[str] | None = None) -> None:
    """Runs, kills, reckons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secs", type=float, default=600.0)
    parser.add_argument("--mean-secs", type=float, default=30.0)
    parser.add_argument("--save", default="auto", help="auto or a number of seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=pathlib.Path, help="to keep the run; new")
    options = parser.parse_args(argv)
    is_auto = options.save == "auto"
    save = "auto" if is_auto else f"secs({options.save})"
    with tempfile.TemporaryDirectory(prefix="jaxft-goodput-") as scratch:
        workdir = options.workdir or pathlib.Path(scratch) / "run"
        command = start(workdir, save=save, expected_secs=options.mean_secs)
        try:
            begun_secs = _first_step_secs(workdir, command)
            kills = kill_for(
                workdir,
                begun_secs=begun_secs,
                secs=options.secs,
                mean_secs=options.mean_secs,
                rng=random.Random(options.seed),
            )
            secs = time.time() - begun_secs
            command.terminate()
            code = command.wait(_STOP_SECS)
        finally:
            command.kill()
        if code != ExitCode.STOPPED:
            raise RuntimeError(f"the run ended with exit code {code}")
        ledger = account_of_workdir(workdir).ledger
        measured = read_experience(
            workdir / "events",
            expected_hours=options.mean_secs / 3600,
            now_secs=time.time(),
        )
    cost = measured.experience.cost
    assert cost is not None, "no save was measured"
    costs = Costs(
        step_secs=measured.step_secs,
        save=cost,
        restart_secs=measured.experience.restart_secs,
    )
    plan: SavePlan = AutoSecs(options.mean_secs, cost)
    if not is_auto:
        plan = EverySecs(float(options.save))
    found, own, drawn = predict(
        plan, costs, kills=kills, secs=secs, mean_secs=options.mean_secs
    )
    real = ledger.secs()[Cause.STEP] / secs
    print(
        f"{secs:.0f} s with {len(kills)} kills; a step {costs.step_secs:.4f} s, a save "
        f"blocks {cost.blocking_secs:.4f} s, is written in {cost.write_secs:.3f} s, "
        f"steps {cost.slowdown:.1%} slower; a restart {costs.restart_secs:.2f} s"
    )
    for cause, spent in ledger.secs().items():
        if spent:
            print(f"  {cause}: {spent:.1f} s")
    spent = {
        "restarts": found.restart_secs[0] - costs.restart_secs,
        "lost steps": found.lost_secs[0],
        "saves": found.save_secs[0],
    }
    told = ", ".join(f"{name} {value:.1f} s" for name, value in spent.items())
    print(f"predicted: {told}")
    low, middle, high = np.quantile(drawn, (0.05, 0.5, 0.95))
    print(f"goodput {real:.4f}, predicted {own:.4f}: off by {own / real - 1:+.2%}")
    print(f"of random kills {low:.4f} to {high:.4f}, median {middle:.4f}")


if __name__ == "__main__":
    main()
