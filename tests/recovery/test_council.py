"""What members conclude from what they see."""

from __future__ import annotations

import dataclasses

import pytest

from jaxft.records import FaultKind
from jaxft.recovery.council import (
    Beginnings,
    Lookout,
    assess,
    first_cause,
    history,
    member_name,
    next_generation,
)
from jaxft.recovery.generations import Down, End, Generation, Generations, Seat
from jaxft.recovery.members import Life, Members, Sight
from jaxft.recovery.policy import CacheMode, WorkerExit

NAMES = [member_name(i) for i in range(4)]
SEATS = [Seat(name=name, incarnation="a") for name in NAMES]


def generation(number=1, seats=SEATS, **changes):
    fields = {
        "number": number,
        "members": tuple(seats),
        "coordinator": "127.0.0.1:6000",
        "attempt": number - 1,
        "num_configured": 4,
    }
    return Generation(**fields | changes)


def ended(kind, **fields):
    return WorkerExit(kind=kind, status=-9, **fields)


ABORTED = WorkerExit(kind=FaultKind.KILLED, status=-6, evidence="killed by SIGABRT")


def down(index, kind, secs=0.0, **fields):
    named = {"called_off", "stop_reason"} & fields.keys()
    own = {name: fields.pop(name) for name in named}
    end = ended(kind, **fields)
    return Down(member=NAMES[index], ended=end, time_secs=secs, **own)


def sights(*lives, incarnations="aaaa"):
    return {
        name: Sight(seat=Seat(name=name, incarnation=letter), life=life)
        for name, life, letter in zip(NAMES, lives, incarnations, strict=False)
        if life is not None
    }


ALIVE, SILENT, UNKNOWN, LEFT = Life.ALIVE, Life.SILENT, Life.UNKNOWN, Life.LEFT


def test_the_first_start():
    seen = assess(NAMES, newest=None, downs={}, sights=sights(ALIVE, None, UNKNOWN))
    assert seen.ready == ("process-0",)
    assert seen.unsure == ("process-2",)
    assert seen.absent == ("process-1", "process-3")
    assert not seen.busy
    assert not seen.survives


def test_between_two_generations():
    downs = {NAMES[1]: down(1, FaultKind.KILLED)}
    lives = sights(ALIVE, ALIVE, SILENT, ALIVE, incarnations="aaab")
    seen = assess(NAMES, newest=generation(), downs=downs, sights=lives)
    assert seen.busy == ("process-0",)
    # One that was started anew has no worker of that generation.
    assert seen.ready == ("process-1", "process-3")
    assert seen.absent == ("process-2",)
    assert seen.survives


def test_those_of_a_generation_that_was_seen_to_begin_are_no_absent_ones():
    lives = sights(ALIVE, SILENT, LEFT, UNKNOWN)
    others = generation(2, SEATS[1:])
    given = {"newest": others, "downs": {}, "sights": lives}
    seen = assess(NAMES, **given, has_just_begun=True)
    assert (seen.ready, seen.busy) == (("process-0",), ("process-1",))
    assert (seen.unsure, seen.absent) == (("process-3",), ("process-2",))
    assert assess(NAMES, **given).absent == ("process-1", "process-2")


def test_what_begins_without_one_is_left_alone_for_a_while():
    now = [0.0]
    beginnings = Beginnings(10.0, clock=lambda: now[0])
    # What was there before may be long over.
    assert beginnings.look(3, is_in_it=False)
    assert not beginnings.look(3, is_in_it=False)
    assert not beginnings.has_just_begun
    assert beginnings.look(4, is_in_it=True)
    assert not beginnings.has_just_begun
    assert beginnings.look(5, is_in_it=False)
    now[0] = 39.0
    assert beginnings.has_just_begun
    now[0] = 41.0
    assert not beginnings.has_just_begun


def test_after_the_end_who_was_in_it_leaves():
    downs = {name: down(i, None) for i, name in enumerate(NAMES)}
    lives = sights(ALIVE, ALIVE, LEFT, SILENT, incarnations="baaa")
    seen = assess(NAMES, newest=generation(), downs=downs, sights=lives, has_ended=True)
    assert seen.ready == ("process-0",)
    assert seen.busy == ("process-1",)
    assert not seen.survives


