"""Bad input is one line and an exit code; the workdir stays as it was found."""

import json
import os
import pathlib
import shutil
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def slow(*values: Any) -> Any:
    """A case that the sample leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(run: Any, expected: str, *words: str) -> None:
    run.is_cold = True  # Nothing but the command itself touches the workdir.
    before = snapshot(run.workdir) if run.workdir.exists() else None
    status, out, err = run.run(*words)
    assert status == 78, (out, err)
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert expected in lines[0], err
    assert out == ""
    after = snapshot(run.workdir) if run.workdir.exists() else None
    assert after == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model.factory": "no_such:thing"}, "config.model.factory: cannot import"),
        slow(
            {"model.factory": "os:no_such"}, "config.model.factory: os has no function"
        ),
        ({"model.num_heads": 5}, "config.model.num_heads"),
        ({"mesh.data": 3}, "config.mesh"),
        ({"remat.plan": "half"}, "config.remat.plan"),
        slow({"checkpoint.save": "weekly"}, "config.checkpoint.save"),
        ({"data.corpus": "text", "data.path": "/no/such/*.txt"}, "config.data.path"),
        slow({"precision.compute_dtype": "int7"}, "config.precision.compute_dtype"),
        slow({"sharding.logical_rules": "embed=moon"}, "config.sharding.logical_rules"),
        slow({"preemption.signals": "SIGNONE"}, "config.preemption.signals"),
        slow({"train.rng_impl": "dice"}, "config.train.rng_impl"),
        slow({"data.global_batch": 0}, "config.data.global_batch"),
        slow(
            {"data.seq_len": 10**12}, "config.data.seq_len: must be positive and below"
        ),
        slow({"data.seq_len": 10**9}, "config.data"),
        slow({"optimizer.learning_rate": "nan"}, "config.optimizer.learning_rate"),
        slow(
            {"optimizer.b2": 1}, "config.optimizer.b2: must be at least 0 and below 1"
        ),
        slow({"train.ema_decay": 1}, "config.train.ema_decay"),
        slow({"preemption.grace_secs": "inf"}, "config.preemption.grace_secs"),
        ({"resume.mode": "required"}, "config.resume.mode: required"),
    ],
)
def test_wrong_settings(command: Any, settings: dict[str, Any], expected: str) -> None:
    run = command("refused")
    run.settings |= settings
    refused(run, expected)


@pytest.mark.parametrize("role", ["supervise", "work"])
def test_wrong_words(command: Any, role: str) -> None:
    for word, expected in [
        ("--config=other.py", "--config is given twice"),
        ("--config.model.widht=3", "config.model.widht: there is no 'widht' here"),
        ("--workdir=/", "--workdir=/: already defined"),
        ("stray", "unexpected arguments: stray"),
    ]:
        refused(command("refused"), expected, f"--role={role}", word)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import sys; sys.exit(0)", "own.py:4: SystemExit: 0"),
        ("c.model.width = 'wide'", "config.model.width: must be a whole number"),
        ("c.data = None", "config.data: must be a DataConfig"),
        ("c.train.num_steps = 30.5", "config.train.num_steps: must be a whole number"),
        ("c.model.options.f = print", "config.model.options.f: options hold JSON"),
        ("class Own(Config): pass\n  return Own()", ", not a jaxft.Config"),
    ],
)
def test_wrong_config_files(
    command: Any, tmp_path: pathlib.Path, body: str, expected: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from jaxft.config import Config\n"
        "def get_config():\n"
        "  c = Config()\n"
        f"  {body}\n"
        "  return c\n"
    )
    run = command("refused")
    words = [*run.argv()[:3], f"--config={file}", f"--workdir={run.workdir}"]
    run.argv = lambda: words
    refused(run, expected)


@pytest.mark.slow
def test_what_a_refused_resume_offers_works(command: Any) -> None:
    run = command("run", train__num_steps=10, optimizer__decay_steps=0)
    assert run.run()[0] == 0
    run.settings["train.num_steps"] = 20
    refused(run, "keep the old schedule with --config.optimizer.decay_steps=10")
    run.settings["resume.allow"] = "optimizer.decay"
    refused(run, "config.resume.allow: 'optimizer.decay' names nothing")
    run.settings["resume.allow"] = "optimizer.decay_steps"
    code, _, err = run.run()
    assert code == 0, err
    del run.settings["resume.allow"]
    run.settings |= {"train.num_steps": 30, "optimizer.decay_steps": 20}
    code, _, err = run.run()
    assert code == 0, err


@pytest.mark.slow
def test_resuming_with_other_settings(command: Any) -> None:
    run = command("run", train__num_steps=20)
    assert run.run()[0] == 0
    run.settings |= {"optimizer.learning_rate": 0.5, "train.num_steps": 30}
    refused(run, "optimizer.learning_rate: 0.003 -> 0.5")
    run.settings |= {"resume.allow": "optimizer.*"}
    code, _, err = run.run()
    assert code == 0, err
    (event,) = run.events("resume_changed")
    assert event["changes"]["optimizer.learning_rate"] == [0.003, 0.5]
    # Longer, other remat: no numbers change, no permission is needed.
    run.settings |= {"train.num_steps": 40, "remat.plan": "full"}
    code, _, err = run.run()
    assert code == 0, err
    changes = run.events("resume_changed")[-1]["changes"]
    assert changes["remat.plan"] == ["names(attn,up)", "full"]
    assert changes["train.num_steps"] == [30, 40]


@pytest.mark.slow
def test_resuming_over_another_corpus(command: Any, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 500)
    run = command("run", train__num_steps=20, data__corpus="text", data__path=text)
    assert run.run()[0] == 0
    text.write_text("whether tis nobler in the mind to suffer\n" * 500)
    run.settings["train.num_steps"] = 30
    refused(run, "corpus")


def test_a_second_start_is_refused_and_names_the_owner(command: Any) -> None:
    run = command("run", train__num_steps=100_000)
    process = run.start()
    run.wait_for(lambda: run.events("step"))
    second = command("run")
    code, out, err = second.run()
    assert code == 73, (out, err)
    assert len(err.strip().splitlines()) == 1
    assert f"process {process.pid} on" in err
    assert run.process.poll() is None


def changed(record: dict[str, Any], damage: str) -> dict[str, Any]:
    """A run record that is JSON and yet not as it was saved."""
    if damage == "name":
        form = record["format"] | {"name": "jaxft-checkpoins"}
        return record | {"format": form}
    if damage == "position":
        return record | {"data": record["data"] | {"step": 40}}
    if damage == "windows":
        return record | {"data": record["data"] | {"skipped": [1]}}
    if damage == "facts":
        return record | {"run": record["run"] | {"facts": []}}
    return record | {damage: None}


RECORD_DAMAGE = ["name", "position", "windows", "facts", "run", "metrics"]


@pytest.mark.parametrize(
    "damage",
    [slow(d) for d in RECORD_DAMAGE],
)
def test_a_record_that_says_something_else_is_damage(
    command: Any, tmp_path: pathlib.Path, damage: str
) -> None:
    """Never a finished run whose last state is nowhere."""
    run = command("run", train__num_steps=30)
    assert run.run()[0] == 0
    file = run.workdir / "checkpoints/30/run/metadata"
    good = json.loads(file.read_text())
    file.chmod(0o644)
    file.write_text(json.dumps(changed(good, damage)))
    code, out, err = run.run()
    assert code == 0, err
    assert "30.quarantined-1" in out
    again = json.loads(file.read_text())
    assert again["data"] == good["data"]
    assert again["format"] == good["format"]


@pytest.mark.slow
def test_a_step_of_something_else_is_not_passed_over(command: Any) -> None:
    run = command("run", train__num_steps=20)
    assert run.run()[0] == 0
    root = run.workdir / "checkpoints"
    (root / "90/default").mkdir(parents=True)
    (root / "90/default/manifest.ocdbt").write_text("theirs")
    refused(run, f"{root / '90'} is no checkpoint of ours")
    (root / "90").rename(root / "5")  # an older one is no reason to stop
    run.settings["train.num_steps"] = 30
    code, _, err = run.run()
    assert code == 0, err
    shutil.rmtree(root)
    (root / "90/default").mkdir(parents=True)
    refused(run, "use another workdir, or move it away")


def test_checkpoints_that_are_no_folder(command: Any) -> None:
    for name, make in [
        ("file", lambda path: path.write_text("x")),
        ("link", lambda path: path.symlink_to("/no/such/mount")),
    ]:
        run = command(name)
        run.workdir.mkdir()
        make(run.workdir / "checkpoints")
        refused(run, f"{run.workdir / 'checkpoints'}: ")
        assert os.listdir(run.workdir) == ["checkpoints"]


@pytest.mark.parametrize("damage", [slow("truncate"), slow("delete"), slow("record")])
def test_a_bad_newest_step_leads_to_the_one_before(
    command: Any, same: Any, damage: str
) -> None:
    reference = command("reference", train__num_steps=60)
    assert reference.run()[0] == 0
    run = command("run", train__num_steps=50)
    assert run.run()[0] == 0
    root = run.workdir / "checkpoints"
    # A quick run may have skipped a save while the one before was in flight.
    before = sorted(int(path.name) for path in root.iterdir())[-2]
    step = root / "50"
    files = sorted(p for p in (step / "state").rglob("*") if p.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    if damage == "delete":
        largest.unlink()
    elif damage == "truncate":
        largest.chmod(0o644)
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        record = step / "run" / "metadata"
        record.chmod(0o644)
        record.write_bytes(record.read_bytes()[:-20])
    run.settings["train.num_steps"] = 60
    code, out, err = run.run()
    assert code == 0, err
    assert "50.quarantined-" in out
    assert len(list(run.workdir.glob("checkpoints/50.quarantined-*"))) == 1
    assert run.events("restore")[-1]["step"] == before
    same(run, reference, 60)


def test_no_readable_step_is_66_and_nothing_is_lost(command: Any) -> None:
    run = command("run", train__num_steps=30)
    assert run.run()[0] == 0
    root = run.workdir / "checkpoints"
    steps = list(root.iterdir())
    for step in steps:
        shutil.rmtree(step / "state")
    run.settings["train.num_steps"] = 40
    code, out, err = run.run()
    assert code == 66, (out, err)
    assert "Traceback" not in err
    assert len(list(root.glob("*.quarantined-*"))) == len(steps) >= 2
    code, _, err = run.run()
    assert code == 66, "never a silent fresh start"


def test_config_json_is_the_resolved_config(command: Any) -> None:
    run = command("run", train__num_steps=10)
    assert run.run()[0] == 0
    saved = json.loads((run.workdir / "config.json").read_text())
    assert saved["train.num_steps"] == 10
    # Not 0, which stands for "what model.num_heads is".
    assert saved["model.num_kv_heads"] == 2
