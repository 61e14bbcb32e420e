"""Two real processes train as one: the same bits, the same stops."""

import signal

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]
SLOW = pytest.mark.slow


def test_two_processes_are_two_devices_and_stop_together(job):
    """The reference is one process with two devices; the run is stopped once."""
    alone = job("alone")
    assert [r.code for r in alone.run(1, devices=2)] == [0]
    two = job("two", train__num_steps=30)
    two.start(2)
    two.wait_for_step(12)
    two.processes[1].send_signal(signal.SIGTERM)
    assert [r.code for r in two.finish()] == [75, 75]
    ends = two.events("end")
    assert len(ends) == 2
    (step,) = {end["step"] for end in ends}
    assert two.steps()[-1] == step
    reasons = [
        e["reason"] for i in (0, 1) for e in two.events("stop_request", process=i)
    ]
    assert reasons == ["a request to another process", "SIGTERM"]

    if step < 30:
        assert [r.code for r in two.run(2)] == [0, 0]
        assert [e["step"] for e in two.events("restore")] == [step, step]
    assert two.fingerprints(30) == alone.fingerprints(30)
    assert two.losses() == alone.losses()
    assert sorted(two.losses()) == list(range(1, 31))
