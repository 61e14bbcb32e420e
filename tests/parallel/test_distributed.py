"""The door to JAX's processes: what one process can be asked, and two real ones."""

import json
import os

import jax
import pytest

from jaxft.config import ConfigError
from jaxft.parallel import distributed
from jaxft.records import ALONE, Fault, FaultError, FaultKind, JobPlace

SECOND = JobPlace(process_index=1, num_processes=2, coordinator="127.0.0.1:1")


def test_private_names_are_where_they_were():
    """What `jaxft/parallel/distributed.py` takes of JAX, all of it."""
    assert distributed.jax_distributed.global_state.client is None
    client = distributed.jax_distributed._jax.DistributedRuntimeClient
    assert callable(client.key_value_set)
    assert "allow_overwrite" in client.key_value_set.__doc__
    assert callable(client.key_value_dir_get)


def test_alone_nobody_is_waited_for():
    job = distributed.connect(ALONE, collective_secs=1.0)
    job.meet("the first step", deadline_secs=0.0)
    job.listen(lambda end: pytest.fail("there is nobody"))
    job.tell_end(Fault(kind=FaultKind.STOPPED))
    assert job.first_end() is None
    assert job.explain(ValueError("Gloo all-reduce failed")) is None
    assert job.leave(0.0)
    job.stop_listening()
    assert distributed.jax_distributed.global_state.client is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("exception", FaultKind.PEER_LOST), ("stopped", FaultKind.STOPPED)],
)
def test_the_end_of_another_is_a_stop_or_a_loss(kind, expected):
    end = distributed.PeerEnd(process=3, kind=kind, text="it said so", step=7)
    fault = distributed.lost_by(end, SECOND)
    assert (fault.kind, fault.process, fault.step) == (expected, 1, 7)
    assert fault.evidence == f"process 3 has ended ({kind}): it said so"


def test_what_ends_all_is_the_same_fault_in_all():
    end = distributed.PeerEnd(process=3, kind="save_failed", text="disk full", step=7)
    fault = distributed.lost_by(end, SECOND)
    assert (fault.kind, fault.process) == (FaultKind.SAVE_FAILED, 3)
    assert (fault.step, fault.evidence) == (7, "disk full")


def joined(notes):
    """A job whose notes are here and not with process 0."""
    job = distributed.Job(SECOND)
    job._is_joined = True
    job._get = lambda folder: [(k, v) for k, v in notes.items() if folder in k]
    return job


GLOO = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ValueError(GLOO), True),
        (jax.errors.JaxRuntimeError(GLOO), True),
        (ValueError("Timed out waiting 4000ms for recv operation"), True),
        (ValueError("shapes (3,) and (4,) do not match"), False),
        (KeyError("peer"), False),
        (ConfigError("mesh", "peer"), False),
        (FaultError(Fault(kind=FaultKind.SAVE_FAILED)), False),
    ],
)
def test_what_a_collective_raises_is_a_lost_peer(error, is_lost):
    fault = joined({}).explain(error)
    assert (fault is not None) == is_lost
    if fault is not None:
        assert (fault.kind, fault.process) == (FaultKind.PEER_LOST, 1)


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (ValueError(GLOO), True),
        (jax.errors.JaxRuntimeError("... the coordination service agent ..."), True),
        (ValueError("UNAVAILABLE: storage: connection reset by peer"), False),
        (OSError(GLOO), False),
    ],
)
def test_what_a_storage_says_is_no_lost_peer(error, is_so):
    assert distributed.is_of_peers(error) == is_so


def test_who_left_word_is_named_whatever_is_raised():
    note = {"process": 0, "kind": "exception", "text": "boom", "step": 4}
    mine = {"process": 1, "kind": "exception", "text": "mine", "step": 4}
    notes = {"jaxft/end/1": json.dumps(mine), "jaxft/end/0": json.dumps(note)}
    fault = joined(notes).explain(RuntimeError("whatever"))
    assert fault.evidence == "process 0 has ended (exception): boom"
    assert joined({"jaxft/end/1": json.dumps(mine)}).explain(OSError("x")) is None


def test_a_wait_names_the_absent_and_ends():
    now = [0.0]
    told = []

    def sleep(secs):
        now[0] += secs

    job = distributed.Job(
        JobPlace(process_index=1, num_processes=3, coordinator="h:1"),
        emit=lambda kind, **fields: told.append((kind, fields["absent"])),
        clock=lambda: now[0],
        sleep=sleep,
    )
    job._is_joined = True
    notes = {}
    job._set = notes.__setitem__
    job._get = lambda folder: [(k, v) for k, v in notes.items() if folder in k]
    with pytest.raises(
        FaultError, match=r"waited 2\d\.\d s .* processes 0, 2 did"
    ) as caught:
        job.meet("the first step", deadline_secs=20.0)
    assert caught.value.fault.kind is FaultKind.PEER_LOST
    assert told == [("peer_wait", [0, 2])] * 2
    notes["jaxft/meet/the first step/2/0"] = notes["jaxft/meet/the first step/2/2"] = ""
    job.meet("the first step", deadline_secs=20.0)


def test_the_limit_of_collectives_is_one_flag_of_the_cpu(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    distributed._bound_collectives(12.2)
    flags = os.environ["XLA_FLAGS"]
    assert flags.split()[1] == "--xla_cpu_collective_timeout_seconds=13"
    distributed._bound_collectives(99.0)
    assert os.environ["XLA_FLAGS"] == flags  # The user's own stays.


PROGRAM = """
import sys
from jaxft.config import DistributedConfig
from jaxft.parallel import distributed
from jaxft.records import Fault, FaultError, FaultKind, JobPlace

index = int(sys.argv[2])
place = JobPlace(process_index=index, num_processes=2, coordinator=sys.argv[1])
job = distributed.connect(place, DistributedConfig(), collective_secs=60.0)
import jax
assert (jax.process_count(), jax.process_index()) == (2, index)
job.meet("a", deadline_secs=60.0)
heard = []
job.listen(heard.append)
try:
    job.meet("b", deadline_secs=0.5) if index == 0 else None
except FaultError as error:
    print(error)
job.meet("c", deadline_secs=60.0)
job.tell_end(Fault(kind=FaultKind.EXCEPTION, evidence=f"word of {index}", step=3))
job._thread.join()
print(heard[0].text)
"""


@pytest.mark.multiprocess
def test_two_processes_meet_and_hear_of_each_others_end(run_processes):
    (first, _), (second, _) = run_processes(PROGRAM)
    lines = [line for line in first.splitlines() if "Gloo" not in line]
    assert "at b: process 1 did not come" in lines[0]
    assert lines[1:] == ["word of 1"]
    lines = [line for line in second.splitlines() if "Gloo" not in line]
    assert lines == ["word of 0"]
