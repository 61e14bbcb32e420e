"""Which process of how many: from environments as the schedulers make them."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys

import pytest

from jaxft.config import ConfigError
from jaxft.events import KINDS
from jaxft.recovery.launchers import (
    FIRST_PORT,
    NUM_PORTS,
    Launcher,
    LauncherKind,
    find_launcher,
    first_host,
    is_local_job,
)

REPO = pathlib.Path(__file__).parents[2]
# As slurmd of 22.05 sets them; the batch script, and a process of a step in it.
BATCH = {
    "SLURM_JOB_ID": "4099",
    "SLURM_JOB_NODELIST": "gpu[003-004,017]",
    "SLURM_NODELIST": "gpu[003-004,017]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[003-004,017]",
    "SLURM_PROCID": "2",
}
# As launch/jobset.yaml sets them.
POD = {
    "JOBSET_NAME": "run",
    "JOBSET_REPLICATED_JOB": "workers",
    "JOBSET_JOB_INDEX": "1",
    "JOBSET_NUM_JOBS": "2",
    "JOBSET_PODS_PER_JOB": "4",
    "JOBSET_RESTART_ATTEMPT": "3",
    "JOB_COMPLETION_INDEX": "2",
}


def test_without_a_scheduler_one_is_alone():
    assert find_launcher({"HOME": "/"}) == Launcher(kind=LauncherKind.ALONE)


def test_a_process_of_a_step():
    found = find_launcher(STEP)
    assert found == Launcher(
        kind=LauncherKind.SLURM,
        process_index=2,
        num_processes=3,
        coordinator=f"gpu003:{FIRST_PORT + 4099 % NUM_PORTS}",
        job="4099",
    )
    restarted = find_launcher(STEP | {"SLURM_RESTART_COUNT": "2"})
    assert restarted.num_requeues == 2


def test_a_batch_script_is_one_process_whatever_its_job_has():
    found = find_launcher(BATCH | {"SLURM_RESTART_COUNT": "7"})
    assert found == Launcher(kind=LauncherKind.SLURM, job="4099", num_requeues=7)


def test_a_step_of_one_inside_a_larger_job_is_one():
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "5"}
    assert find_launcher(BATCH | one) == Launcher(kind=LauncherKind.SLURM, job="4099")


def test_ports_of_neighbouring_jobs_differ_and_are_free_for_services():
    ports = {
        int(find_launcher(STEP | {"SLURM_JOB_ID": str(job)}).coordinator.split(":")[1])
        for job in range(70_000, 70_000 + NUM_PORTS)
    }
    assert len(ports) == NUM_PORTS
    assert min(ports) > 60_999
    assert max(ports) < 65_536


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("vm", "vm"),
        ("n1,n2", "n1"),
        ("n[01-04,07],m3", "n01"),
        ("n[7],m", "n7"),
        ("n[3,9-12]", "n3"),
        ("rack[2-3]n[01-16]", "rack2n01"),
        ("a-b[10-12].cluster.org", "a-b10.cluster.org"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",n1", "n[", "n[1-", "n[a-b]", "n 1", "[]"])
def test_what_is_no_list_of_hosts(nodes):
    with pytest.raises(ConfigError, match="names no host"):
        first_host(nodes)


def test_pods_of_a_jobset_are_counted_over_its_jobs():
    found = find_launcher(POD)
    assert found == Launcher(
        kind=LauncherKind.JOBSET,
        process_index=6,
        num_processes=8,
        coordinator="run-workers-0-0.run:61000",
        job="run",
        num_requeues=3,
    )
    indices = {
        find_launcher(
            POD | {"JOBSET_JOB_INDEX": str(job), "JOB_COMPLETION_INDEX": str(pod)}
        ).process_index
        for job, pod in itertools.product(range(2), range(4))
    }
    assert indices == set(range(8))


def test_a_jobset_of_one_pod():
    found = find_launcher({"JOBSET_NAME": "run", "JOB_COMPLETION_INDEX": "0"})
    assert found == Launcher(kind=LauncherKind.JOBSET, job="run")


def test_an_indexed_job_must_be_told_its_size():
    environ = {"JOB_COMPLETION_INDEX": "2"}
    with pytest.raises(ConfigError, match=r"INDEX=2 says .*--num_processes"):
        find_launcher(environ)
    found = find_launcher(environ, num_processes=4, coordinator="job-0.job:8476")
    assert found == Launcher(
        kind=LauncherKind.INDEXED_JOB,
        process_index=2,
        num_processes=4,
        coordinator="job-0.job:8476",
    )


@pytest.mark.parametrize("environ", [{}, STEP, POD, {"JOB_COMPLETION_INDEX": "1"}])
def test_flags_win_over_what_is_found(environ):
    found = find_launcher(
        environ, num_processes=16, process_index=5, coordinator="here:1"
    )
    shown = (found.kind, found.process_index, found.num_processes, found.coordinator)
    assert shown == (LauncherKind.FLAGS, 5, 16, "here:1")


def test_one_by_flags_needs_no_address():
    for flags in ({"num_processes": 1}, {"num_processes": 1, "process_index": 0}):
        assert find_launcher({}, **flags) == Launcher(kind=LauncherKind.FLAGS)


@pytest.mark.parametrize(
    ("environ", "flags", "problem"),
    [
        ({}, {"num_processes": 2}, "nothing else says who this is"),
        ({}, {"process_index": 0}, "nothing else says who this is"),
        ({}, {"coordinator": "h:1"}, "nothing else says who this is"),
        ({}, {"num_processes": 2, "process_index": 2}, "process 2 of 2 .flags"),
        ({}, {"num_processes": 2, "process_index": -1}, "process -1 of 2"),
        ({}, {"num_processes": 0, "process_index": 0}, "process 0 of 0"),
        ({}, {"num_processes": 2, "process_index": 1}, "no address to meet at"),
        (BATCH, {"num_processes": 2}, "no address to meet at"),
        (STEP, {"num_processes": 2}, "process 2 of 2 .slurm"),
        (STEP | {"SLURM_PROCID": "x"}, {}, "SLURM_PROCID='x' is not a number"),
        (STEP | {"SLURM_PROCID": ""}, {}, "SLURM_PROCID is not set"),
        (STEP | {"SLURM_JOB_ID": "a7"}, {}, "SLURM_JOB_ID='a7' is not a number"),
        (STEP | {"SLURM_STEP_NODELIST": "n["}, {}, "names no host"),
        (POD | {"JOB_COMPLETION_INDEX": "-1"}, {}, "'-1' is not a number"),
    ],
)
def test_contradictions_are_one_line(environ, flags, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        find_launcher(environ, **flags)
    assert "\n" not in str(caught.value)


def test_the_event_has_its_fields():
    assert KINDS["launcher"].keys() == find_launcher(STEP).event().keys()


def test_one_of_several_alone_says_who_did_not_come(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxft.main", f"--workdir={tmp_path}/run"),
            f"--config={REPO}/configs/tiny_lm.py",
            "--config.elastic.wait_secs=0.5",
        ],
        env=os.environ | STEP | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert "process-0, process-1 did not come within 0.5 s" in done.stderr
    assert not (tmp_path / "run" / "events").exists()


def test_who_starts_its_job_by_itself():
    flags = {"process_index": None, "coordinator": ""}
    assert is_local_job({}, num_processes=2, **flags)
    assert is_local_job(BATCH, num_processes=2, **flags)
    assert not is_local_job({}, num_processes=1, **flags)
    assert not is_local_job({}, num_processes=None, **flags)
    assert not is_local_job({}, num_processes=2, process_index=0, coordinator="h:1")
    assert not is_local_job(STEP, num_processes=2, **flags)
    assert not is_local_job(POD, num_processes=2, **flags)


def test_the_processes_of_a_job_have_one_identity():
    one = find_launcher(STEP)
    other = find_launcher(STEP | {"SLURM_PROCID": "0"})
    assert one.identity == other.identity
    assert one.identity != find_launcher(STEP | {"SLURM_JOB_ID": "78"}).identity
