"""How near `checkpoint.save = "auto"` comes to the best fixed interval.

Command:   python benchmarks/interval.py [--workdir=...] [--num-seeds=200]
Hardware:  any; the measured run is configs/tiny_lm.py
Time:      two minutes for the run, two for the simulation
Expected:  auto at most 1 % below the best fixed interval at every failure rate

A real run is killed once, so that its history tells what a step, a save and a restart
take; `--workdir` takes the history of another run. With these costs the simulator plays
random failures (exponential, the same ones for all) at six rates: every interval of a
grid, `auto` that was told the truth, and `auto` that was told once a day and has to
learn. Goodput is the mean over all random runs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from jaxft import intervals
from jaxft.events import read_events
from jaxft.goodput import simulator
from jaxft.goodput.experience import read_experience
from jaxft.goodput.failure_times import draw_failures
from jaxft.goodput.simulator import AutoSecs, Costs, EverySecs

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_lm.py"
MTBF_SECS = (30.0, 120.0, 600.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
GUESS_HOURS = 24.0
_NUM_FAILURES = 300
_TIMEOUT_SECS = 600.0


def run_once_killed(workdir: pathlib.Path, *, num_steps: int) -> None:
    """Trains under the command, with one SIGKILL of the worker at half of it."""
    argv = [sys.executable, "-m", "jaxft.main", f"--config={CONFIG}"]
    argv += [f"--workdir={workdir}", "--config.checkpoint.save=secs(2)"]
    argv += [f"--config.train.num_steps={num_steps}", "--config.log.progress=never"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + _TIMEOUT_SECS
    is_killed = False
    while command.poll() is None:
        if time.monotonic() > deadline:
            command.terminate()
            raise TimeoutError(f"the run in {workdir} is not over")
        time.sleep(0.2)
        events = read_events(workdir / "events")
        steps = [event["step"] for event in events if event["kind"] == "step"]
        if not is_killed and max(steps, default=0) > num_steps // 2:
            pids = [e["worker_pid"] for e in events if e["kind"] == "launch"]
            os.kill(pids[-1], signal.SIGKILL)
            is_killed = True
    if command.returncode != 0 or not is_killed:
        raise RuntimeError(f"the run in {workdir} ended with {command.returncode}")


def measure(workdir: pathlib.Path) -> Costs:
    """What the history of a run says that things take."""
    measured = read_experience(
        workdir / "events", expected_hours=GUESS_HOURS, now_secs=time.time()
    )
    seen = measured.experience
    if seen.cost is None or not measured.step_secs or not seen.restart_secs:
        raise RuntimeError(f"the history in {workdir} lacks steps, saves or a restart")
    return Costs(
        step_secs=measured.step_secs, save=seen.cost, restart_secs=seen.restart_secs
    )


def compare(
    costs: Costs, mtbf_secs: float, *, num_seeds: int, seed: int, num_fixed: int = 33
) -> dict:
    """Goodput of the fixed intervals of a grid, and of `auto`."""
    horizon_secs = _NUM_FAILURES * mtbf_secs
    failures = draw_failures(
        host_mtbf_secs=mtbf_secs,
        horizon_secs=horizon_secs,
        num_seeds=num_seeds,
        seed=seed,
    )

    def play(plan: simulator.SavePlan) -> simulator.Outcome:
        return simulator.simulate(
            plan, costs, failures=failures, horizon_secs=horizon_secs
        )

    planned = float(intervals.plan_secs(costs.save, mtbf_secs))
    grid = planned * np.geomspace(1 / 10, 10, num_fixed)
    fixed = [float(play(EverySecs(float(every))).goodput.mean()) for every in grid]
    best = int(np.argmax(fixed))
    told = play(AutoSecs(mtbf_secs, costs.save))
    learnt = play(AutoSecs(GUESS_HOURS * 3600, costs.save))
    return {
        "mtbf_secs": mtbf_secs,
        "best_every_secs": float(grid[best]),
        "best": fixed[best],
        "auto_every_secs": float(np.median(told.every_secs)),
        "auto": float(told.goodput.mean()),
        "below": 1 - float(told.goodput.mean()) / fixed[best],
        "auto_learnt": float(learnt.goodput.mean()),
        "below_learnt": 1 - float(learnt.goodput.mean()) / fixed[best],
    }


def main(argv: list[str] | None = None) -> None:
    """Measures, simulates, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, help="of a run to measure from")
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--num-seeds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="jaxft-interval-") as scratch:
        workdir = options.workdir or pathlib.Path(scratch) / "run"
        if options.workdir is None:
            run_once_killed(workdir, num_steps=options.num_steps)
        costs = measure(workdir)
    rows = [
        compare(costs, mtbf, num_seeds=options.num_seeds, seed=options.seed)
        for mtbf in MTBF_SECS
    ]
    if options.json:
        print(json.dumps({"costs": repr(costs), "rows": rows}, indent=1))
        return
    save = costs.save
    print(
        f"a step {costs.step_secs:.4f} s, a save blocks {save.blocking_secs:.4f} s and "
        f"is written in {save.write_secs:.3f} s, steps {save.slowdown:.1%} slower; "
        f"a restart {costs.restart_secs:.2f} s"
    )
    print("| failure every | best fixed | its goodput | auto | below | told a day |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['mtbf_secs']:.0f} s | {row['best_every_secs']:.3g} s "
            f"| {row['best']:.4f} | {row['auto']:.4f} ({row['auto_every_secs']:.3g} s) "
            f"| {row['below']:+.2%} | {row['below_learnt']:+.2%} |"
        )


if __name__ == "__main__":
    main()
