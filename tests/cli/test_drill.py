"""A drill: its plan, what it refuses, and a small one on the real command."""

import collections
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft import config as configs
from jaxft.cli.__main__ import main
from jaxft.cli.drill import _problem
from jaxft.cli.drill_plan import plan_drill
from jaxft.config import Config, ConfigError
from jaxft.faults.plan import OF_BATCHES, parse_plan
from jaxft.goodput.incidents import Incident

REPO = pathlib.Path(__file__).parents[2]
HARMLESS = ("bitflip", "enospc", "spike")


def config_of(num_steps=2000, **overrides):
    config = Config()
    config.train.num_steps = num_steps
    config.train.max_nonfinite = 3
    config.rollback.skip_after = 4
    for path, value in overrides.items():
        section, name = path.split("__")
        setattr(getattr(config, section), name, value)
    return configs.resolve(config)


def plan(config=None, *, tmp_path=pathlib.Path("/"), **changes):
    asked = {"num_faults": 30, "seed": 0, "kinds": ()} | changes
    return plan_drill(config or config_of(), workdir=tmp_path / "run", **asked)


def test_all_kinds_that_can_be_had(tmp_path):
    drill = plan(tmp_path=tmp_path)
    assert set(drill.refused) == set(HARMLESS)
    assert "takes a tmpfs below 1 GiB" in drill.refused["enospc"]
    counts = collections.Counter(str(fault.kind) for fault in drill.faults)
    assert sum(counts.values()) == 30
    assert len(counts) == 11
    assert max(counts.values()) - min(counts.values()) <= 1
    spiky = plan(config_of(rollback__spike_factor=9.0), tmp_path=tmp_path)
    assert set(spiky.refused) == {"bitflip", "enospc"}


def test_a_small_scratch_disk_can_be_filled(tmp_path, mount_disk):
    mount_disk(tmp_path / "run", "8m")
    assert set(plan(tmp_path=tmp_path).refused) == {"bitflip", "spike"}


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ({"hang__enabled": False}, {"hang", "hang_gil"}),
        ({"rollback__max_rollbacks": 0}, {"nan_grad", "bad_batch"}),
        ({"preemption__signals": "SIGUSR1"}, {"sigterm"}),
    ],
)
def test_what_is_off_is_refused(tmp_path, overrides, kinds):
    refused = plan(config_of(**overrides), tmp_path=tmp_path).refused
    assert set(refused) == {*HARMLESS, *kinds}


def test_the_twin_has_the_bad_data_only(tmp_path):
    drill = plan(tmp_path=tmp_path)
    bad = [str(fault) for fault in drill.faults if fault.kind in OF_BATCHES]
    assert drill.bad_data.split("; ") == bad
    assert drill.settings["supervisor.max_restarts"] == 10 + 30


