"""Generations as files: whole, once, and who may still write."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading

import pytest

from jaxft.records import FaultKind
from jaxft.recovery.generations import (
    Down,
    End,
    Fence,
    Generation,
    Generations,
    Seat,
)
from jaxft.recovery.policy import CacheMode, WorkerExit

SEATS = tuple(Seat(name=f"process-{i}", incarnation=f"run{i}") for i in range(3))


def generation(number=1, **changes):
    fields = {
        "number": number,
        "members": SEATS,
        "coordinator": "127.0.0.1:6000",
        "attempt": number - 1,
        "num_configured": 3,
    }
    return Generation(**fields | changes)


def test_what_is_written_is_read(tmp_path):
    files = Generations(tmp_path)
    assert files.newest() is None
    assert files.newest_number() == 0
    first = generation(cache=CacheMode.OFF, committed_step=7, reason="a", time_secs=1.5)
    assert files.propose(first)
    assert files.newest() == first
    assert [first.rank(seat) for seat in SEATS] == [0, 1, 2]
    assert first.rank(dataclasses.replace(SEATS[0], incarnation="other")) == -1
    for number in range(2, 12):  # By number, not by name.
        assert files.propose(generation(number))
    assert files.newest_number() == 11
    assert files.read(1) == first


def test_of_two_proposals_one_counts(tmp_path):
    files = Generations(tmp_path)
    barrier = threading.Barrier(8)
    won = []

    def propose(index):
        barrier.wait()
        if files.propose(generation(reason=f"by {index}")):
            won.append(index)

    threads = [threading.Thread(target=propose, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.newest().reason == f"by {won[0]}"
    assert os.listdir(files.folder) == ["1.json"]


def test_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    files = Generations(tmp_path)
    assert files.propose(generation())
    assert not files.propose(generation(reason="later"))
    assert files.newest() == generation()


def test_a_torn_file_is_none(tmp_path):
    files = Generations(tmp_path)
    files.propose(generation())
    (files.folder / "2.json").write_text('{"number": 2, "mem')
    assert files.newest_number() == 2
    assert files.newest() is None
    (files.folder / "1.down.process-1.json").write_text("[]")
    (files.folder / "1.end.json").write_text('{"exit_code": 0}')
    assert files.downs(generation()) == {}
    assert files.end(1) is None


def test_downs_and_the_end(tmp_path):
    files = Generations(tmp_path)
    assert files.propose(generation())
    ended = WorkerExit(kind=FaultKind.HANG, status=-9, last_step=4, evidence="e")
    done = WorkerExit(kind=None, status=0, cache=CacheMode.FRESH)
    first = Down(member="process-1", ended=ended, called_off=True, time_secs=2.0)
    assert files.write_down(1, first)
    assert not files.write_down(1, dataclasses.replace(first, time_secs=9.0))
    assert files.write_down(1, Down(member="process-0", ended=done))
    downs = files.downs(generation())
    assert downs["process-1"] == first
    assert downs["process-0"].ended == done
    end = End(exit_code=70, cause="killed", reason="r", member="process-1")
    assert files.write_end(1, end)
    assert not files.write_end(1, end)
    assert files.end(1) == end
    assert files.end(2) is None
    assert files.returned(1) == ()
    assert files.ask_to_regroup(1, returned=["process-2"])
    assert files.returned(1) == ("process-2",)


def test_a_worker_of_an_older_generation_may_not_write(tmp_path):
    files = Generations(tmp_path)
    assert Fence(tmp_path, generation=1)() == ""  # Before any is there.
    files.propose(generation(1))
    mine = Fence(tmp_path, generation=1)
    assert mine() == ""
    files.propose(generation(2))
    assert "generation 2 of the job has begun" in mine()
    assert Fence(tmp_path, generation=2)() == ""
    assert Fence(tmp_path, generation=0)() == ""


def test_who_cannot_look_may_not_write(tmp_path):
    (tmp_path / "generations").write_text("in the way")
    with pytest.raises(NotADirectoryError):
        Fence(tmp_path, generation=1)()
