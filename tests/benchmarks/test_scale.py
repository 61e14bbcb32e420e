"""The scale benchmark: its roots are what they say, and its ratios are of growth."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxft.checkpoint import decisions

pytestmark = pytest.mark.device

_PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "scale.py"


def test_a_filled_root_has_all_steps_and_goes_on_from_the_newest(bench, tmp_path):
    root = str(tmp_path / "root")
    bench.fill_root(root, 20)
    found = decisions.discover(root)
    assert found.steps == list(range(1, 21))
    assert not found.foreign
    with bench._manager(root) as manager:
        restored = manager.restore(bench._tiny(bench._NUM_LEAVES, step=0))
        assert restored.step == 20
        want = bench._tiny(bench._NUM_LEAVES, step=20)
        assert all(np.array_equal(restored.state[name], want[name]) for name in want)
        assert manager.save(21, want, force=True)
    assert decisions.discover(root).steps == list(range(1, 22))


def test_a_ratio_is_of_the_growth_since_the_row_above(bench, capsys):
    rows = [(10, {"a": 0.001, "b": 1.0}), (100, {"a": 0.01, "b": 1.0})]
    rows.append((200, {"a": 0.06, "b": 2.0}))
    bench.print_growth("steps", iter(rows))
    lines = capsys.readouterr().out.strip().splitlines()
    found = [re.findall(r"\(([\d.]+)\)", line) for line in lines]
    assert found == [[], [], ["1.00", "0.10"], ["3.00", "1.00"]]


@pytest.mark.slow
def test_two_processes_save_and_restore(tmp_path):
    sizes = ["--fixed_mb=2", "--each_mb=1", "--processes=1,2", "--num_rounds=1"]
    command = [sys.executable, str(_PATH), "--parts=processes", *sizes]
    done = subprocess.run(
        [*command, f"--folder={tmp_path}/scale"],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"PYTHONPATH": str(_PATH.parents[1])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if "MB" in line]
    assert len(rows) == 4
