"""Killed anywhere, a run goes on by itself and ends with the same bits."""

import os
import pathlib
import random
import shutil
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

NUM_STEPS = 700


def test_worker_killed_at_random_moments(command: Any, same: Any, full: bool) -> None:
    kinds = ["start", "train", "save"]
    if full:
        kinds = ["start"] * 5 + ["train"] * 8 + ["save"] * 7
    rng = random.Random(20261130)
    rng.shuffle(kinds)
    reference = command("reference", train__num_steps=NUM_STEPS)
    assert reference.run(timeout_secs=120)[0] == 0
    run = command("killed", train__num_steps=NUM_STEPS)
    run.start()
    in_save = sum(kill(run, attempt, kind, rng) for attempt, kind in enumerate(kinds))
    code, out, err = run.finish(timeout_secs=120)
    assert code == 0, err
    exits = [e for e in run.events("worker_exit") if e["status"] == -signal.SIGKILL]
    assert len(exits) == len(kinds)
    assert in_save >= (5 if full else 1)
    assert f"restarts     {len(kinds)}" in out
    told = [line for line in err.splitlines() if line.startswith("jaxft: worker died")]
    assert len(told) == len(kinds)
    assert all("killed by SIGKILL" in line for line in told)
    same(run, reference, NUM_STEPS)


def kill(run: Any, attempt: int, kind: str, rng: random.Random) -> bool:
    """Kills the worker of this attempt; whether a save was in flight."""

    def launched() -> Any:
        return [e for e in run.events("launch") if e["attempt"] == attempt]

    def mine(name: str) -> list[dict[str, Any]]:
        return [e for e in run.events(name) if e["pid"] == pid]

    if attempt == 0:
        # The first worker's pid is in the history once its preflight is over.
        run.wait_for(launched)
    pid = run.wait_for(launched)[0]["worker_pid"]
    if kind == "start":
        time.sleep(rng.uniform(0.0, 2.5))
    elif kind == "train":
        run.wait_for(lambda: mine("step"))
        time.sleep(rng.uniform(0.0, 0.3))
    else:
        run.wait_for(lambda: len(mine("save_start")) > len(mine("save_commit")))
        time.sleep(rng.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    run.wait_for(
        lambda: [e for e in run.events("worker_exit") if e["worker_pid"] == pid]
    )
    return len(mine("save_start")) > len(mine("save_commit"))


@pytest.mark.slow
def test_supervisor_killed_and_started_again_at_once(command: Any, same: Any) -> None:
    reference = command("reference", train__num_steps=200)
    assert reference.run()[0] == 0
    run = command("killed", train__num_steps=200)
    for _ in range(3):
        first = run.start()
        seen = len(run.events("save_commit"))
        run.wait_for(lambda seen=seen: len(run.events("save_commit")) > seen)
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    code, _, err = run.run()
    assert code == 0, err
    same(run, reference, 200)


@pytest.mark.slow
def test_a_store_that_goes_while_it_runs_is_no_fresh_start(command: Any) -> None:
    run = command("gone", train__num_steps=100_000)
    run.start()
    run.wait_for(lambda: run.events("save_commit"))
    pid = run.events("launch")[-1]["worker_pid"]
    os.kill(pid, signal.SIGSTOP)
    root = run.workdir / "checkpoints"
    root.rename(run.workdir / "elsewhere")
    os.kill(pid, signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 66, (out, err)
    assert f"was saved, and {root} holds no step now" in err
    assert "no usable checkpoint" in out
    assert not root.exists()
    # The same command, given by a person, may begin anew, and says that it does.
    run.settings["train.num_steps"] = 5
    code, out, err = run.run()
    assert code == 0, (out, err)
    assert f"{root} holds no step: a fresh start" in err


BROKEN = """
import numpy as np
from jaxft.data.sources import Sources

class Rows:
    fingerprint = "broken"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            raise ValueError('row 41')
        row = np.full(33, index, np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    return Sources(Rows())
"""


def test_code_that_raises_is_told_once(
    command: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    settings = {"data__factory": "broken:make_data", "data__shuffle": "false"}
    run = command("run", **settings)
    code, out, err = run.run()
    assert code == 70, (out, err)
    headline = "ValueError: row 41"
    # Once when it was restarted, once with its traceback at the end.
    assert err.count(headline) == 2, err
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith(headline)
    assert "For simplicity" not in err
    assert "crashed at step 5: the same error again (exit 70)" in out
    assert headline not in out


@pytest.mark.slow
def test_a_save_that_fails_for_a_moment_ends_no_run(command: Any, same: Any) -> None:
    reference = command("reference", train__num_steps=300)
    assert reference.run()[0] == 0
    run = command("run", train__num_steps=300, checkpoint__save="steps(50)")
    run.start()
    run.wait_for(lambda: run.events("save_commit"))
    root = run.workdir / "checkpoints"
    # Nothing can be written under a file; the steps that there are stay readable.
    aside = root.with_name("aside")
    root.rename(aside)
    root.write_text("")
    run.wait_for(lambda: run.events("fault"), timeout_secs=30)
    root.unlink()
    aside.rename(root)
    code, out, err = run.finish()
    assert code == 0, (out, err)
    (fault,) = run.events("fault")
    assert fault["fault"] == "save_failed"
    same(run, reference, 300)


@pytest.mark.slow
def test_a_config_file_that_changes_meanwhile_is_for_the_next_command(
    command: Any, same: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    reference = command("reference", train__num_steps=300)
    assert reference.run()[0] == 0
    run = command("run", train__num_steps=300)
    (word,) = [word for word in run.argv() if word.startswith("--config=")]
    file = tmp_path / "mine.py"
    shutil.copy(word.removeprefix("--config="), file)
    argv = [f"--config={file}" if w == word else w for w in run.argv()]
    monkeypatch.setattr(run, "argv", lambda: argv)
    run.start()
    run.wait_for(lambda: run.events("step"))
    file.write_text("raise RuntimeError('half written')")
    pid = run.events("launch")[0]["worker_pid"]
    # Who reads the list of processes sees the command that it came from.
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert set(argv[3:]) < set(words)
    os.kill(pid, signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0, (out, err)
    assert len(run.events("launch")) == 2
    same(run, reference, 300)
    assert run.run()[0] == 78
