"""Who started this process, as which of how many: Slurm, Kubernetes, flags, nobody.

World: host-only. Floor: recovery. Read `jaxft/command.py`, whose flags win over all
that is found here, before this file and `jaxft/main.py`, its one user, after it.

A pure function over the environment: nothing is started, looked up or connected to.

* Slurm: a process of a job step, as `srun` starts it. The batch script itself is no
  such process: there a command is one process, whatever the job's size.
* JobSet: the variables that `launch/jobset.yaml` sets from the pod's annotations.
* an Indexed Job of Kubernetes: the index is the job's, the count must be told.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

from jaxft.config import ConfigError
from jaxft.records import JobPlace

# Above what Linux gives to outgoing connections (32768 to 60999).
FIRST_PORT = 61_000
NUM_PORTS = 4_096
KUBERNETES_PORT = 61_000
_FLAGS = "give --num_processes, --process_index and --coordinator"


class LauncherKind(enum.StrEnum):
    """What started the process. The value is the name used in the event."""

    ALONE = "alone"
    FLAGS = "flags"
    SLURM = "slurm"
    JOBSET = "jobset"
    INDEXED_JOB = "indexed_job"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher:
    """One process of a job.

    Attributes:
        kind: what started it.
        process_index: from 0; that of 0 coordinates.
        num_processes: of the whole job.
        coordinator: `host:port` that all of them meet at; empty for a job of one.
        job: what the scheduler calls the job; empty where there is none.
        num_requeues: how often the scheduler started it anew.
    """

    kind: LauncherKind
    process_index: int = 0
    num_processes: int = 1
    coordinator: str = ""
    job: str = ""
    num_requeues: int = 0

    @property
    def place(self) -> JobPlace:
        """The same for a worker."""
        return JobPlace(
            process_index=self.process_index,
            num_processes=self.num_processes,
            coordinator=self.coordinator,
        )

    @property
    def index_of_several(self) -> int | None:
        """Its index where there are others; None for a process alone."""
        return self.process_index if self.num_processes > 1 else None

    @property
    def identity(self) -> str:
        """What tells the job from all others, the same for all its processes."""
        return (
            f"{self.num_processes} processes at {self.coordinator} {self.job}".strip()
        )

    def event(self) -> dict[str, Any]:
        """The fields of the `launcher` event."""
        fields = dataclasses.asdict(self)
        return {"name": fields.pop("kind"), **fields}


def find_launcher(
    environ: Mapping[str, str],
    *,
    num_processes: int | None = None,
    process_index: int | None = None,
    coordinator: str = "",
) -> Launcher:
    """What started this process, as which of how many.

    Args:
        environ: the process's environment.
        num_processes: a flag; None when it was not given.
        process_index: likewise.
        coordinator: likewise; empty when it was not given.

    Raises:
        ConfigError: what is there does not say it, or contradicts itself.
    """
    if "SLURM_JOB_ID" in environ:
        found = _of_slurm(environ)
    elif "JOBSET_NAME" in environ:
        found = _of_jobset(environ)
    elif "JOB_COMPLETION_INDEX" in environ:
        found = _of_indexed_job(environ, num_processes=num_processes)
    else:
        found = Launcher(kind=LauncherKind.ALONE)
    if num_processes is not None or process_index is not None or coordinator:
        found = _by_flags(found, num_processes, process_index, coordinator)
    if found.num_processes < 1 or not 0 <= found.process_index < found.num_processes:
        raise ConfigError(
            "",
            f"process {found.process_index} of {found.num_processes} ({found.kind}) "
            f"cannot be: {_FLAGS}",
        )
    if found.num_processes > 1 and not found.coordinator:
        raise ConfigError(
            "",
            f"{found.num_processes} processes, and no address to meet at: "
            "give --coordinator=HOST:PORT",
        )
    return found


def is_local_job(
    environ: Mapping[str, str],
    *,
    num_processes: int | None,
    process_index: int | None,
    coordinator: str,
) -> bool:
    """Whether the command is to start all processes of its job by itself, here.

    Args:
        environ: the process's environment.
        num_processes: a flag; None when it was not given.
        process_index: likewise.
        coordinator: likewise; empty when it was not given.
    """
    names_nobody = process_index is None and not coordinator
    is_started_by = "JOBSET_NAME" in environ or "JOB_COMPLETION_INDEX" in environ
    is_started_by |= "SLURM_STEP_ID" in environ
    return (num_processes or 1) > 1 and names_nobody and not is_started_by


def first_host(nodes: str) -> str:
    """The first of Slurm's compressed host names: `n[01-04,7],m` gives `n01`.

    Raises:
        ConfigError: it is no such list.
    """
    first, depth = "", 0
    for letter in nodes:
        if letter == "," and depth == 0:
            break
        depth += (letter == "[") - (letter == "]")
        first += letter
    # Each bracket stands for its first number; there may be several of them.
    host = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", first)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host):
        raise ConfigError("", f"SLURM_STEP_NODELIST={nodes!r} names no host: {_FLAGS}")
    return host


def _of_slurm(environ: Mapping[str, str]) -> Launcher:
    job = environ["SLURM_JOB_ID"]
    found = Launcher(
        kind=LauncherKind.SLURM,
        job=job,
        num_requeues=_number(environ, "SLURM_RESTART_COUNT", default=0),
    )
    if "SLURM_STEP_ID" not in environ:
        return found
    num_processes = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    if num_processes == 1:
        return found
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    port = FIRST_PORT + _number(environ, "SLURM_JOB_ID") % NUM_PORTS
    return dataclasses.replace(
        found,
        process_index=_number(environ, "SLURM_PROCID"),
        num_processes=num_processes,
        coordinator=f"{first_host(nodes)}:{port}",
    )


def _of_jobset(environ: Mapping[str, str]) -> Launcher:
    name = environ["JOBSET_NAME"]
    num_jobs = _number(environ, "JOBSET_NUM_JOBS", default=1)
    num_pods = _number(environ, "JOBSET_PODS_PER_JOB", default=1)
    job_index = _number(environ, "JOBSET_JOB_INDEX", default=0)
    pod_index = _number(environ, "JOB_COMPLETION_INDEX", default=0)
    coordinator = ""
    if num_jobs * num_pods > 1:
        # Each pod has a name in the headless service that is called as the set is.
        host = f"{name}-{environ.get('JOBSET_REPLICATED_JOB', '')}-0-0.{name}"
        coordinator = f"{host}:{KUBERNETES_PORT}"
    return Launcher(
        kind=LauncherKind.JOBSET,
        process_index=job_index * num_pods + pod_index,
        num_processes=num_jobs * num_pods,
        coordinator=coordinator,
        job=name,
        num_requeues=_number(environ, "JOBSET_RESTART_ATTEMPT", default=0),
    )


def _of_indexed_job(
    environ: Mapping[str, str], *, num_processes: int | None
) -> Launcher:
    if num_processes is None:
        index = environ["JOB_COMPLETION_INDEX"]
        raise ConfigError(
            "",
            f"JOB_COMPLETION_INDEX={index} says which process of an Indexed Job this "
            "is, and nothing how many there are: give --num_processes",
        )
    return Launcher(
        kind=LauncherKind.INDEXED_JOB,
        process_index=_number(environ, "JOB_COMPLETION_INDEX"),
        num_processes=num_processes,
    )


def _by_flags(
    found: Launcher,
    num_processes: int | None,
    process_index: int | None,
    coordinator: str,
) -> Launcher:
    """What was found, with what the flags say in its place."""
    both = num_processes is not None and process_index is not None
    is_alone = found.kind is LauncherKind.ALONE
    if is_alone and not both and num_processes != 1:
        raise ConfigError("", f"nothing else says who this is: {_FLAGS}")
    kind = LauncherKind.FLAGS if both or is_alone else found.kind
    return dataclasses.replace(
        found,
        kind=kind,
        num_processes=found.num_processes if num_processes is None else num_processes,
        process_index=found.process_index if process_index is None else process_index,
        coordinator=coordinator or found.coordinator,
    )


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these that is set.

    Raises:
        ConfigError: none is, or it is no natural number.
    """
    for name in names:
        if (text := environ.get(name, "")) != "":
            if not re.fullmatch(r"\d{1,15}", text):
                raise ConfigError("", f"{name}={text!r} is not a number: {_FLAGS}")
            return int(text)
    if default is None:
        raise ConfigError("", f"{names[0]} is not set: {_FLAGS}")
    return default
