"""Saves by `auto` in the real command: measured once, remembered over a kill."""

import os
import signal
from typing import Any

import pytest

from jaxft.records import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_a_restart_remembers_what_a_save_costs_and_that_it_failed(command: Any) -> None:
    run = command("auto", train__num_steps=1_000_000, checkpoint__save="auto")
    run.start()
    first = run.wait_for(lambda: run.events("interval"), timeout_secs=120)[0]
    assert first["num_saves"] == 1
    assert first["num_failures"] == 0
    assert first["earlier_secs"] == 0
    assert first["secs"] >= first["write_secs"]
    assert first["blocking_secs"] > 0
    worker = run.events("launch")[0]["worker_pid"]
    saved = run.events("save_commit")[0]["step"]
    os.kill(worker, signal.SIGKILL)

    def of_the_next() -> Any:
        return [e for e in run.events("interval") if e["pid"] != worker]

    second = run.wait_for(of_the_next, timeout_secs=120)[0]
    assert second["num_saves"] == 0
    assert second["blocking_secs"] == first["blocking_secs"]
    assert second["num_failures"] == 1
    assert second["failure_hours"] < first["failure_hours"] / 10
    assert second["secs"] < first["secs"]
    # And acts on it: with one failure in seconds a save is due soon.
    run.wait_for(
        lambda: [e for e in run.events("save_commit") if e["pid"] != worker],
        timeout_secs=120,
    )
    assert [e["step"] for e in run.events("restore")] == [saved]
    run.process.send_signal(signal.SIGTERM)
    assert run.finish(timeout_secs=120)[0] == ExitCode.STOPPED
    run.losses()  # What ran twice gave the same bits.
