"""Who runs as which launch of a job's workers: write-once files that all can read.

World: host-only. Floor: recovery. Read `jaxft/recovery/policy.py`, whose `WorkerExit`
is written down here, before this file and `jaxft/recovery/council.py`, which decides
what is written, after it.

    <workdir>/generations/<g>.json            who is in it, where its workers meet
    <workdir>/generations/<g>.down.<who>.json how the worker of that member ended
    <workdir>/generations/<g>.regroup.json    it shall stop, for somebody came back
    <workdir>/generations/<g>.end.json        there is no next one, and why

A file is there whole or not at all, is never changed, and belongs to whoever was
first: of two that propose a generation one learns that there is one already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxft import durable
from jaxft.records import FaultKind
from jaxft.recovery.policy import CacheMode, WorkerExit

FOLDER = "generations"
_NAME = re.compile(r"([1-9]\d*)\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """One member of a generation.

    Attributes:
        name: of the member, the same whenever and wherever it is started.
        incarnation: which of its starts.
    """

    name: str
    incarnation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One launch of the workers of a job.

    Attributes:
        number: from 1; in a workdir no number comes twice.
        members: by the index of their workers.
        coordinator: `host:port` where worker 0 listens.
        attempt: restarts before it since the job's command was started.
        num_configured: processes that the job is meant to have.
        cache: how workers use the compile cache.
        committed_step: newest step known to be committed; -1 for none.
        reason: why it was begun, one line.
        proposer: the member that decided it.
        time_secs: when, in seconds since the epoch.
    """

    number: int
    members: tuple[Seat, ...]
    coordinator: str
    attempt: int
    num_configured: int
    cache: CacheMode = CacheMode.KEEP
    committed_step: int = -1
    reason: str = ""
    proposer: str = ""
    time_secs: float = 0.0

    def rank(self, seat: Seat) -> int:
        """The index of a member's worker; -1 for who is not in it."""
        return self.members.index(seat) if seat in self.members else -1

    def __contains__(self, seat: Seat) -> bool:
        return seat in self.members


@dataclasses.dataclass(frozen=True, kw_only=True)
class Down:
    """How the worker of one member ended.

    Attributes:
        member: its name.
        ended: the same as for a worker alone.
        called_off: it was taken down because another one was down.
        stop_reason: who had asked its supervisor to stop; empty for nobody.
        preflight_done: its preflight was over.
        time_secs: when, in seconds since the epoch.
    """

    member: str
    ended: WorkerExit
    called_off: bool = False
    stop_reason: str = ""
    preflight_done: bool = False
    time_secs: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """Why there is no next generation.

    Attributes:
        exit_code: of the command of every member.
        cause: a `FaultKind`, or `finished`.
        reason: one line.
        verdict: of that, why there was no further restart.
        step: last step that was finished; -1 for none.
        evidence: of the fault.
        member: whose worker ended it; empty where it was nobody's.
        time_secs: when, in seconds since the epoch.
    """

    exit_code: int
    cause: str
    reason: str
    verdict: str = ""
    step: int = -1
    evidence: str = ""
    member: str = ""
    time_secs: float = 0.0


def newest_of(names: Iterable[str]) -> int:
    """The number of the newest generation among files; 0 for none."""
    matches = (_NAME.fullmatch(name) for name in names)
    return max((int(match[1]) for match in matches if match), default=0)


class Generations:
    """The files of one workdir.

    Args:
        workdir: of the job; the folder is made with the first file.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self.folder = pathlib.Path(workdir) / FOLDER

    def newest_number(self) -> int:
        """The number of the newest one; 0 where there was none yet.

        Raises:
            OSError: the folder cannot be read.
        """
        return newest_of(self.list())

    def list(self) -> set[str]:
        """The names of all files; one question to the storage for all that is new.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()

    def read(self, number: int) -> Generation | None:
        """Generation `number`; None where it is not there, or cannot be understood."""
        data = self._read(f"{number}.json")
        try:
            members = tuple(Seat(**seat) for seat in data.pop("members"))
            cache = CacheMode(data.pop("cache"))
            return Generation(members=members, cache=cache, **data)
        except (KeyError, TypeError, ValueError):
            return None

    def newest(self) -> Generation | None:
        """The newest one."""
        number = self.newest_number()
        return self.read(number) if number else None

    def propose(self, generation: Generation) -> bool:
        """Begins a generation; False where somebody was faster.

        Raises:
            OSError: the file cannot be written.
        """
        return self._write(f"{generation.number}.json", dataclasses.asdict(generation))

    def write_down(self, number: int, down: Down) -> bool:
        """Says how this member's worker ended.

        Raises:
            OSError: the file cannot be written.
        """
        name = f"{number}.down.{down.member}.json"
        return self._write(name, dataclasses.asdict(down))

    def downs(self, generation: Generation) -> dict[str, Down]:
        """Name -> how its worker ended, of those that have ended."""
        found = {}
        for seat in generation.members:
            data = self._read(f"{generation.number}.down.{seat.name}.json")
            with contextlib.suppress(KeyError, TypeError, ValueError):
                found[seat.name] = Down(ended=_exit(data.pop("ended")), **data)
        return found

    def ask_to_regroup(self, number: int, *, returned: Sequence[str]) -> bool:
        """Wants all workers to save and stop, for `returned` came back.

        Raises:
            OSError: the file cannot be written.
        """
        return self._write(f"{number}.regroup.json", {"returned": returned})

    def returned(self, number: int) -> tuple[str, ...]:
        """Who came back, where the generation shall stop for it; else nobody."""
        return tuple(self._read(f"{number}.regroup.json").get("returned", ()))

    def write_end(self, number: int, end: End) -> bool:
        """Ends the job after generation `number`; False where it has ended.

        Raises:
            OSError: the file cannot be written.
        """
        return self._write(f"{number}.end.json", dataclasses.asdict(end))

    def end(self, number: int) -> End | None:
        """Why nothing followed generation `number`; None where something may."""
        data = self._read(f"{number}.end.json")
        try:
            return End(**data)
        except TypeError:
            return None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _write(self, name: str, content: Mapping[str, Any]) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        body = json.dumps(content).encode() + b"\n"
        try:
            # Of two who try at the same moment one must fail, whatever the file
            # system; readers take a file that is not whole yet for none.
            durable.write_once(self.folder / name, body, whole=False)
        except FileExistsError:
            return False
        return True


class Fence:
    """Whether a worker may still write for its job.

    Args:
        workdir: of the job.
        generation: of the worker; 0 for one that is in none and is never fenced off.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, generation: int):
        self._folder = pathlib.Path(workdir) / FOLDER
        self._generation = generation

    def __call__(self) -> str:
        """Why it may not, in one line; empty while it may.

        Raises:
            OSError: the files cannot be looked at.
        """
        if not self._generation:
            return ""
        newest = Generations(self._folder.parent).newest_number()
        if newest <= self._generation:
            return ""
        return (
            f"generation {newest} of the job has begun: this worker is of generation "
            f"{self._generation} and writes no more"
        )


def _exit(data: dict[str, Any]) -> WorkerExit:
    kind = data.pop("kind")
    cache = CacheMode(data.pop("cache"))
    return WorkerExit(
        kind=None if kind is None else FaultKind(kind), cache=cache, **data
    )
