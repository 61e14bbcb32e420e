"""The files that schedulers are given say what the table of exit codes says."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from jaxft.config import PreemptionConfig
from jaxft.faults.preemption import parse_signals
from jaxft.records import ExitCode
from jaxft.recovery.launchers import LauncherKind, find_launcher

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCHEMA = ROOT / "tests" / "golden" / "launch" / "jobset.schema.json"
# 69, a lost peer, and 76, silent corruption, are codes of what is not built yet.
GO_ON = {69, 71, 74, 75, 76}
LOOK_FIRST = {65, 66, 70, 73, 77, 78}


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (jobs,) = manifest["spec"]["replicatedJobs"]
    return jobs["template"]["spec"]


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return job_of(manifest)["template"]["spec"]


def check(manifest: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema, cls=jsonschema.Draft202012Validator)


def test_each_code_is_in_one_of_the_two_rows() -> None:
    assert not GO_ON & LOOK_FIRST
    assert {int(code) for code in ExitCode} <= GO_ON | LOOK_FIRST | {0}


def test_the_manifest_fits_its_schema(manifest: dict[str, Any]) -> None:
    check(manifest)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda m: m["spec"].update(replicas=1), "replicas"),
        (lambda m: m.update(kind="Job"), "JobSet"),
        (lambda m: job_of(m).update(backoff=0), "backoff"),
        (lambda m: pod_of(m).update(restartPolicy="OnFailure"), "Never"),
        (lambda m: pod_of(m)["containers"][0].update(commands=[]), "commands"),
        (lambda m: pod_of(m)["containers"][0]["env"].append({"value": "x"}), "name"),
        (
            lambda m: job_of(m)["podFailurePolicy"]["rules"][0].update(action="Stop"),
            "Stop",
        ),
        (
            lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="look-first"),
            "look-first",
        ),
    ],
)
def test_the_schema_refuses(manifest: dict[str, Any], spoil: Any, word: str) -> None:
    spoilt = copy.deepcopy(manifest)
    spoil(spoilt)
    with pytest.raises(jsonschema.ValidationError, match=word):
        check(spoilt)


def test_the_manifest_restarts_by_the_table(manifest: dict[str, Any]) -> None:
    rules = job_of(manifest)["podFailurePolicy"]["rules"]
    by_codes = {
        rule["action"]: set(rule["onExitCodes"]["values"])
        for rule in rules
        if "onExitCodes" in rule
    }
    assert by_codes == {"FailJob": LOOK_FIRST, "Count": GO_ON}
    names = [container["name"] for container in pod_of(manifest)["containers"]]
    used = {
        rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule
    }
    assert used == set(names)
    # The first rule that fits decides: a disrupted pod's wrong config is looked at.
    assert rules[0]["action"] == "FailJob"
    actions = {
        reason: rule["action"]
        for rule in manifest["spec"]["failurePolicy"]["rules"]
        for reason in rule["onJobFailureReasons"]
    }
    assert actions == {
        "PodFailurePolicy": "FailJobSet",
        "BackoffLimitExceeded": "RestartJobSet",
    }
    assert job_of(manifest)["backoffLimit"] == 0


def test_the_pod_outlives_the_grace_time(manifest: dict[str, Any]) -> None:
    (container,) = pod_of(manifest)["containers"]
    (grace,) = (
        float(word.split("=")[1])
        for word in container["command"]
        if word.startswith("--config.preemption.grace_secs=")
    )
    assert grace < pod_of(manifest)["terminationGracePeriodSeconds"]
    # Process 1 of the container is the command itself, which hears the signal.
    assert container["command"][:3] == ["python", "-m", "jaxft.main"]


@pytest.mark.parametrize(("num_jobs", "num_pods"), [(1, 1), (2, 4)])
def test_the_pods_know_who_they_are(
    manifest: dict[str, Any], num_jobs: int, num_pods: int
) -> None:
    """With what the controllers put into annotations, as the environment names them."""
    (container,) = pod_of(manifest)["containers"]
    annotations = {
        "jobset-name": manifest["metadata"]["name"],
        "replicatedjob-name": manifest["spec"]["replicatedJobs"][0]["name"],
        "replicatedjob-replicas": str(num_jobs),
        "job-index": str(num_jobs - 1),
        "restart-attempt": "5",
    }
    environ = {"JOB_COMPLETION_INDEX": str(num_pods - 1)}
    for entry in container["env"]:
        if entry["name"] == "JOBSET_PODS_PER_JOB":
            assert entry["value"] == str(job_of(manifest)["completions"])
            environ[entry["name"]] = str(num_pods)
            continue
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        key = re.fullmatch(
            r"metadata\.annotations\['jobset\.sigs\.k8s\.io/(.+)'\]", path
        )
        assert key is not None, path
        environ[entry["name"]] = annotations[key[1]]
    found = find_launcher(environ)
    assert found.kind is LauncherKind.JOBSET
    assert found.num_processes == num_jobs * num_pods
    assert found.process_index == num_jobs * num_pods - 1
    assert found.num_requeues == 5
    coordinator = "jaxft-workers-0-0.jaxft:61000" if num_jobs * num_pods > 1 else ""
    assert found.coordinator == coordinator


def test_the_batch_script_requeues_by_the_table() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    (codes,) = re.findall(r"^([\d |]+)\)$", text, re.MULTILINE)
    assert {int(code) for code in codes.split("|")} == GO_ON


def test_the_batch_script_signals_in_time() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    ((name, lead),) = re.findall(r"^#SBATCH --signal=(\w+)@(\d+)$", text, re.MULTILINE)
    ((grace),) = re.findall(r"JAXFT_GRACE_SECS:-(\d+)", text)
    # Slurm looks at the clock once a minute.
    assert int(lead) >= int(grace) + 60
    heard = parse_signals(PreemptionConfig().signals)
    assert parse_signals(name)[0] in heard


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_local.sh"])
def test_the_scripts_are_bash(name: str) -> None:
    path = LAUNCH / name
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK) == (name == "slurm_local.sh")
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, path], check=True)


@pytest.mark.parametrize("code", [0, *sorted(GO_ON | LOOK_FIRST)])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_the_batch_script_acts_by_code_and_state(
    tmp_path: pathlib.Path, code: int, state: str
) -> None:
    """With programs of Slurm's names that say what they were asked."""
    programs = {
        "srun": f"exit {code}",
        "squeue": f'case "$*" in *%T*) echo {state};; *) echo N/A;; esac',
        "scontrol": f'echo "$@" >>{tmp_path}/asked',
        "sleep": "exit 0",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "--workdir=x"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    requeued = asked.exists() and asked.read_text() == "requeue 7\n"
    assert requeued == (code in GO_ON and state == "RUNNING"), done.stdout


@pytest.mark.parametrize(
    ("installer", "problem"),
    [(None, "no apt-get to install it"), ("exit 100", "it cannot be installed; see")],
)
def test_where_no_slurm_can_be_had_it_is_said(
    tmp_path: pathlib.Path, installer: str | None, problem: str
) -> None:
    """Only what the script itself needs is there, and an installer that fails."""
    for name in ("bash", "mkdir", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    programs = {"id": "echo 0"} | ({"apt-get": installer} if installer else {})
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!{tmp_path}/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(tmp_path / "bash"), str(LAUNCH / "slurm_local.sh"), "start", "slurm"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 69, done.stderr
    assert problem in done.stderr
    assert not (tmp_path / "slurm" / "slurm.conf").exists()


def test_a_misuse_of_the_local_slurm_is_told() -> None:
    done = subprocess.run(
        [str(LAUNCH / "slurm_local.sh"), "start"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 64
    assert "slurm_local.sh start FOLDER" in done.stderr
