"""`drill`: faults of all kinds on a real run, and whether its end is the same.

World: host-only. Floor: cli, below `__main__`. Read `jaxft/cli/drill_plan.py` before,
and `jaxft/goodput/incidents.py`, which says what each fault has cost.

The command itself is run, as a scheduler would do it: after a stop, and after it ran
out of memory, it is given again; anything else that ends it ends the drill. Then the
same command runs undisturbed in a workdir beside it, told to leave out from the start
the batches that the first one has left out, and the fingerprints of both last
checkpoints are compared.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft import command, records
from jaxft import config as configs
from jaxft.checkpoint import decisions, manifest
from jaxft.cli import text
from jaxft.cli.drill_plan import DrillPlan, plan_drill
from jaxft.config import ConfigError
from jaxft.events import read_events
from jaxft.faults.plan import Injected, PlannedFault
from jaxft.goodput.account import account_of_workdir
from jaxft.goodput.incidents import Incident
from jaxft.records import ExitCode, FaultKind

# After these the same command is given again, as the table of exit codes says.
_GIVEN_AGAIN = {
    ExitCode.STOPPED: Injected.SIGTERM,
    ExitCode.OUT_OF_MEMORY: Injected.OOM,
}
# What each kind must turn out to be.
_ANSWERS = {
    Injected.KILL: FaultKind.KILLED,
    Injected.KILL_IN_SAVE: FaultKind.KILLED,
    Injected.CORRUPT_NEWEST: FaultKind.KILLED,
    Injected.HANG: FaultKind.HANG,
    Injected.HANG_GIL: FaultKind.HANG,
    Injected.NAN_GRAD: "rollback",
    Injected.BAD_BATCH: "rollback",
    Injected.SPIKE: "rollback",
    Injected.SIGTERM: FaultKind.STOPPED,
    Injected.ENOSPC: FaultKind.SAVE_FAILED,
    Injected.OOM: FaultKind.OUT_OF_MEMORY,
    Injected.RAISE: FaultKind.EXCEPTION,
}


def add_command(groups: Any) -> None:
    """Adds `drill` to the toolbox."""
    about = (
        "faults of all kinds on a real run; compares its end with an undisturbed one"
    )
    parser = groups.add_parser("drill", help=about, description=about)
    parser.add_argument("--config", required=True, help="as for jaxft.main")
    parser.add_argument(
        "--workdir", required=True, help="a new folder; a small tmpfs allows enospc"
    )
    parser.add_argument("--failures", type=_count, default=30, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of their places")
    parser.add_argument("--kinds", default="", help="e.g. kill+hang; by default all")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    # Whatever else there is must be a setting: `--config.section.field=value`.
    parser.set_defaults(run=drill, takes_settings=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of one fault.

    Attributes:
        fault: it.
        fired: whether it happened.
        recovered: whether the answer was that of the table and the run went on.
        problem: why not; empty where it did.
        num_lost_steps: steps that had to be done again.
        lost_secs: until the run was as far as before.
    """

    fault: PlannedFault
    fired: bool
    recovered: bool
    problem: str = ""
    num_lost_steps: int = 0
    lost_secs: float = 0.0


