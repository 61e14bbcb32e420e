"""The notebooks run as they are, carry no outputs and leave a present jax alone."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import nbclient
import nbformat
import pytest

REPO = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((REPO / "colabs").glob("*.ipynb"))
NEW = "jaxft_of_the_index"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: pathlib.Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook():
    assert "01_train_and_break_it" in {path.stem for path in NOTEBOOKS}


@each_notebook
def test_it_is_valid_and_stripped(path, tmp_path):
    nbformat.validate(nbformat.read(path, as_version=4))
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    subprocess.run([sys.executable, "-m", "nbstripout", str(copy)], check=True)
    assert copy.read_bytes() == path.read_bytes()
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@each_notebook
def test_every_code_cell_is_explained(path):
    cells = nbformat.read(path, as_version=4).cells
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source


def _write_wheel(folder: pathlib.Path, name: str, version: str, *requires: str) -> None:
    """The smallest wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {word}" for word in requires]
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        file.writestr(f"{info}/WHEEL", wheel)
        file.writestr(f"{info}/RECORD", "")


def _install(
    path: pathlib.Path, folder: pathlib.Path, requirement: str
) -> tuple[int, list[str], str]:
    """Runs the first cell with a jaxft and a jax of the future on the index.

    Returns:
        Exit code, what pip would have installed, standard error.
    """
    wheels = folder / "wheels"
    wheels.mkdir()
    _write_wheel(wheels, NEW, "9", requirement)
    _write_wheel(wheels, "jax", "999")
    # pip runs for real, but for the last moment.
    pip = {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "DRY_RUN": "1"}
    pip |= {"REPORT": str(folder / "report.json"), "DISABLE_PIP_VERSION_CHECK": "1"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    env |= {f"PIP_{name}": value for name, value in pip.items()}
    # As where jaxft is not installed, whether or not it is here: to Python by hiding
    # it, to pip by a name that nobody has.
    hidden = "import sys; sys.modules['jaxft'] = None\n"
    source = code_cells(path)[0].source
    assert source.count('else "jaxft"') == 1
    source = source.replace('else "jaxft"', f'else "{NEW}"')
    done = subprocess.run(
        [sys.executable, "-c", hidden + source],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    report = folder / "report.json"
    chosen = json.loads(report.read_text())["install"] if report.exists() else []
    names = [item["metadata"]["name"] for item in chosen]
    return done.returncode, names, done.stderr


@each_notebook
def test_the_first_cell_installs_jaxft_and_nothing_else(path, tmp_path):
    code, names, err = _install(path, tmp_path, "jax>=0.10")
    assert code == 0, err
    assert names == [NEW]


@each_notebook
def test_the_first_cell_never_changes_jax(path, tmp_path):
    code, names, err = _install(path, tmp_path, "jax>=999")
    assert code != 0
    assert names == []
    assert re.search(r"jax==\d.*constraint|conflict", err), err


@pytest.fixture
def kernel_env(tmp_path: pathlib.Path) -> dict[str, str]:
    """One CPU device, this checkout, and a kernel that is this interpreter."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    left_out = ("JAX_NUM_CPU_DEVICES", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    (tmp_path / "files").mkdir()
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAXFT_SMOKE": "1",
        "PYTHONPATH": str(REPO),
        "TMPDIR": str(tmp_path / "files"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        # jaxft is here: an attempt to install anything would fail.
        "PIP_NO_INDEX": "1",
    }


def _output(cell: Any) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


@pytest.mark.e2e
@each_notebook
def test_it_runs(path, tmp_path, kernel_env, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=90)
    client.execute(cwd=str(tmp_path), env=kernel_env)
    outputs = {
        cell.source: _output(cell)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    install, *rest = outputs.values()
    assert install == ""
    text = "\n".join(rest)
    assert "killed by SIGKILL" in text
    assert "the same command goes on from step" in text
    assert re.search(r"[1-9]\d* arrays, [1-9][\d,]* bytes, 0 arrays differ", text)
    assert re.search(
        r"[1-9]\d* losses, \d+ of them of steps computed again, 0 differ", text
    )
