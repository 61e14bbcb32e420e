"""The sections of the config for what may go wrong: stops, deaths, hangs, bad steps.

World: host-only. Floor: below `config`, whose sections they are. Read
`jaxft/settings.py` before this file and `jaxft/config.py` after it.

No postponed annotations here: config_flags needs the real classes.
"""

import dataclasses

from jaxft.choices import Spare
from jaxft.settings import Section, not_negative, positive, setting


@dataclasses.dataclass(kw_only=True, slots=True)
class PreemptionConfig(Section):
    """What counts as a request to stop, and how long there is to obey."""

    signals: str = setting(
        "SIGTERM, SIGUSR1, SIGINT, SIGHUP", "what asks the run to stop", numbers=False
    )
    grace_secs: float = positive(
        30.0, "time from the request to the end of the process", numbers=False
    )
    time_limit_secs: float = not_negative(
        0.0, "stop this long after the start; 0 is off", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class SupervisorConfig(Section):
    """Restarts."""

    max_restarts: int = not_negative(10, "restart budget", numbers=False)
    refill_steps: int = positive(500, "good steps that earn one back", numbers=False)
    backoff_secs: float = not_negative(
        0.5, "wait before the second restart without progress; doubles", numbers=False
    )
    backoff_max_secs: float = not_negative(60.0, "longest wait", numbers=False)
    spare: Spare = setting(
        Spare.AUTO,
        "auto, always or never: keep a process in waiting that has its imports done; "
        "auto: while the host has memory to spare",
        numbers=False,
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class HangConfig(Section):
    """When a run that makes no progress is ended; see `jaxft/limits.py`."""

    enabled: bool = setting(True, "look for hangs", numbers=False)
    factor: float = positive(
        10.0, "limit over the longest recent time of the same phase", numbers=False
    )
    min_secs: float = positive(60.0, "least limit of a step", numbers=False)
    first_secs: float = positive(
        1800.0, "limit of what was never seen: a compilation, a restore", numbers=False
    )
    margin_secs: float = positive(
        15.0, "the supervisor acts this much later than the worker", numbers=False
    )
    end_notebook: bool = setting(
        False, "end the process in jaxft.run, too, not only report", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class DistributedConfig(Section):
    """A run of several processes: how long they wait for each other."""

    start_secs: float = positive(
        300.0, "for all processes to be there, at the start", numbers=False
    )
    heartbeat_secs: float = positive(
        100.0,
        "silence of a process after which JAX ends the others; supervisors are faster",
        numbers=False,
    )
    leave_secs: float = positive(
        30.0, "for all processes to be at their end", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class ElasticConfig(Section):
    """When some of the processes of a job are gone."""

    host_lost_secs: float = positive(
        30.0, "silence after which a process counts as lost", numbers=False
    )
    wait_secs: float = positive(
        300.0, "how long those that are absent are waited for", numbers=False
    )
    min_processes: int = not_negative(
        0, "then go on, if so many are there; 0: never without all", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class RollbackConfig(Section):
    """When steps are bad: back to an earlier checkpoint, without the bad batches."""

    max_rollbacks: int = not_negative(
        3, "so many near each other, then the run ends; 0 is off", numbers=False
    )
    near_batches: int = positive(
        1000, "how far apart rollbacks count as near", numbers=False
    )
    skip_before: int = not_negative(
        1, "batches left out before the first bad one", numbers=False
    )
    skip_after: int = not_negative(
        10, "batches left out after it; both double at the same place", numbers=False
    )
    spike_factor: float = not_negative(
        0.0, "a loss is high above median + factor * deviation; 0 is off", numbers=False
    )
    spike_window: int = positive(
        100, "losses that median and deviation are taken of", numbers=False
    )
    spike_steps: int = positive(
        5, "high losses in a row that are a spike", numbers=False
    )
    spike_margin_steps: int = not_negative(
        20, "steps that the checkpoint must lie before a spike", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class FaultsConfig(Section):
    """Faults on purpose, for drills: they really happen."""

    inject: str = setting(
        "",
        "a plan such as 'kill@120; nan_grad@250-252; random(n=5, kinds=kill)'; see "
        "jaxft/faults/plan.py; empty is off",
        numbers=False,
    )
