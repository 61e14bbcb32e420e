"""What the members of a job conclude from what they see: whose turn is what.

World: host-only. Floor: recovery. Read `jaxft/recovery/generations.py` and
`jaxft/recovery/members.py` before and `jaxft/recovery/job_supervisor.py`, which acts
on it, after this file.

There is no master. All members look at the same files and come to the same end; where
two do not, for they see different halves, a file that can be made only once decides.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Mapping, Sequence

from jaxft.records import FaultKind
from jaxft.recovery.generations import Down, Generation, Generations, newest_of
from jaxft.recovery.members import BEAT_SECS, Life, Members, Sight
from jaxft.recovery.policy import CacheMode, WorkerExit

# These come of somebody's end and are no cause of their own.
_CONSEQUENCES = (FaultKind.PEER_LOST, FaultKind.STOPPED, None)
# In times of the silence after which a member is lost: it must come as far as a save.
_LEAVE_ALONE = 4.0


def member_name(index: int) -> str:
    """What process `index` is called, whenever and wherever it is started."""
    return f"process-{index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the job stands between two generations, seen from one member.

    Attributes:
        ready: names of those that can be in the next one, by process index.
        busy: names of those whose worker of the newest one is not known to be down.
        unsure: names of those of which it is not known whether they live.
        absent: names of the rest.
        survives: a member of the newest generation is still there.
    """

    ready: tuple[str, ...]
    busy: tuple[str, ...]
    unsure: tuple[str, ...]
    absent: tuple[str, ...]
    survives: bool


def assess(
    names: Sequence[str],
    *,
    newest: Generation | None,
    downs: Mapping[str, Down],
    sights: Mapping[str, Sight],
    has_ended: bool = False,
    has_just_begun: bool = False,
) -> Standing:
    """Sorts the members of a job.

    Args:
        names: of all that the job is meant to have, by process index.
        newest: the newest generation.
        downs: of it.
        sights: of the members, where there is any.
        has_ended: nothing follows the newest one; who was in it leaves.
        has_just_begun: the newest one was seen to begin: so its members lived, whatever
            is seen of them. Else two halves that do not see each other would begin
            one after the other, and none of them would come far.
    """
    ready, busy, unsure, absent = [], [], [], []
    survives = False
    for name in names:
        sight = sights.get(name)
        life = Life.LEFT if sight is None else sight.life
        is_in_it = sight is not None and newest is not None and sight.seat in newest
        if life is Life.SILENT and is_in_it and has_just_begun and name not in downs:
            busy.append(name)
        elif life is Life.UNKNOWN:
            unsure.append(name)
        elif life is not Life.ALIVE:
            absent.append(name)
        elif is_in_it and (has_ended or name not in downs):
            busy.append(name)
        else:
            ready.append(name)
        survives |= is_in_it and life in (Life.ALIVE, Life.UNKNOWN) and not has_ended
    return Standing(
        ready=tuple(ready),
        busy=tuple(busy),
        unsure=tuple(unsure),
        absent=tuple(absent),
        survives=survives,
    )


class Beginnings:
    """Which generations of others were seen to begin: they are left alone for a while.

    Args:
        lost_secs: silence after which a member is lost.
        clock: seconds, never backwards.
    """

    def __init__(self, lost_secs: float, *, clock: Callable[[], float]):
        self._secs = _LEAVE_ALONE * lost_secs
        self._clock = clock
        self._number: int | None = None
        self._until = -math.inf

    def look(self, number: int, *, is_in_it: bool) -> bool:
        """Whether the newest generation is another one than at the last look.

        Args:
            number: of the newest one; 0 for none.
            is_in_it: this member is in it.
        """
        is_first, is_new = self._number is None, number != self._number
        if is_new and not is_first and not is_in_it:
            self._until = self._clock() + self._secs
        self._number = number
        return is_new

    @property
    def has_just_begun(self) -> bool:
        """Whether the newest one shall be left alone."""
        return self._clock() < self._until


def first_cause(
    generation: Generation, downs: Mapping[str, Down]
) -> tuple[WorkerExit, str]:
    """How a generation ended, as if it had been one worker, and whose end began it.

    Raw ends vary: who waits for a dead process may end in many ways. What counts is
    the first end that had a cause of its own; who never said how it ended is gone
    with its supervisor.
    """
    order = {seat.name: rank for rank, seat in enumerate(generation.members)}
    first = downs.get(generation.members[0].name)
    if first is not None and first.ended.kind is None:
        # The last step is committed, however the others left.
        return _merged(first.ended, downs), first.member
    own = [down for down in downs.values() if not down.called_off]
    causes = [down for down in own if down.ended.kind not in _CONSEQUENCES]
    gone = [name for name in order if name not in downs]
    firm = [down for down in causes if not _was_aborted(down.ended)]
    if causes := firm or ([] if gone else causes):
        cause = min(causes, key=lambda down: (down.time_secs, order[down.member]))
        return _merged(cause.ended, downs), cause.member
    if gone:
        ended = WorkerExit(
            kind=FaultKind.PEER_LOST,
            status=1,
            evidence=f"{', '.join(gone)} ended together with its supervisor",
            cache=generation.cache,
        )
        return _merged(ended, downs), gone[0]
    stops = [down for down in own if down.ended.kind is FaultKind.STOPPED]
    lost = [down for down in own if down.ended.kind is FaultKind.PEER_LOST]
    chosen = lost or stops or own or list(downs.values())
    cause = min(chosen, key=lambda down: (down.time_secs, order[down.member]))
    if cause.ended.kind is None:
        # It was through, and process 0, which commits, was not.
        ended = dataclasses.replace(cause.ended, kind=FaultKind.PEER_LOST)
        return _merged(ended, downs), cause.member
    return _merged(cause.ended, downs), cause.member


