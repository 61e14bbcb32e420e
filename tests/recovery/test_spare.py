"""A worker in waiting: when it becomes the next one, and when a new process does."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import textwrap
import time

import pytest

from jaxft.process_state import process_state
from jaxft.recovery.spare import SpareWorker

pytestmark = pytest.mark.usefixtures("nothing_leaks")

SPARE = """
import os, sys
from jaxft.recovery.spare import Waiting
waiting = Waiting(int(sys.argv[1]))
argv, fds = waiting.launch()
script, numbers = argv[3], argv[4:]
for place in (1, 2, 3, 5):
    numbers[place] = str(fds.get(int(numbers[place]), -1))
sys.argv[1:] = numbers
exec(script)
"""

# Dies as soon as its spare is ready; the third one ends well.
SCRIPT = """
step(10 * attempt + 1)
if attempt == 2:
    finish(30)
while not os.path.exists(f"{folder}/ready{attempt}"):
    time.sleep(0.005)
die()
"""


class Nursery:
    """Runs `SCRIPT` with spares, and acts on each one that is ready."""

    def __init__(self, make_run, folder: pathlib.Path, act=lambda pid: None, **options):
        self.folder = folder
        self.pids: list[int] = []
        self._act = act
        settle_secs = options.pop("settle_secs", 0.0)
        has_room = options.pop("has_room", lambda: True)
        script = f"folder = {str(folder)!r}\n" + options.pop("script", SCRIPT)
        program = options.pop("program", (sys.executable, "-c", SPARE))
        spare = SpareWorker(
            lambda fd: [*program, str(fd)],
            signals=(signal.SIGTERM,),
            emit=self._hear,
            has_room=has_room,
            settle_secs=settle_secs,
        )
        self.run = make_run(script, spare=spare, **options)

    def _hear(self, kind: str, /, **fields) -> None:
        assert kind == "spare"
        assert fields["memory_bytes"] > 1 << 20
        assert fields["secs"] >= 0
        self.pids.append(fields["spare_pid"])
        self._act(self.pids[-1])
        self.free(len(self.pids) - 1)

    def free(self, attempt: int) -> None:
        (self.folder / f"ready{attempt}").touch()

    def launches(self) -> list[dict]:
        return self.run.events("launch")


def test_each_next_worker_was_waiting(make_run, tmp_path):
    nursery = Nursery(make_run, tmp_path)
    outcome = nursery.run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (0, 2)
    launches = nursery.launches()
    assert [e["from_spare"] for e in launches] == [False, True, True]
    assert [e["worker_pid"] for e in launches[1:]] == nursery.pids[:2]
    exits = nursery.run.events("worker_exit")
    assert [e["status"] for e in exits] == [-9, -9, 0]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _wait_for_state(pid, "Z")


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    _wait_for_state(pid, "T")


def _wait_for_state(pid: int, letter: str) -> None:
    deadline = time.monotonic() + 10.0
    while process_state(pid).letter != letter:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ask_to_stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def change_environment(pid: int) -> None:
    os.environ["JAXFT_TEST_OF_SPARES"] = str(pid)


@pytest.mark.parametrize("act", [kill, freeze, ask_to_stop, change_environment])
def test_one_that_is_not_as_a_new_process_is_left_out(
    make_run, tmp_path, monkeypatch, is_alive, act
):
    monkeypatch.setenv("JAXFT_TEST_OF_SPARES", "")
    nursery = Nursery(make_run, tmp_path, act)
    outcome = nursery.run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (0, 2)
    assert [e["from_spare"] for e in nursery.launches()] == [False] * 3
    assert len(nursery.pids) >= 2
    assert not any(is_alive(pid) for pid in nursery.pids)


def test_a_start_with_a_suspect_cache_is_a_new_process(make_run, tmp_path):
    script = """
    import os
    if attempt < 2:
        die()  # Twice before a step: the cache is under suspicion.
    step(attempt)
    if attempt == 4:
        finish(4)
    while not os.path.exists(f"{folder}/ready0"):
        time.sleep(0.005)
    die()
    """
    script = textwrap.dedent(script)
    nursery = Nursery(make_run, tmp_path, script=script, max_restarts=20)
    assert nursery.run.run().exit_code == 0
    launches = nursery.launches()
    assert [e["cache"] for e in launches] == ["keep", "keep", "off", "fresh", "keep"]
    assert [e["from_spare"] for e in launches] == [False] * 4 + [True]


def test_none_is_started_without_room_or_before_the_first_step(make_run, tmp_path):
    asked = []

    def has_room() -> bool:
        asked.append(None)
        nursery.free(len(asked) - 1)
        return False

    nursery = Nursery(make_run, tmp_path, has_room=has_room)
    assert nursery.run.run().exit_code == 0
    assert len(asked) >= 2  # Once for each worker that lives on.
    assert nursery.pids == []
    silent = "finish() if attempt else die()"
    nursery = Nursery(make_run, tmp_path, script=silent, name="silent")
    assert nursery.run.run().exit_code == 0
    assert nursery.pids == []


def test_a_run_of_few_steps_starts_none(make_run, tmp_path):
    nursery = Nursery(
        make_run, tmp_path, script="step(1); finish(1)", settle_secs=1000.0
    )
    assert nursery.run.run().exit_code == 0
    assert nursery.pids == []


def test_one_that_cannot_be_started_is_not_missed(make_run, tmp_path):
    nursery = Nursery(make_run, tmp_path, program=["/no/such/program"])
    for attempt in range(2):
        nursery.free(attempt)
    assert nursery.run.run().exit_code == 0
    assert [e["from_spare"] for e in nursery.launches()] == [False] * 3


def test_one_that_is_still_importing_becomes_the_worker_later(make_run, tmp_path):
    def has_room() -> bool:
        nursery.free(0)  # The worker dies before its spare can be ready.
        nursery.free(1)
        return True

    slow = "import time; time.sleep(1.0)\n" + SPARE
    program = (sys.executable, "-c", slow)
    script = SCRIPT.replace("die()", "time.sleep(0.2); die()")
    nursery = Nursery(
        make_run, tmp_path, has_room=has_room, program=program, script=script
    )
    outcome = nursery.run.run()
    assert (outcome.exit_code, outcome.num_restarts) == (0, 2)
    assert nursery.pids == []
    assert [e["from_spare"] for e in nursery.launches()] == [False, True, True]
