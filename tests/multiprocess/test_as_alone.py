"""What a run does besides steps, done by two processes: as one with two devices."""

import signal
import time

import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_a_rollback_is_one_for_all(job):
    bad = {
        "train__max_nonfinite": 3,
        "rollback__skip_after": 4,
        "faults__inject": "nan_grad@15-17",
    }
    alone, two = job("alone", **bad), job("two", **bad)
    assert [r.code for r in alone.run(1, devices=2)] == [0]
    assert [r.code for r in two.run(2)] == [0, 0]
    (expected,) = alone.events("rollback")
    assert expected["step"] == 10
    told = [e for i in (0, 1) for e in two.events("rollback", process=i)]
    assert {(e["step"], e["timeline"]) for e in told} == {(10, expected["timeline"])}
    for index in (0, 1):
        steps = [e["step"] for e in two.events("step", process=index)]
        assert steps == [e["step"] for e in alone.events("step")]
    assert two.fingerprints(30) == alone.fingerprints(30)


@pytest.mark.parametrize("policy", ["secs(0.5)", "auto"])
def test_the_clock_of_one_process_says_when_both_save(job, policy):
    clock = {"checkpoint__save": policy, "checkpoint__expected_failure_hours": 0.001}
    alone = job("alone", train__num_steps=300)
    two = job("two", train__num_steps=300, **clock)
    assert [r.code for r in alone.run(1, devices=2)] == [0]
    assert [r.code for r in two.run(2)] == [0, 0]
    first, second = (
        [e["step"] for e in two.events("save_start", process=i)] for i in (0, 1)
    )
    assert first == second
    assert len(first) > 1
    assert first[-1] == 300
    assert two.fingerprints(300) == alone.fingerprints(300)


def test_an_evaluation_gives_the_same_in_all(job):
    alone = job("alone", eval__every_steps=10)
    two = job("two", eval__every_steps=10)
    assert [r.code for r in alone.run(1, devices=2)] == [0]
    assert [r.code for r in two.run(2)] == [0, 0]
    expected = [(e["step"], e["metrics"]) for e in alone.events("evaluation")]
    assert [step for step, _ in expected] == [0, 10, 20, 30]
    for index in (0, 1):
        told = two.events("evaluation", process=index)
        assert [(e["step"], e["metrics"]) for e in told] == expected
    assert two.fingerprints(30) == alone.fingerprints(30)


def test_one_that_is_started_late_is_waited_for(job):
    two = job(train__num_steps=12)
    two.start(2, late_secs={1: 32.0})
    assert [r.code for r in two.finish()] == [0, 0]
    waits = two.events("peer_wait", process=0)
    assert ("the start", [1]) in [(e["what"], e["absent"]) for e in waits]
    assert sorted(two.losses()) == list(range(1, 13))


def test_one_that_is_late_at_the_first_step_is_waited_for(job):
    """A collective alone would wait for 30 s at most, and say nothing."""
    two = job(train__num_steps=12, hang__enabled=False)
    two.start(2)
    two.wait_for(
        lambda: [
            e
            for e in two.events("phase", process=1)
            if e["name"] in ("init", "compile")
        ]
    )
    two.processes[1].send_signal(signal.SIGSTOP)
    time.sleep(35.0)
    two.processes[1].send_signal(signal.SIGCONT)
    assert [r.code for r in two.finish()] == [0, 0]
    assert sorted(two.losses()) == list(range(1, 13))
    waits = two.events("peer_wait", process=0)
    assert [1] in [e["absent"] for e in waits]