@pytest.mark.parametrize(
    ("downs", "kind", "whose"),
    [
        # Process 0 is through: the last step is committed.
        ([down(0, None), down(1, FaultKind.KILLED)], None, 0),
        # What others met because of it comes second, whatever their clocks say.
        ([down(0, FaultKind.PEER_LOST, 1.0), down(1, FaultKind.KILLED, 2.0)], "k", 1),
        ([down(2, FaultKind.HANG, 3.0), down(1, FaultKind.KILLED, 2.0)], "k", 1),
        (
            [
                down(0, FaultKind.KILLED, 1.0, called_off=True),
                down(1, FaultKind.KILLED, 2.0),
            ],
            "k",
            1,
        ),
        ([down(0, FaultKind.STOPPED), down(1, FaultKind.STOPPED)], "s", 0),
        ([down(0, FaultKind.STOPPED), down(1, FaultKind.PEER_LOST)], "p", 1),
        # Process 1 was through, but did not commit.
        ([down(0, FaultKind.KILLED, called_off=True), down(1, None)], "p", 1),
    ],
)
def test_the_first_cause_counts(downs, kind, whose):
    kinds = {
        "k": FaultKind.KILLED,
        "s": FaultKind.STOPPED,
        "p": FaultKind.PEER_LOST,
    }
    seats = SEATS[: 1 + max(NAMES.index(one.member) for one in downs)]
    told = {one.member: one for one in downs}
    full = {seat.name: told[seat.name] for seat in seats if seat.name in told}
    if len(full) < len(seats):  # The others are down as well, by consequence.
        for seat in seats:
            index = NAMES.index(seat.name)
            called_off = down(index, FaultKind.PEER_LOST, called_off=True)
            full.setdefault(seat.name, called_off)
    cause, member = first_cause(generation(seats=seats), full)
    assert cause.kind == (None if kind is None else kinds[kind])
    assert member == NAMES[whose]


def test_who_never_said_how_it_ended_is_the_cause():
    downs = {
        NAMES[0]: down(0, FaultKind.PEER_LOST, last_step=7, reached_first_step=True),
        NAMES[1]: down(1, FaultKind.PEER_LOST, last_step=8, committed_step=5),
    }
    cause, member = first_cause(generation(seats=SEATS[:3]), downs)
    assert cause.kind is FaultKind.PEER_LOST
    assert member == NAMES[2]
    assert "process-2 ended together with its supervisor" in cause.evidence
    assert (cause.last_step, cause.committed_step) == (8, 5)
    assert cause.reached_first_step


def test_an_abort_is_a_cause_only_where_there_is_no_other():
    aborted = dataclasses.replace(down(1, FaultKind.KILLED, 1.0), ended=ABORTED)
    killed = down(0, FaultKind.KILLED, 2.0, evidence="killed by SIGKILL")
    lost = down(0, FaultKind.PEER_LOST, 0.5)
    pair = generation(seats=SEATS[:2])

    def cause(*downs):
        return first_cause(pair, {one.member: one for one in downs})

    assert cause(aborted, killed) == (killed.ended, NAMES[0])
    gone, member = cause(aborted)
    assert (gone.kind, member) == (FaultKind.PEER_LOST, NAMES[0])
    assert "process-0 ended together with its supervisor" in gone.evidence
    assert cause(aborted, lost) == (ABORTED, NAMES[1])


def test_history_is_that_of_this_start(tmp_path):
    files = Generations(tmp_path)
    files.propose(generation(1, attempt=0))
    files.write_down(1, down(0, FaultKind.NONFINITE))
    for number, kind in ((2, "killed"), (3, "stopped"), (4, "hang")):
        files.propose(generation(number, SEATS[:2], attempt=number - 2))
        for index in (0, 1):
            files.write_down(number, down(index, FaultKind(kind), last_step=number))
    files.ask_to_regroup(3, returned=[NAMES[2]])
    kinds = [end.kind for end in history(files, files.newest())]
    assert kinds == [FaultKind.KILLED, FaultKind.HANG]


