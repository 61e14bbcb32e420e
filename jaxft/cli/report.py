"""`report`: where the time of a run went, what went wrong, what it cost.

World: host-only. Floor: cli, below `__main__`. Read `jaxft/goodput/account.py`, which
finds all that is shown here, before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jaxft.cli import places, text
from jaxft.goodput.account import Account, account_of
from jaxft.goodput.costs import Amounts, Recovery
from jaxft.goodput.history import History
from jaxft.goodput.incidents import Incident
from jaxft.goodput.ledger import Cause
from jaxft.records import ExitCode
from jaxft.recovery import workdir as workdirs

# The newest; JSON has all.
_MAX_INCIDENTS = 20
_PARTS = ("down", "imports", "build", "restore", "verify", "compile", "first_step")
# What is worth a row although it may be nothing.
_ALWAYS = (Cause.STEP, Cause.REPEATED, Cause.DOWN, Cause.UNKNOWN)


def add_command(groups: Any) -> None:
    """Adds `report` to the toolbox."""
    about = "where the time of a run went, by cause; what went wrong, and what it cost"
    parser = groups.add_parser("report", help=about, description=about)
    parser.add_argument("where", metavar="WORKDIR", help="of a run, running or not")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=report)


def report(options: Any) -> int:
    """Shows the account of a run, up to this moment if it is running."""
    workdir = places.workdir_at(options.where)
    folder = workdir / "events"
    history = History(folder)
    if not history:
        raise places.nothing_there(f"no history in {folder}: no run has begun here")
    progress = text.Progress(f"reading {folder}", num_bytes=history.num_bytes)
    is_running = False
    with contextlib.suppress(OSError):  # A file system without locks cannot tell.
        is_running = workdirs.is_in_use(workdir)
    try:
        account = account_of(history.read(progress.add))
    finally:
        progress.close()
    if is_running:
        account.go_on_until(history.now())
    if options.json:
        known = _as_json(account, is_running=is_running)
        text.print_json({"workdir": str(workdir)} | known)
    else:
        print(f"{workdir}: {_state(account, is_running=is_running)}")
        for part in _parts(account):
            print(f"\n{part}")
    return ExitCode.FINISHED


# --- JSON -----------------------------------------------------------------------


def _as_json(account: Account, *, is_running: bool) -> dict[str, Any]:
    ledger, costs = account.ledger, account.costs
    return {
        "is_running": is_running,
        "ending": account.ending,
        "step": account.last_step,
        "num_steps": account.last_target,
        "begun": account.begun_secs,
        "wall_secs": ledger.wall_secs,
        "off_secs": ledger.off_secs,
        "goodput": ledger.goodput,
        "goodput_while_on": _goodput_while_on(account),
        "secs": {str(cause): secs for cause, secs in ledger.secs().items()},
        "num_workers": account.num_launches,
        "num_productive_steps": ledger.num_steps,
        "num_repeated_steps": ledger.num_repeated,
        "num_guarded_steps": ledger.num_guarded,
        "incidents": [dataclasses.asdict(one) for one in account.incidents.all],
        "saves": {
            "blocking": _amounts(costs.blocking),
            "whole": _amounts(costs.saves),
            "num_bytes": costs.save_bytes,
            "linked_bytes": costs.linked_bytes,
            "num_skipped": costs.num_skipped_saves,
            "num_failed": costs.num_failed_saves,
        },
        "restores": _amounts(costs.restores) | {"num_bytes": costs.restore_bytes},
        "recoveries": [dataclasses.asdict(one) for one in costs.recoveries],
    }


def _amounts(amounts: Amounts) -> dict[str, float]:
    return {
        "count": len(amounts),
        "median_secs": amounts.median,
        "max_secs": amounts.longest,
        "total_secs": amounts.total,
    }


def _goodput_while_on(account: Account) -> float:
    """Share of the time in which a command ran."""
    on_secs = account.ledger.wall_secs - account.ledger.off_secs
    return account.ledger.secs()[Cause.STEP] / on_secs if on_secs > 0 else 0.0


# --- text -----------------------------------------------------------------------


def _state(account: Account, *, is_running: bool) -> str:
    of = f" of {account.last_target}" if account.last_target >= 0 else ""
    where = f"step {account.last_step}{of}" if account.last_step >= 0 else "no step yet"
    if is_running:
        return f"running, {where}"
    if account.ending:
        return f"{account.ending}, {where}"
    return f"ended without a word, {where}"


def _parts(account: Account) -> Iterable[str]:
    """The report, paragraph by paragraph; those that would be empty are left out."""
    yield _head(account)
    yield _causes(account)
    if incidents := account.incidents.all:
        yield _incidents(incidents)
    if costs := _costs(account):
        yield costs
    if account.costs.recoveries:
        yield _recoveries(account.costs.recoveries)


def _head(account: Account) -> str:
    ledger = account.ledger
    wall = text.span(ledger.wall_secs)
    rows = [
        ("wall time", f"{wall} since {text.date(account.begun_secs)}"),
        ("goodput", f"{100 * ledger.goodput:.1f} % of it in productive steps"),
        (
            "steps",
            f"{ledger.num_steps} productive, {ledger.num_repeated} repeated, "
            f"{ledger.num_guarded} not applied",
        ),
        ("workers", f"{account.num_launches}"),
    ]
    if ledger.off_secs >= 0.05:
        while_on = f"{100 * _goodput_while_on(account):.1f} %"
        rows[1:2] = [
            ("no command", f"ran for {text.span(ledger.off_secs)} of it"),
            ("goodput", f"{rows[1][1]}, {while_on} of when a command ran"),
        ]
    return text.table(rows)


def _causes(account: Account) -> str:
    wall = account.ledger.wall_secs or 1.0
    found = sorted(account.ledger.secs().items(), key=lambda item: -item[1])
    rows = [
        (_words(cause), f"{secs:.2f}", f"{100 * secs / wall:.2f} %")
        for cause, secs in found
        if secs or cause in _ALWAYS
    ]
    return text.table([("cause", "seconds", "share"), *rows], right=(1, 2))


def _incidents(incidents: Sequence[Incident]) -> str:
    shown = incidents[-_MAX_INCIDENTS:]
    rows = [
        (
            text.date(one.at_secs),
            _words(one.kind),
            one.step if one.step >= 0 else "-",
            one.num_lost_steps,
            text.span(one.lost_secs) if one.is_over else f">{text.span(one.lost_secs)}",
            f"on purpose by {one.injected}: " * bool(one.injected) + one.evidence,
        )
        for one in shown
    ]
    head = ("incident", "kind", "step", "steps lost", "time lost", "evidence")
    lines = [text.table([head, *rows], right=(2, 3, 4))]
    if len(incidents) > len(shown):
        num_left_out = len(incidents) - len(shown)
        lines.append(f"and {text.plural(num_left_out, 'earlier one')}: see --json")
    steps = sum(one.num_lost_steps for one in incidents)
    secs = text.span(sum(one.lost_secs for one in incidents))
    count = text.plural(len(incidents), "incident")
    lines.append(f"{count}, {text.plural(steps, 'step')} and {secs} lost")
    return "\n".join(lines)


def _costs(account: Account) -> str:
    costs = account.costs
    rows = [
        _cost("save, blocking", costs.blocking),
        _cost("save, until committed", costs.saves, num_bytes=costs.save_bytes),
        _cost("restore", costs.restores, num_bytes=costs.restore_bytes),
    ]
    rows = [row for row in rows if row[1]]
    if not rows:
        return ""
    head = ("cost", "count", "median", "longest", "total", "bytes")
    lines = [text.table([head, *rows], right=(1, 2, 3, 4, 5))]
    if costs.linked_bytes:
        lines.append(f"of the saved bytes {text.size(costs.linked_bytes)} were linked")
    if bad := costs.num_failed_saves + costs.num_skipped_saves:
        lines.append(
            f"{text.plural(bad, 'save')} beside these: {costs.num_failed_saves} "
            f"failed, {costs.num_skipped_saves} skipped as one was in flight"
        )
    return "\n".join(lines)


def _cost(name: str, amounts: Amounts, *, num_bytes: int = 0) -> tuple[object, ...]:
    spans = map(text.span, (amounts.median, amounts.longest, amounts.total))
    return (name, len(amounts), *spans, text.size(num_bytes) if num_bytes else "")


def _recoveries(recoveries: Sequence[Recovery]) -> str:
    """What the way to the first step took; a part's median is of that part alone."""
    restarts = [one for one in recoveries if one.is_restart]

    def row(name: str, of: Any, among: Sequence[Recovery]) -> tuple[str, ...]:
        values = [
            of([getattr(one, f"{part}_secs") for one in among])
            for part in (*_PARTS, "other", "total")
        ]
        return (name, *(f"{value:.2f}" for value in values))

    rows = [row("first start", max, [one]) for one in recoveries if not one.is_restart]
    if restarts:
        name = (
            "restart" if len(restarts) == 1 else f"median of {len(restarts)} restarts"
        )
        rows.append(row(name, statistics.median, restarts))
    if len(restarts) > 1:
        rows.append(row("longest", max, restarts))
        rows.append(row("newest", max, restarts[-1:]))
    head = ("seconds to the first step", *map(_words, _PARTS), "other", "total")
    return text.table([head, *rows], right=range(1, len(head)))


def _words(name: str) -> str:
    return name.replace("_", " ")
