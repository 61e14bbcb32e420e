"""A real Slurm: signals, time limits and requeues end in the undisturbed numbers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(400)]

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"

# A step takes about 40 ms: nothing is over before Slurm has looked at its clock.
SLOW_ROWS = """
import os, time
import numpy as np
from jaxft.data.sources import Sources

class Rows:
    fingerprint = "slow rows"

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("ROW_SECS", "0.01")))
        row = (np.arange(33) * (index + 1) % 251).astype(np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    return Sources(Rows())
"""


class Slurm:
    """A controller and one node of this test session."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.jobs: list[str] = []

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=os.environ | self.env, capture_output=True, text=True, check=True
        )
        return done.stdout

    def submit(self, run: Any, *options: str, env: dict[str, str]) -> str:
        run.warm()
        output = run.workdir.with_suffix(".out")
        done = subprocess.run(
            [
                *("sbatch", "--parsable", f"--output={output}", *options),
                *(str(LAUNCH / "slurm.sbatch"), *run.argv()[3:]),
            ],
            env=env | self.env | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=True,
        )
        self.jobs.append(done.stdout.strip())
        return self.jobs[-1]

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def field(self, job: str, name: str) -> str:
        words = self.ask("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)[name]

    def finish(self, job: str, *, timeout_secs: float = 300.0) -> str:
        """Waits for its end, over all requeues."""
        deadline = time.monotonic() + timeout_secs
        while (state := self.state(job)) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        return state


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if not all(shutil.which(name, path=path) for name in ("slurmctld", "munged")):
        pytest.skip("no Slurm here; launch/slurm_local.sh start FOLDER installs one")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    script = str(LAUNCH / "slurm_local.sh")
    done = subprocess.run(
        [script, "start", str(slurm.folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    yield slurm
    for job in slurm.jobs:
        slurm.ask("scancel", "--quiet", job)
    subprocess.run([script, "stop", str(slurm.folder)], check=True, timeout=60)


@pytest.fixture
def slow_rows(
    tmp_path: pathlib.Path, clean_environment: dict[str, str]
) -> dict[str, str]:
    """The environment of a job whose rows take their time."""
    (tmp_path / "slow_rows.py").write_text(SLOW_ROWS)
    path = f"{clean_environment['PYTHONPATH']}:{tmp_path}"
    return clean_environment | {"PYTHONPATH": path}


@pytest.fixture
def make_run(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, slow_rows: Any
) -> Callable[..., Any]:
    monkeypatch.setenv("ROW_SECS", "0")  # Of what is started here, not of jobs.
    monkeypatch.syspath_prepend(slow_rows["PYTHONPATH"].split(":")[-1])
    monkeypatch.chdir(slow_rows["PYTHONPATH"].split(":")[-1])

    def make(name: str, *, num_steps: int) -> Any:
        return command(
            name,
            data__factory="slow_rows:make_data",
            checkpoint__save="steps(100000)",
            train__num_steps=num_steps,
        )

    return make


def test_what_only_a_person_can_mend_is_not_put_back(
    slurm: Slurm, command: Callable[..., Any], clean_environment: dict[str, str]
) -> None:
    run = command("wrong", model__num_heads=5)
    job = slurm.submit(run, "--time=2", env=clean_environment)
    assert slurm.finish(job, timeout_secs=60) == "FAILED"
    assert slurm.field(job, "ExitCode") == "78:0"
    assert slurm.field(job, "Restarts") == "0"
    assert "exit 78: not put back" in run.workdir.with_suffix(".out").read_text()


def test_several_tasks_are_one_job(
    slurm: Slurm, command: Callable[..., Any], clean_environment: dict[str, str]
) -> None:
    run = command("run", train__num_steps=3)
    run.warm()
    done = subprocess.run(
        ["srun", "--overcommit", "-n", "2", *run.argv()],
        env=clean_environment | slurm.env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launchers = run.events("launcher")
    assert {event["process_index"] for event in launchers} == {0, 1}
    assert {event["name"] for event in launchers} == {"slurm"}
    assert all(event["job"].isdigit() for event in launchers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_ends_in_a_requeue_and_the_same_numbers(
    slurm: Slurm, make_run: Any, slow_rows: Any, same: Any, name: str
) -> None:
    reference = make_run("reference", num_steps=300)
    assert reference.run()[0] == 0
    run = make_run("run", num_steps=300)
    job = slurm.submit(run, "--time=10", env=slow_rows)
    run.wait_for(
        lambda: [e for e in run.events("step") if e["step"] > 50], timeout_secs=150
    )
    slurm.ask("scancel", f"--signal={name}", job)
    assert slurm.finish(job) == "COMPLETED", run.workdir.with_suffix(".out").read_text()
    assert slurm.field(job, "Restarts") == "1"
    # One save, although Slurm signals the worker and its supervisor passes it on.
    (stop,) = run.events("stop_request")
    assert stop["reason"] == f"SIG{name}"
    first, last = run.events("save_commit")
    assert 50 < first["step"] < last["step"] == 300
    counts = [event["num_requeues"] for event in run.events("launcher")]
    assert counts == [0, 1]
    same(run, reference, 300)


@pytest.mark.slow
def test_preempted_by_a_job_that_is_more_urgent(
    slurm: Slurm, make_run: Any, slow_rows: Any, same: Any
) -> None:
    """Slurm signals, and requeues by itself what has not left within a minute."""
    reference = make_run("reference", num_steps=300)
    assert reference.run()[0] == 0
    run = make_run("run", num_steps=300)
    job = slurm.submit(run, "--time=10", env=slow_rows)
    run.wait_for(
        lambda: [e for e in run.events("step") if e["step"] > 50], timeout_secs=150
    )
    urgent = slurm.ask(
        *("sbatch", "--parsable", "--partition=urgent", "--exclusive"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    slurm.jobs.append(urgent.strip())
    assert slurm.finish(job) == "COMPLETED", run.workdir.with_suffix(".out").read_text()
    assert slurm.state(urgent.strip()) == "COMPLETED"
    assert slurm.field(job, "Restarts") == "1"
    (stop,) = run.events("stop_request")
    assert stop["reason"] == "SIGTERM"
    first, last = run.events("save_commit")
    assert 50 < first["step"] < last["step"] == 300
    same(run, reference, 300)


@pytest.mark.slow
def test_a_time_limit_is_known_before_it_comes(
    slurm: Slurm, make_run: Any, slow_rows: Any, same: Any
) -> None:
    reference = make_run("reference", num_steps=1000)
    assert reference.run()[0] == 0
    run = make_run("run", num_steps=1000)
    # The grace time is for a job of hours; here the signal comes after 40 s.
    run.settings["preemption.grace_secs"] = 20
    job = slurm.submit(run, "--time=1", "--signal=USR1@20", env=slow_rows)
    assert slurm.finish(job) == "COMPLETED", run.workdir.with_suffix(".out").read_text()
    stops = run.events("stop_request")
    assert stops
    assert {event["reason"] for event in stops} <= {"SIGUSR1", "time limit"}
    # One that came before the run had begun is not in the history.
    assert int(slurm.field(job, "Restarts")) >= len(stops)
    same(run, reference, 1000)


@pytest.mark.slow
def test_scancel_is_the_end_until_somebody_submits_again(
    slurm: Slurm, make_run: Any, slow_rows: Any, same: Any
) -> None:
    run = make_run("run", num_steps=300)
    job = slurm.submit(run, "--time=10", env=slow_rows)
    run.wait_for(
        lambda: [e for e in run.events("step") if e["step"] > 50], timeout_secs=150
    )
    slurm.ask("scancel", job)
    assert slurm.finish(job) == "CANCELLED"
    (commit,) = run.events("save_commit")
    time.sleep(3)
    assert slurm.state(job) == "CANCELLED"
    assert slurm.field(job, "Restarts") == "0"
    again = slurm.submit(run, "--time=10", env=slow_rows)
    assert slurm.finish(again) == "COMPLETED"
    assert min(e["first_step"] for e in run.events("step")[-10:]) > commit["step"]
    reference = make_run("reference", num_steps=300)
    assert reference.run()[0] == 0
    same(run, reference, 300)
