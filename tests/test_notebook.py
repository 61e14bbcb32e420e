"""A run in somebody else's process: it is told of a hang, and not ended."""

import pathlib

import pytest

import jaxft
from jaxft.config import Config
from jaxft.events import read_events
from jaxft.limits import read_learnt
from jaxft.records import Phase

pytestmark = pytest.mark.device

# One row comes only after a hang was reported.
ROWS = """
import pathlib, time
import numpy as np
from jaxft.data.sources import Sources

def the_culprit(folder):
    deadline = time.monotonic() + 60
    while not list(pathlib.Path(folder).glob("*-hang-*.txt")):
        assert time.monotonic() < deadline
        time.sleep(0.02)

class Rows:
    fingerprint = "rows"

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            the_culprit(self.folder)
        row = np.full(17, index, np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}

def make_data(config):
    return Sources(Rows(config.options.folder))
"""


def test_a_hang_is_told_and_the_run_goes_on(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "rows_that_wait.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    workdir = tmp_path / "run"
    config = small()
    config.data.factory = "rows_that_wait:make_data"
    config.data.shuffle = False
    config.data.options.folder = str(workdir / "events")
    config.hang.min_secs = 0.2
    config.hang.first_secs = 40.0
    config.checkpoint.timeout_secs = 30.0
    state = jaxft.run(config, workdir=workdir)
    assert int(state.step) == 14
    events = read_events(workdir / "events")
    hang = next(event for event in events if event["kind"] == "hang")
    assert (hang["phase"], hang["seen_by"]) == ("data", "watchdog")
    assert "in the_culprit" in hang["stacks"]
    assert "in phase data; what all threads do is in" in capsys.readouterr().err
    assert not [event for event in events if event["kind"] == "fault"]
    assert read_learnt(workdir).longest_secs(Phase.STEP) is not None


def small() -> Config:
    config = Config()
    config.model.width = 16
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.mesh.num_devices = 1
    config.data.seq_len = 16
    config.data.global_batch = 4
    config.optimizer.warmup_steps = 2
    config.train.num_steps = 14
    config.checkpoint.save = "steps(100)"
    return config