def drill(options: Any) -> int:
    """Runs the drill and tells how it went; 1 where something did not recover."""
    workdir = pathlib.Path(options.workdir).expanduser().absolute()
    words = [f"--config={options.config}", *options.settings]
    parsed = command.parse(["drill", *words, f"--workdir={workdir}"])
    config = configs.resolve(parsed.config)
    if config.faults.inject:
        raise ConfigError("faults.inject", "a drill makes its own plan: leave it empty")
    if workdir.exists() and (not workdir.is_dir() or os.listdir(workdir)):
        raise ConfigError("", f"--workdir={workdir} is not empty: a drill begins anew")
    run, twin = workdir / "drilled", workdir / "undisturbed"
    plan = plan_drill(
        config,
        workdir=run,
        num_faults=options.failures,
        seed=options.seed,
        kinds=[word for word in options.kinds.replace(",", "+").split("+") if word],
    )
    for kind, reason in plan.refused.items():
        _say(f"refused: {kind}: {reason}")
    workdir.mkdir(parents=True, exist_ok=True)
    _say(f"{text.plural(len(plan.faults), 'fault')}: {plan.text}")
    settings = plan.settings | {"faults.inject": plan.text}
    codes = _run_until_over(words, run, settings, plan)
    finished = codes[-1] == ExitCode.FINISHED
    windows = _left_out(run) if finished else ""
    is_equal = None
    if finished:
        settings = plan.settings | {"faults.inject": plan.bad_data}
        skips = [config.data.skip, windows]
        settings["data.skip"] = ", ".join(skip for skip in skips if skip)
        _say(f"undisturbed, without batches {settings['data.skip'] or '(none)'}")
        if code := _start(words, twin, settings):
            raise records.fault_error(
                FaultKind.KILLED,
                f"the undisturbed run left with {code}: see {twin}.log",
            )
        is_equal = _fingerprints(run) == _fingerprints(twin)
    fates = judge(plan.faults, run, codes=codes)
    report = _summary(fates, plan, codes=codes, windows=windows, is_equal=is_equal)
    if options.json:
        text.print_json(report)
    else:
        _show(report)
    recovered = all(fate.recovered for fate in fates)
    return ExitCode.FINISHED if recovered and is_equal else 1


def _run_until_over(
    words: Sequence[str],
    workdir: pathlib.Path,
    settings: Mapping[str, object],
    plan: DrillPlan,
) -> list[int]:
    """Gives the command as often as a scheduler would; its exit codes."""
    left = collections.Counter(fault.kind for fault in plan.faults)
    codes: list[int] = []
    while True:
        started = time.monotonic()
        codes.append(code := _start(words, workdir, settings))
        _say(f"exit code {code} after {text.span(time.monotonic() - started)}")
        kind = _GIVEN_AGAIN.get(ExitCode(code)) if code in list(ExitCode) else None
        if kind is None or not left[kind]:
            return codes
        left[kind] -= 1