def test_the_next_generation():
    lives = sights(None, ALIVE, SILENT, ALIVE, incarnations="aaab")
    more = {
        "num_configured": 4,
        "committed_step": 3,
        "cache": CacheMode.OFF,
        "coordinator": "h:1",
        "reason": "r",
        "time_secs": 1.0,
    }
    ready = [NAMES[1], NAMES[3]]
    after = next_generation(generation(6), ready, lives, survives=True, **more)
    assert (after.number, after.attempt, after.proposer) == (7, 6, "process-1")
    assert [seat.incarnation for seat in after.members] == ["a", "b"]
    anew = next_generation(generation(6), ready, lives, survives=False, **more)
    assert (anew.number, anew.attempt) == (7, 0)
    assert next_generation(None, ready, lives, survives=False, **more).number == 1


class Clock:
    """A clock that goes when it is told to."""

    secs = 0.0

    def __call__(self):
        return self.secs


class Watch:
    """A member that looks, and another one to be looked at."""

    def __init__(self, tmp_path, seats):
        self.clock = Clock()
        self.files = Generations(tmp_path)
        self.me = Members(tmp_path, seats[0], lost_secs=10.0, clock=self.clock)
        self.other = Members(tmp_path, seats[1], lost_secs=10.0, clock=self.clock)
        mine = generation(seats=seats)
        self.files.propose(mine)
        self.lookout = Lookout(self.files, self.me, mine, clock=self.clock)
        for secs in (0.0, 1.0):
            self.at(secs)
            assert self.lookout.look(1) is None

    def at(self, secs, *, beats=True):
        self.clock.secs = secs
        if beats:
            self.other.beat()


@pytest.fixture
def watch(tmp_path):
    return Watch(tmp_path, SEATS[:2])


def test_a_worker_is_called_off_when_another_is_down(watch):
    watch.files.write_down(1, down(1, FaultKind.KILLED, evidence="killed by SIGKILL"))
    call = watch.lookout.look(1)
    assert call.at_once
    assert call.member == "process-1"
    assert "process-1 is down" in call.reason
    assert "SIGKILL" in call.reason


@pytest.mark.parametrize("kind", [None, FaultKind.STOPPED])
def test_after_one_that_is_through_there_is_time(watch, kind):
    watch.files.write_down(1, down(1, kind))
    call = watch.lookout.look(1)
    assert not call.at_once
    assert call.member == "process-1"


def test_silence_counts_once_steps_have_ended(watch):
    for secs, step in ((8.0, 5), (12.0, 9), (16.0, 12)):
        watch.at(secs, beats=False)
        assert watch.lookout.look(step) is None  # It steps: they are all there.
    watch.at(25.5, beats=False)
    assert watch.lookout.look(12) is None
    watch.at(26.0, beats=False)
    assert "process-1 is silent for 25 s" in watch.lookout.look(12).reason


def test_one_that_was_started_anew_has_no_worker(watch, tmp_path):
    seat = Seat(name=NAMES[1], incarnation="b")
    Members(tmp_path, seat, lost_secs=10.0, clock=watch.clock).beat()
    watch.at(2.0, beats=False)
    assert "was started anew" in watch.lookout.look(1).reason


def test_one_that_left_without_a_word(watch):
    watch.other.leave()
    watch.at(2.0, beats=False)
    assert "has left" in watch.lookout.look(1).reason


def test_a_newer_generation_and_the_end(watch):
    watch.files.write_end(1, End(exit_code=0, cause="finished", reason="finished"))
    assert "the job has ended: finished" in watch.lookout.look(1).reason
    watch.files.propose(generation(2))
    assert "generation 2 has begun without it" in watch.lookout.look(1).reason


def test_members_that_came_back(watch, tmp_path):
    assert watch.lookout.returned() == []
    third = Members(tmp_path, SEATS[2], lost_secs=10.0, clock=watch.clock)
    third.beat()
    assert watch.lookout.returned() == []  # It may be an old file.
    watch.at(2.0)
    third.beat()
    assert watch.lookout.returned() == ["process-2"]