def history(generations: Generations, newest: Generation) -> list[WorkerExit]:
    """How each generation since the start of the command ended, the newest last.

    Those that were ended for a member that came back are no failures and not in it.
    """
    found = []
    for number in range(newest.number - newest.attempt, newest.number + 1):
        generation = newest if number == newest.number else generations.read(number)
        if generation is None:
            continue
        ended, _ = first_cause(generation, generations.downs(generation))
        is_regroup = generations.returned(number) and ended.kind is FaultKind.STOPPED
        if not is_regroup:
            found.append(ended)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOff:
    """Why the worker of a member must not go on.

    Attributes:
        reason: one line.
        member: whose end or silence it is.
        at_once: else it is given the time to end by itself.
    """

    reason: str
    member: str = ""
    at_once: bool = True


class Lookout:
    """Looks, while a generation runs, for what ends it.

    Args:
        generations: the files of the job.
        members: the same job's members.
        generation: the one that runs.
        clock: seconds, never backwards.
    """

    def __init__(
        self,
        generations: Generations,
        members: Members,
        generation: Generation,
        *,
        clock: Callable[[], float],
    ):
        self._generations = generations
        self._members = members
        self._generation = generation
        self._clock = clock
        self._step = -1
        self._stepped_at = self._look_at = clock()

    def look(self, step: int) -> CallOff | None:
        """Why this member's worker must not go on; None: it may.

        Args:
            step: the last one it has finished. While steps go on, all live, whatever
                the files say.

        Raises:
            OSError: the files cannot be looked at.
        """
        if step != self._step:
            self._step, self._stepped_at = step, self._clock()
        mine = self._generation
        names = self._generations.list()
        if (newest := newest_of(names)) > mine.number:
            return CallOff(reason=f"generation {newest} has begun without it")
        if f"{mine.number}.end.json" in names:
            end = self._generations.end(mine.number)
            why = "" if end is None else f": {end.reason}"
            return CallOff(reason=f"the job has ended{why}")
        downs: dict[str, Down] = {}
        if any(name.startswith(f"{mine.number}.down.") for name in names):
            downs = self._generations.downs(mine)
            downs.pop(self._members.seat.name, None)
        for name, down in downs.items():
            if down.ended.kind not in (None, FaultKind.STOPPED):
                summary = f"{name} is down: {down.ended.summary}"
                return CallOff(reason=summary, member=name)
        if (lost := self._lost(downs)) is not None:
            return lost
        if downs:
            name = next(iter(downs))
            return CallOff(reason=f"{name} has left", member=name, at_once=False)
        return None

    def _lost(self, downs: Mapping[str, Down]) -> CallOff | None:
        if self._clock() < self._look_at:
            return None
        self._look_at = self._clock() + BEAT_SECS / 2
        others = [seat.name for seat in self._generation.members]
        sights = self._members.look(others)
        stepped_secs = self._clock() - self._stepped_at
        for seat in self._generation.members:
            sight = sights.get(seat.name)
            if sight is None or seat.name in downs:
                continue
            if sight.seat != seat:
                text = f"{seat.name} was started anew: its worker is gone"
                return CallOff(reason=text, member=seat.name)
            is_silent = sight.life is Life.SILENT
            if is_silent and stepped_secs >= self._members.lost_secs:
                text = f"{seat.name} is silent for {sight.silent_secs:.0f} s"
                return CallOff(reason=text, member=seat.name)
            if sight.life is Life.LEFT:
                return CallOff(reason=f"{seat.name} has left", member=seat.name)
        return None

    def returned(self) -> list[str]:
        """Names of members that are there and not in the generation."""
        full = [member_name(i) for i in range(self._generation.num_configured)]
        inside = {seat.name for seat in self._generation.members}
        if len(inside) == len(full):
            return []
        sights = self._members.look([name for name in full if name not in inside])
        return [name for name, sight in sights.items() if sight.life is Life.ALIVE]


def next_generation(
    newest: Generation | None,
    ready: Sequence[str],
    sights: Mapping[str, Sight],
    *,
    survives: bool,
    num_configured: int,
    committed_step: int,
    cache: CacheMode,
    coordinator: str,
    reason: str,
    time_secs: float,
) -> Generation:
    """The one after `newest`, of the members `ready`, which are by process index.

    The first of them proposes it, and its worker is the coordinator.
    """
    goes_on = survives and newest is not None
    return Generation(
        number=1 if newest is None else newest.number + 1,
        members=tuple(sights[name].seat for name in ready),
        coordinator=coordinator,
        attempt=newest.attempt + 1 if goes_on else 0,
        num_configured=num_configured,
        cache=cache,
        committed_step=committed_step,
        reason=reason,
        proposer=ready[0],
        time_secs=time_secs,
    )


def _was_aborted(ended: WorkerExit) -> bool:
    """JAX does that to whoever is left when worker 0, which keeps its service, is gone.

    So it is a cause only where there is no other one.
    """
    return ended.kind is FaultKind.KILLED and ended.status == -signal.SIGABRT


def _merged(cause: WorkerExit, downs: Mapping[str, Down]) -> WorkerExit:
    ends = [cause, *(down.ended for down in downs.values())]
    firsts = [end.first_step for end in ends if end.first_step >= 0]
    last_step = max(end.last_step for end in ends)
    # The same error at the same step is looked for by the step of who raised it.
    own = cause.kind is FaultKind.EXCEPTION and cause.last_step >= 0
    return dataclasses.replace(
        cause,
        first_step=min(firsts, default=-1),
        last_step=cause.last_step if own else last_step,
        committed_step=max(end.committed_step for end in ends),
        reached_first_step=any(end.reached_first_step for end in ends),
    )
