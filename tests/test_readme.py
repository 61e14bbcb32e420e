"""README says what is run, and the gate runs what README says."""

import pathlib
import re
import subprocess
import tomllib

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
    assert commands()[1] in lines


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