@given(seed=st.integers(0, 1000), n=st.integers(1, 40))
def test_faults_leave_each_other_room(seed, n):
    faults = plan(seed=seed, num_faults=n, kinds=("kill", "nan_grad")).faults
    steps, num_skipped = [], 0
    for fault in faults:
        is_bad = fault.kind in OF_BATCHES
        steps.append(fault.first - num_skipped if is_bad else fault.first)
        # The batches of a window around bad data: one before, four after.
        num_skipped += 6 if is_bad else 0
    for one, next_one in itertools.pairwise(steps):
        assert next_one - one > 8
    assert steps[0] >= 200
    assert steps[-1] < 2000


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kinds": ("kill", "explode")}, "there is no 'explode'"),
        ({"kinds": ("bitflip",)}, "no fault can be had here: bitflip: silent"),
        ({"num_faults": 500}, r"train.num_steps: 500 faults .* need \d+ steps"),
    ],
)
def test_a_drill_that_cannot_be(tmp_path, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        plan(tmp_path=tmp_path, **changes)


def test_the_least_number_of_steps_is_enough(tmp_path):
    with pytest.raises(ConfigError) as error:
        plan(tmp_path=tmp_path, num_faults=500)
    (least,) = [int(word) for word in str(error.value).split() if word.isdecimal()][1:2]
    assert len(plan(config_of(least), num_faults=500).faults) == 500
    with pytest.raises(ConfigError):
        plan(config_of(round(0.95 * least)), num_faults=500)


@pytest.mark.parametrize(
    ("text", "kind", "later", "codes", "problem"),
    [
        ("kill@7", "killed", [], [0], ""),
        ("kill@7", "exception", [], [0], "taken for exception, not for killed"),
        ("sigterm@7", "stopped", [], [75, 0], ""),
        ("sigterm@7", "stopped", [], [0], "no start of the command left with 75"),
        ("corrupt_newest@7", "killed", [], [0], "was not moved aside"),
        ("corrupt_newest@7", "killed", [{"kind": "quarantine"}], [0], ""),
        ("slow_disk@7-8:1MBps", "", [], [0], "step 7 was not saved"),
        ("slow_disk@7-8:1MBps", "", [{"kind": "save_commit", "step": 7}], [0], ""),
    ],
)
def test_what_counts_as_recovered(text, kind, later, codes, problem):
    (fault,) = parse_plan(text, num_steps=100)
    found = [Incident(kind=kind, at_secs=2.0, step=7, evidence="", is_over=True)]
    events = [{"time": 3.0, **event} for event in later]
    fired = {"time": 1.0, "step": 7}
    told = _problem(fault, fired, found, events=events, codes=codes)
    assert problem in told
    assert bool(problem) == bool(told)


@pytest.mark.parametrize("farthest", [6, 7])
def test_one_that_was_overtaken_is_over_when_the_run_came_so_far(farthest):
    (fault,) = parse_plan("nan_grad@5-7", num_steps=100)
    found = [Incident(kind="rollback", at_secs=2.0, step=7, evidence="")]
    events = [{"kind": "step", "time": 3.0, "step": farthest}]
    fired = {"time": 1.0, "step": 7}
    told = _problem(fault, fired, found, events=events, codes=[0])
    assert told == ("" if farthest == 7 else "the run did not come as far again")


def settings(tmp_path, *words):
    config = f"--config={REPO / 'configs' / 'tiny_mlp.py'}"
    return ["drill", config, f"--workdir={tmp_path / 'drill'}", *words]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--config.train.nothing=3"], "config.train.nothing: there is no"),
        (["--config.faults.inject=kill@5"], "faults.inject: a drill makes its own"),
        (["--failures=0"], "--failures"),
        (["--whatever"], "unrecognized arguments: --whatever"),
        (["--failures=99"], "config.train.num_steps: 99 faults"),
    ],
)
def test_a_misuse_is_one_line(tmp_path, capsys, words, problem):
    assert main(settings(tmp_path, *words)) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert os.listdir(tmp_path) == []


def test_other_commands_take_no_settings(capsys):
    assert main(["ckpt", "ls", "/", "--config.train.num_steps=3"]) == 78
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_used_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "drill").mkdir()
    (tmp_path / "drill" / "thesis.txt").write_text("42")
    assert main(settings(tmp_path, "--failures=1", "--kinds=kill")) == 78
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_drill_on_the_real_command(tmp_path):
    words = {
        "train.num_steps": 400,
        "train.max_nonfinite": 3,
        "rollback.skip_after": 4,
        "checkpoint.save": "steps(10)",
        "eval.every_steps": 0,
    }
    kinds = ["kill", "nan_grad", "raise", "sigterm", "oom", "slow_disk"]
    argv = settings(
        tmp_path,
        f"--failures={len(kinds)}",
        f"--kinds={'+'.join(kinds)}",
        "--seed=1",
        "--json",
        *(f"--config.{path}={value}" for path, value in words.items()),
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxft.cli", *argv],
        env=os.environ | {"PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    report = json.loads(done.stdout)
    assert set(report["kinds"]) == set(kinds)
    for row in report["kinds"].values():
        assert (row["planned"], row["injected"], row["recovered"]) == (1, 1, 1)
    assert report["same_end"] is True
    assert sorted(report["exit_codes"]) == [0, 75, 77]
    assert report["left_out"]
