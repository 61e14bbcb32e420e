"""One process of two ends, in every way; the other one ends too, soon, and says why."""

import resource
import signal
import time

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]
SLOW = pytest.mark.slow

# In a quiet moment it is well under two; the machine may be busy.
SOON_SECS = 15.0


def test_who_never_comes_is_named(job):
    lonely = job(distributed__start_secs=6)
    (result,) = lonely.start(2, only=[0]).finish()
    assert result.code == 69
    assert "process 1 did not come" in result.err
    # Nothing but the programs that the runner itself may have laid there.
    left = {path.name for path in lonely.workdir.glob("*")}
    assert left <= {"compile_cache"}


@SLOW
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_other(job, victim):
    two = job(train__num_steps=10_000).start(2)
    two.wait_for_step(12)
    two.wait_for(two.steps)
    killed = time.monotonic()
    two.processes[victim].send_signal(signal.SIGKILL)
    codes = [r.code for r in two.finish(timeout_secs=SOON_SECS)]
    assert time.monotonic() - killed < SOON_SECS
    assert codes[victim] == -signal.SIGKILL
    # With process 0 JAX's own service is gone, and that aborts whoever is not faster.
    expected = (69,) if victim else (69, -signal.SIGABRT)
    assert codes[1 - victim] in expected
    if codes[1 - victim] == 69:
        (fault,) = two.events("fault", process=1 - victim)
        assert fault["fault"] == "peer_lost"
        assert fault["process"] == 1 - victim
        assert fault["step"] >= 12
    # The same command goes on, from a step that both have committed.
    steps = two.steps()
    two.settings["train.num_steps"] = steps[-1] + 5
    assert [r.code for r in two.run(2)] == [0, 0]
    assert [e["step"] for e in two.events("restore")] == [steps[-1]] * 2
    two.losses()  # A step that ran twice gave the same.


@SLOW
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_in_one_process_is_named_by_the_other(job, culprit):
    two = job(faults__inject=f"raise@12 process={culprit}")
    codes = [r.code for r in two.run(2)]
    assert codes[culprit] == 70
    assert codes[1 - culprit] == 69
    (fault,) = two.events("fault", process=1 - culprit)
    assert f"process {culprit} has ended (exception): " in fault["evidence"]
    assert "InjectedError" in fault["evidence"]
    (own,) = two.events("fault", process=culprit)
    assert own["process"] == culprit
    assert abs(own["time"] - fault["time"]) < SOON_SECS


@SLOW
def test_a_save_that_fails_in_one_process_fails_in_both_by_name(job):
    two = job(train__num_steps=10_000).start(2)
    two.wait_for_step(12)
    # No file of it may grow beyond this, as with a quota.
    limit = (512, 512)
    resource.prlimit(two.processes[1].pid, resource.RLIMIT_FSIZE, limit)
    codes = [r.code for r in two.finish(timeout_secs=60)]
    assert codes == [74, 74]
    (fault,) = two.events("fault", process=0)
    assert fault["fault"] == "save_failed"
    assert "in process 1" in fault["evidence"]
    assert fault["process"] == 1


@SLOW
def test_a_stop_before_the_first_step_stops_both(job):
    two = job().start(2)
    two.wait_for(lambda: (two.workdir / "config.json").exists())
    two.processes[1].send_signal(signal.SIGTERM)
    codes = [r.code for r in two.finish(timeout_secs=60)]
    assert codes == [75, 75]
    assert two.steps() in ([], [two.events("end")[0]["step"]])


@SLOW
def test_a_second_signal_means_now_where_the_other_process_is_waited_for(job):
    two = job(train__num_steps=10_000, preemption__grace_secs=300.0).start(2)
    two.wait_for_step(12)
    one, other = two.processes
    other.send_signal(signal.SIGSTOP)
    for _ in range(2):
        one.send_signal(signal.SIGTERM)
        time.sleep(4.0)
    assert one.wait(timeout=SOON_SECS) == 75
    other.kill()
    assert "SIGTERM while the main thread was deaf to it" in two.finish()[0].out
