"""`simulate`: what a run would make of its time, by policy of saving.

World: host-only. Floor: cli, below `__main__`. Read `jaxft/goodput/simulator.py` and
`jaxft/goodput/experience.py` before.

Costs are given, or measured from the history of a workdir; what is given wins.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any

import numpy as np

from jaxft import intervals, records
from jaxft.checkpoint import policies
from jaxft.cli import places, text
from jaxft.config import ConfigError
from jaxft.goodput import simulator
from jaxft.goodput.experience import Measured, read_experience
from jaxft.goodput.failure_times import draw_failures
from jaxft.goodput.simulator import Costs, Outcome, SavePlan
from jaxft.intervals import Experience, SaveCost
from jaxft.records import ExitCode
from jaxft.recovery import workdir as workdirs

_SAVES = ("auto", "secs(60)", "secs(600)", "secs(3600)")
_SHARES = (0.05, 0.5, 0.95)
_HOUR_SECS = 3600.0
_DAY_SECS = 24 * _HOUR_SECS
# Without a longer wish a history holds so many failures.
_NUM_USUAL_FAILURES = 200


def add_command(groups: Any) -> None:
    """Adds `simulate` to the toolbox."""
    about = "goodput under random failures, by policy of saving"
    parser = groups.add_parser("simulate", help=about, description=about)

    def add(name: str, kind: Any, words: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, help=words, **more)

    add("--workdir", str, "measure from its history what is not given")
    add("--hosts", _whole, "of the job; any one's failure stops it", default=1)
    add("--mtbf-hours", _positive, "mean time between failures of one host")
    add("--weibull-shape", _positive, "below 1: new hosts fail most", default=1.0)
    add("--save", str, "a policy, e.g. auto or 'secs(600)'; again for more", nargs="+")
    add("--expected-hours", _positive, "what auto expects at first; default: true")
    add("--step-secs", _positive, "of a step beside no save")
    add("--blocking-secs", _not_negative, "a save stops the steps")
    add("--write-secs", _not_negative, "from there to its commit")
    add("--slowdown", _not_negative, "of steps meanwhile; 0.2 is a fifth longer")
    add("--restart-secs", _not_negative, "from a failure until the work goes on")
    add("--days", _positive, "length of a history; default: 200 failures")
    add("--num-seeds", _whole, "random histories, the same for all", default=200)
    add("--seed", int, "of all of them", default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=simulate)


def simulate(options: Any) -> int:
    """Simulates each policy on the same histories."""
    costs, mtbf_secs = _known(options)
    job_mtbf_secs = mtbf_secs / options.hosts
    horizon_secs = (options.days or 0) * _DAY_SECS or (
        _NUM_USUAL_FAILURES * job_mtbf_secs
    )
    expected_secs = (options.expected_hours or 0) * _HOUR_SECS or job_mtbf_secs
    saves = options.save or list(_SAVES)
    plans = [_plan(one, costs, expected_secs=expected_secs) for one in saves]
    try:
        failures = draw_failures(
            host_mtbf_secs=mtbf_secs,
            horizon_secs=horizon_secs,
            num_hosts=options.hosts,
            shape=options.weibull_shape,
            num_seeds=options.num_seeds,
            seed=options.seed,
        )
    except ValueError as error:
        raise _refused(str(error)) from error
    rows = []
    for save, plan in zip(saves, plans, strict=True):
        found = simulator.simulate(
            plan, costs, failures=failures, horizon_secs=horizon_secs
        )
        rows.append(_row(save, found))
    head = _head(options, costs, mtbf_secs=mtbf_secs, horizon_secs=horizon_secs)
    if options.json:
        text.print_json({**head, "policies": rows})
    else:
        _print(head, rows)
    return ExitCode.FINISHED


# --- what is known ------------------------------------------------------------


def _known(options: Any) -> tuple[Costs, float]:
    """Costs, and the mean time between failures of one host, in seconds."""
    measured = Measured(experience=Experience())
    if options.workdir is not None:
        workdir = places.workdir_at(options.workdir)
        measured = read_experience(
            workdir / "events",
            expected_hours=options.expected_hours or Experience.expected_hours,
            now_secs=time.time(),
            is_running=workdirs.is_in_use(workdir),
        )
    seen = measured.experience
    cost = seen.cost or SaveCost(blocking_secs=math.nan)
    given = {
        name: value
        for name in ("blocking_secs", "write_secs", "slowdown")
        if (value := getattr(options, name)) is not None
    }
    cost = dataclasses.replace(cost, **given)
    step_secs = options.step_secs or measured.step_secs
    restart_secs = options.restart_secs
    if restart_secs is None:
        restart_secs = seen.restart_secs or math.nan
    mtbf_secs = (options.mtbf_hours or 0) * _HOUR_SECS
    if not mtbf_secs and options.workdir is not None:
        # What failed there was the whole job.
        rate = intervals.failure_rate(
            seen.expected_hours * _HOUR_SECS,
            num_failures=seen.num_failures,
            secs=seen.secs,
        )
        mtbf_secs = options.hosts / float(rate)
    _check(
        options,
        {
            "--mtbf-hours": mtbf_secs > 0,
            "--step-secs": step_secs > 0,
            "--blocking-secs": not math.isnan(cost.blocking_secs),
            "--restart-secs": not math.isnan(restart_secs),
        },
    )
    return Costs(step_secs=step_secs, save=cost, restart_secs=restart_secs), mtbf_secs


def _check(options: Any, is_known: dict[str, bool]) -> None:
    if missing := [name for name, known in is_known.items() if not known]:
        where = ", or --workdir with a history"
        if options.workdir is not None:
            where = f": the history in {options.workdir} does not tell"
        raise _refused(f"give {', '.join(missing)}{where}")


def _plan(save: str, costs: Costs, *, expected_secs: float) -> SavePlan:
    """A policy as the simulator has it."""
    try:
        policy = policies.parse_save(save, interval=lambda _: math.inf)
    except ConfigError as error:
        raise _refused(f"--save: {error.problem}") from error
    if isinstance(policy, policies.AnySave):
        parts = [_one_plan(p, costs, expected_secs) for p in policy.policies]
        return simulator.Earliest(tuple(parts))
    return _one_plan(policy, costs, expected_secs)


def _one_plan(
    policy: records.SavePolicy, costs: Costs, expected_secs: float
) -> SavePlan:
    if isinstance(policy, policies.Steps):
        return simulator.EverySteps(policy.num_steps)
    if isinstance(policy, policies.Secs):
        return simulator.EverySecs(policy.secs)
    return simulator.AutoSecs(expected_secs, costs.save)


def _refused(problem: str) -> records.FaultError:
    return records.fault_error(records.FaultKind.CONFIG, problem)


def _positive(word: str) -> float:
    if not 0 < (number := _number(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no positive number")
    return number


def _not_negative(word: str) -> float:
    if not 0 <= (number := _number(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is not 0 or a positive number")
    return number


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _whole(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least 1")
    return int(word)


# --- what comes out -----------------------------------------------------------


def _row(save: str, found: Outcome) -> dict[str, Any]:
    def share(secs: np.ndarray) -> float:
        return float(np.mean(secs) / found.horizon_secs)

    return {
        "save": save,
        "goodput": share(found.work_secs),
        "goodput_quantiles": dict(
            zip(map(str, _SHARES), found.quantiles(_SHARES), strict=True)
        ),
        "lost": share(found.lost_secs),
        "saving": share(found.save_secs),
        "restarting": share(found.restart_secs),
        "num_failures": float(np.mean(found.num_failures)),
        "num_saves": float(np.mean(found.num_saves)),
        "every_secs": float(np.median(found.every_secs)),
    }


def _head(
    options: Any, costs: Costs, *, mtbf_secs: float, horizon_secs: float
) -> dict[str, Any]:
    return {
        "num_hosts": options.hosts,
        "host_mtbf_secs": mtbf_secs,
        "job_mtbf_secs": mtbf_secs / options.hosts,
        "weibull_shape": options.weibull_shape,
        "horizon_secs": horizon_secs,
        "num_seeds": options.num_seeds,
        "step_secs": costs.step_secs,
        "blocking_secs": costs.save.blocking_secs,
        "write_secs": costs.save.write_secs,
        "slowdown": costs.save.slowdown,
        "restart_secs": costs.restart_secs,
    }


def _print(head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    print(
        f"{text.plural(head['num_hosts'], 'host')}, a failure every "
        f"{head['job_mtbf_secs']:.4g} s; "
        f"{text.plural(head['num_seeds'], 'random run')} of "
        f"{head['horizon_secs'] / _DAY_SECS:.4g} days"
    )
    print(
        f"a step {head['step_secs']:.4g} s; a save blocks {head['blocking_secs']:.4g} "
        f"s, is written in {head['write_secs']:.4g} s, steps {head['slowdown']:.1%} "
        f"slower; a restart {head['restart_secs']:.4g} s"
    )
    columns = ("save", "goodput", "5 %", "95 %", "lost", "saving", "restarting")
    lines: list[tuple[str, ...]] = [(*columns, "failures", "saves", "every")]
    for row in rows:
        low, _, high = row["goodput_quantiles"].values()
        shares = (row["goodput"], low, high, row["lost"], row["saving"])
        cells = [f"{share:.2%}" for share in (*shares, row["restarting"])]
        counts = (f"{row['num_failures']:.0f}", f"{row['num_saves']:.0f}")
        lines.append((row["save"], *cells, *counts, f"{row['every_secs']:.4g} s"))
    print(text.table(lines, right=range(1, len(lines[0]))))