def _start(
    words: Sequence[str], workdir: pathlib.Path, settings: Mapping[str, object]
) -> int:
    """One start of the command; what it says goes to a log beside its workdir."""
    overrides = [f"--config.{path}={value}" for path, value in settings.items()]
    argv = [sys.executable, "-m", "jaxft.main", *words, f"--workdir={workdir}"]
    with open(f"{workdir}.log", "ab") as log:
        process = subprocess.Popen(
            [*argv, *overrides], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise


def _left_out(workdir: pathlib.Path) -> str:
    """The batches that rollbacks have left out, as `data.skip` has them."""
    found = decisions.read(workdir / "checkpoints").rollbacks
    windows = [one.skip for one in found if one.skip is not None]
    return ", ".join(f"{start}-{stop - 1}" for start, stop in windows)


def _fingerprints(workdir: pathlib.Path) -> dict[str, Any]:
    """Step, and leaf path -> type and fingerprint, of the newest checkpoint."""
    newest = decisions.discover(workdir / "checkpoints").committed[-1]
    leaves = manifest.read(newest.path).leaves
    found: dict[str, Any] = {
        path: (leaf.dtype, leaf.shape, leaf.fingerprint)
        for path, leaf in leaves.items()
    }
    return found | {"": newest.step}


# --- how it went ------------------------------------------------------------------


def judge(
    faults: Sequence[PlannedFault], workdir: pathlib.Path, *, codes: Sequence[int]
) -> list[Fate]:
    """What became of each fault, from the history of the run.

    Args:
        faults: the plan.
        workdir: of the run.
        codes: its exit codes, one a start.
    """
    events = read_events(workdir / "events")
    fired = {e["number"]: e for e in events if e["kind"] == "injected"}
    incidents: dict[str, list[Incident]] = {}
    for one in account_of_workdir(workdir).incidents.all:
        incidents.setdefault(one.injected, []).append(one)
    fates = []
    for fault in faults:
        event = fired.get(fault.number)
        found = incidents.get(str(fault), [])
        problem = "it did not fire"
        if event is not None:
            problem = _problem(fault, event, found, events=events, codes=codes)
        fates.append(
            Fate(
                fault=fault,
                fired=event is not None,
                recovered=not problem,
                problem=problem,
                num_lost_steps=sum(one.num_lost_steps for one in found),
                lost_secs=sum(one.lost_secs for one in found),
            )
        )
    return fates


def _problem(
    fault: PlannedFault,
    event: Mapping[str, Any],
    found: Sequence[Incident],
    *,
    events: Sequence[Mapping[str, Any]],
    codes: Sequence[int],
) -> str:
    """Why a fault that fired was not answered as it should be; empty if it was."""
    later = [e for e in events if e["time"] >= event["time"]]
    if fault.kind is Injected.SLOW_DISK:
        saved = any(
            e["kind"] == "save_commit" and e["step"] == event["step"] for e in later
        )
        gone = any(e["kind"] == "launch" for e in later)  # Another fault came first.
        return "" if saved or gone else f"step {event['step']} was not saved"
    wanted = _ANSWERS[fault.kind]
    kinds = [one.kind for one in found]
    if wanted not in kinds:
        return f"it was taken for {', '.join(kinds) or 'nothing'}, not for {wanted}"
    # One that the next one overtook is over when the run has come so far after both.
    farthest = max((e["step"] for e in later if e["kind"] == "step"), default=-1)
    if not all(one.is_over or farthest >= one.step for one in found):
        return "the run did not come as far again"
    if fault.kind is Injected.CORRUPT_NEWEST and not any(
        e["kind"] == "quarantine" for e in later
    ):
        return "the damaged step was not moved aside"
    for code, kind in _GIVEN_AGAIN.items():
        if kind is fault.kind and code not in codes:
            return f"no start of the command left with {int(code)}"
    return ""


def _summary(
    fates: Sequence[Fate],
    plan: DrillPlan,
    *,
    codes: Sequence[int],
    windows: str,
    is_equal: bool | None,
) -> dict[str, Any]:
    kinds = {}
    for kind in Injected:
        mine = [fate for fate in fates if fate.fault.kind is kind]
        if mine:
            kinds[str(kind)] = {
                "planned": len(mine),
                "injected": sum(fate.fired for fate in mine),
                "recovered": sum(fate.recovered for fate in mine),
                "num_lost_steps": sum(fate.num_lost_steps for fate in mine),
                "lost_secs": sum(fate.lost_secs for fate in mine),
            }
    return {
        "plan": plan.text,
        "kinds": kinds,
        "refused": plan.refused,
        "problems": {str(fate.fault): fate.problem for fate in fates if fate.problem},
        "exit_codes": list(codes),
        "left_out": windows,
        "same_end": is_equal,
    }


def _show(report: Mapping[str, Any]) -> None:
    rows = [("fault", "injected", "recovered", "steps lost", "time lost")]
    columns = ("injected", "recovered", "num_lost_steps", "lost_secs")
    total = dict.fromkeys(columns, 0.0)
    for kind, row in report["kinds"].items():
        total = {name: total[name] + row[name] for name in columns}
        rows.append((kind, *_cells(row)))
    rows.append(("all", *_cells(total)))
    print(text.table(rows, right=(1, 2, 3, 4)))
    for kind, reason in report["refused"].items():
        print(f"refused: {kind}: {reason}")
    for fault, problem in report["problems"].items():
        print(f"not recovered: {fault}: {problem}")
    print(f"exit codes: {', '.join(map(str, report['exit_codes']))}")
    if report["left_out"]:
        print(f"batches left out: {report['left_out']}")
    ends = {
        True: "equal to the undisturbed run, by the fingerprints of every leaf",
        False: "NOT equal to the undisturbed run",
        None: "never reached",
    }
    print(f"end state: {ends[report['same_end']]}")


def _cells(row: Mapping[str, float]) -> tuple[str, str, str, str]:
    counts = [f"{row[n]:.0f}" for n in ("injected", "recovered", "num_lost_steps")]
    return counts[0], counts[1], counts[2], text.span(row["lost_secs"])


def _count(words: str) -> int:
    if (number := int(words)) < 1:
        raise ValueError(words)
    return number


def _say(words: str) -> None:
    print(f"drill: {words}", file=sys.stderr, flush=True)
