"""README says what is run, and the gate runs what README says."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    return re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL)


def test_two_commands_each_complete() -> None:
    demo, tests = commands()
    assert demo == (
        "pip install -e . && python -m jaxft.main "
        "--config=configs/tiny_lm.py --workdir=/tmp/jaxft-demo"
    )
    assert tests == 'pip install -e ".[dev]" && pytest'


def test_the_gate_runs_exactly_the_test_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert f"({commands()[1]})" in lines


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)\n```", README, flags=re.DOTALL)


@pytest.mark.device
@pytest.mark.timeout(240)
def test_every_python_block_runs_as_printed(tmp_path: pathlib.Path) -> None:
    """In order, each in a process of its own; `# name.py` in line 1 names a file."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be, that is it\n" * 900)
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUMPY_RANK_PROMOTION", None)
    printed = []
    for block in blocks():
        text = block.replace("/tmp/", f"{tmp_path}/")
        name = re.match(r"# (\w+\.py)", text)
        if name:
            (tmp_path / name[1]).write_text(text)
            continue
        # The notebook's run, smaller than a reader's.
        smaller = "num_steps = 110\nconfig.data.seq_len = 8\nstate"
        text = text.replace("num_steps = 200\nstate", smaller)
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (block, done.stderr)
        printed.append(done.stdout)
    assert "finished" in printed[0]
    assert (tmp_path / "my-run" / "200").is_dir()
    assert printed[3] == "[0. 1. 2. 3.]\n"
    assert re.fullmatch(r"\d+% of \d+\.\d+ s in steps\n", printed[4])
    assert "params/w" in printed[5]
    assert printed[5].splitlines()[-1].startswith("3 ")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxft.main", "--config=my_run.py"),
            *("--workdir=own", "--config.train.num_steps=20"),
            *("--config.optimizer.warmup_steps=5", "--config.data.seq_len=16"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("in reading order")[1]
    block = re.search(r"```\n(.*?)```", tree, flags=re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        assert (ROOT / line.split()[0]).exists(), line
    packages = {p.parent.name for p in (ROOT / "jaxft").glob("*/__init__.py")}
    assert all(f"jaxft/{name}/" in block[1] for name in packages)


def test_exit_codes_are_those_of_the_records() -> None:
    from jaxft.command import USAGE
    from jaxft.records import EXIT_CODES

    table = README.split("## What it survives")[1].split("## ")[0]
    for code in set(EXIT_CODES.values()):
        assert f"| {int(code)}" in table, code
        assert str(int(code)) in USAGE


def test_the_version_has_one_home() -> None:
    import jaxft

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxft.__version__)


def test_the_gate_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
