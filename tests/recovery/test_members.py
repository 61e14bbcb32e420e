"""Who is alive, by a clock of its own."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxft.recovery.generations import Seat
from jaxft.recovery.members import Life, Members

NAMES = ["process-0", "process-1"]


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self, secs=0.0):
        self.secs = secs

    def __call__(self):
        return self.secs


@pytest.fixture
def clock():
    return Clock()


def member(tmp_path, index, clock, incarnation="a"):
    seat = Seat(name=NAMES[index], incarnation=incarnation)
    return Members(tmp_path, seat, lost_secs=10.0, clock=clock)


def test_a_beat_a_second(tmp_path, clock):
    one = member(tmp_path, 0, clock)
    path = one.folder / "process-0.json"
    serials = []
    for clock.secs in (0.0, 0.5, 0.9, 1.0, 1.5, 2.1):
        one.beat()
        serials.append(json.loads(path.read_text())["serial"])
    assert serials == [1, 1, 1, 2, 2, 3]
    assert [entry.name for entry in one.folder.iterdir()] == ["process-0.json"]


def test_alive_once_it_is_seen_to_change(tmp_path, clock):
    me, other = member(tmp_path, 0, clock), member(tmp_path, 1, Clock(1e6))
    assert list(me.look(NAMES)) == ["process-0"]
    other.beat()
    assert me.look(NAMES)["process-1"].life is Life.UNKNOWN
    clock.secs = 9.0
    assert me.look(NAMES)["process-1"].life is Life.UNKNOWN
    other._clock.secs += 1
    other.beat()
    sight = me.look(NAMES)["process-1"]
    assert sight.life is Life.ALIVE
    assert sight.silent_secs == 0.0
    assert sight.seat == other.seat
    clock.secs = 18.9
    assert me.look(NAMES)["process-1"].life is Life.ALIVE
    clock.secs = 19.0
    assert me.look(NAMES)["process-1"].life is Life.SILENT
    other._clock.secs += 1
    other.beat()
    assert me.look(NAMES)["process-1"].life is Life.ALIVE


def test_what_a_dead_one_left_is_never_alive(tmp_path, clock):
    other = member(tmp_path, 1, clock)
    other.beat()
    me = member(tmp_path, 0, clock)
    lives = []
    for clock.secs in (0.0, 5.0, 10.0, 100.0):
        lives.append(me.look(NAMES)["process-1"].life)
    assert lives == [Life.UNKNOWN, Life.UNKNOWN, Life.SILENT, Life.SILENT]
    again = member(tmp_path, 1, clock, incarnation="b")
    again.beat()
    sight = me.look(NAMES)["process-1"]
    assert sight.life is Life.ALIVE
    assert sight.seat.incarnation == "b"


def test_who_leaves_says_so(tmp_path, clock):
    me, other = member(tmp_path, 0, clock), member(tmp_path, 1, clock)
    other.beat()
    me.look(NAMES)
    other.leave()
    assert me.look(NAMES)["process-1"].life is Life.LEFT


def test_a_folder_that_is_away_is_silence(tmp_path, clock):
    me, other = member(tmp_path, 0, clock), member(tmp_path, 1, clock)
    for clock.secs in (0.0, 1.0):
        other.beat()
        me.look(NAMES)
    shutil.rmtree(me.folder)
    clock.secs = 5.0
    assert me.look(NAMES)["process-1"].life is Life.ALIVE
    clock.secs = 11.0
    assert me.look(NAMES)["process-1"].life is Life.SILENT
    (tmp_path / "members").write_text("in the way")
    me.beat()  # It is borne.
    assert me.look(NAMES)["process-0"].life is Life.ALIVE
