"""What happens to standard streams changes neither the training nor its exit code."""

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


REPO = pathlib.Path(__file__).parents[2]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}


def shell(script: str, *, cwd: pathlib.Path) -> Any:
    words = ["bash", "-c", script]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, env=environment()
    )


PRINTING = """
from jaxft.data.sources import make_sources

def make_data(config):
    print("in the factory " * 5000, flush=True)
    return make_sources(config)
"""


@pytest.mark.parametrize(
    "where",
    [
        ">/dev/full 2>&1",
        *(
            pytest.param(where, marks=pytest.mark.slow)
            for where in ("2>&1 | true", "<&- >&- 2>&-", ">&-", "2>&-")
        ),
    ],
)
@pytest.mark.slow
def test_streams_that_take_nothing(
    command: Any, tmp_path: pathlib.Path, where: str
) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    run = command("run", train__num_steps=10, data__factory="printing:make_data")
    script = f"{shlex.join(run.argv())} {where}; codes=${{PIPESTATUS[0]}}; "
    done = shell(script + "echo $codes > code", cwd=tmp_path)
    assert (tmp_path / "code").read_text() == "0\n", done
    assert max(run.losses()) == 10
    assert len(run.events("launch")) == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_a_folder_that_is_gone_is_one_line(
    command: Any, tmp_path: pathlib.Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run = command("run")
    script = f"rmdir {shlex.quote(str(gone))}; {shlex.join(run.argv())}"
    done = shell(script, cwd=gone)
    assert done.returncode == 78, done.stderr
    assert done.stderr.startswith("jaxft: the current folder is gone")
    assert done.stderr.count("\n") == 1
    assert not run.workdir.exists()


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_unless_nohup(command: Any) -> None:
    long = {"train__num_steps": 100_000, "checkpoint__save": "steps(100000)"}
    run = command("run", **long)
    process = run.start()
    run.wait_for(lambda: run.events("step"))
    os.killpg(process.pid, signal.SIGHUP)
    code, out, err = run.finish()
    assert code == 75, (out, err)
    assert "stopped by SIGHUP" in out
    assert run.events("save_commit")[-1]["step"] == max(run.losses())

    run = command("nohup", **long)
    nohup = shutil.which("nohup")
    assert nohup is not None
    run.process = process = subprocess.Popen(
        [nohup, *run.argv()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    run.wait_for(lambda: run.events("step"))
    before = max(run.losses())
    os.killpg(process.pid, signal.SIGHUP)
    os.kill(run.events("launch")[0]["worker_pid"], signal.SIGHUP)
    run.wait_for(lambda: max(run.losses()) > before + 50)
    assert not run.events("stop_request")
    os.kill(process.pid, signal.SIGTERM)
    assert run.finish()[0] == 75
