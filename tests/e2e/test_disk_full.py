"""A real full disk under the real command: what it says, and how it ends."""

import os
import pathlib
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: pathlib.Path, mount_disk: Any) -> pathlib.Path:
    return mount_disk(tmp_path / "run", "16m")


def _fill(disk: pathlib.Path) -> pathlib.Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 14))
        except OSError:
            return ballast


def _newest(root: pathlib.Path) -> int:
    return max(int(name) for name in os.listdir(root) if name.isdigit())


def test_a_disk_that_stays_full_is_a_failed_save(
    command: Any, small_disk: pathlib.Path
) -> None:
    run = command("run", train__num_steps=900)
    run.start()
    run.wait_for(lambda: len(run.events("save_commit")) >= 3)
    ballast = _fill(small_disk)
    code, out, err = run.finish()
    assert code == 74, (out, err)
    assert "disk full; free space under" in err
    assert "cannot hold checkpoints: it cannot write a file: No space left" in err
    newest = _newest(small_disk / "checkpoints")
    assert f"newest {newest}" in out
    assert "failed saves" in out
    # The same command, as a scheduler gives it again: nothing has become better.
    code, out, err = run.run()
    assert code == 74, (out, err)
    assert f"goes on from step {newest}" in err
    assert f"newest {newest}" in out
    ballast.unlink()
    run.settings["train.num_steps"] = newest + 20
    code, out, err = run.run()
    assert code == 0, (out, err)
    assert f"resuming at step {newest}" in err


@pytest.mark.timeout(300)
def test_a_stop_on_a_full_disk_is_a_failed_save_and_not_a_clean_leave(
    command: Any, undisturbed: Any, same: Any, small_disk: pathlib.Path
) -> None:
    run = command("run", train__num_steps=100_000, checkpoint__save="steps(200)")
    process = run.start()
    run.wait_for(lambda: run.events("save_commit"), timeout_secs=150)
    ballast = _fill(small_disk)
    os.kill(process.pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 74, (out, err)
    assert "disk full; free space under" in err
    newest = _newest(small_disk / "checkpoints")
    assert newest % 200 == 0
    assert f"newest {newest}" in out
    assert "restarting" not in err
    ballast.unlink()
    num_steps = max(run.losses()) + 20
    run.settings["train.num_steps"] = num_steps
    code, out, err = run.run()
    assert code == 0, (out, err)
    same(run, undisturbed(train__num_steps=num_steps), num_steps)


def test_a_disk_that_is_full_for_a_while_is_told(
    command: Any, small_disk: pathlib.Path
) -> None:
    run = command(
        "run",
        train__num_steps=900,
        checkpoint__on_save_error="warn",
        checkpoint__max_failed_saves=1000,
    )
    run.start()
    run.wait_for(lambda: len(run.events("save_commit")) >= 3)
    root = small_disk / "checkpoints"
    ballast = _fill(small_disk)
    # Its history has no room either: the live line is all that it says.
    assert run.process.stderr is not None
    lines = []
    for line in run.process.stderr:
        lines.append(line)
        if "failed: disk full" in line:
            break
    ballast.unlink()
    code, out, err = run.finish()
    assert code == 0, (out, err)
    (told,) = [line for line in lines if "failed: disk full" in line]
    assert "\n" not in told.rstrip("\n")
    assert "is saved, after" in err
    assert "failed: disk full" not in err
    (row,) = [line for line in out.splitlines() if line.startswith("failed saves")]
    assert "disk full" in row
    assert _newest(root) == 900
