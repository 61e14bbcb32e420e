"""On a real GPU: the same bits through stops, restores and processes.

Run as `JAX_PLATFORMS=cuda pytest -m gpu -n 0 tests/gpu`; skipped elsewhere.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxft import config as configs
from jaxft import settings
from jaxft.build import build
from jaxft.config import Config, Corpus
from jaxft.events import read_events
from jaxft.records import ignore_event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="needs a GPU and JAX_PLATFORMS=cuda"
    ),
]

REPO = pathlib.Path(__file__).parents[2]
# Deterministic kernels; without them two runs of the same program differ.
FLAGS = "--xla_gpu_deterministic_ops=true"
SETTINGS = {
    "data.corpus": "synthetic",
    "data.global_batch": 32,
    "train.num_steps": 400,
    "eval.every_steps": 0,
    "checkpoint.save": "steps(50)",
    "precision.compute_dtype": "bfloat16",
    "log.event_secs": 0,
}


def start(workdir: pathlib.Path) -> subprocess.Popen[str]:
    # The test process holds memory of the same device.
    environment = os.environ | {
        "XLA_FLAGS": FLAGS,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": str(REPO),
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "jaxft.main"),
            f"--config={REPO / 'configs' / 'tiny_lm.py'}",
            f"--workdir={workdir}",
            *(f"--config.{path}={value}" for path, value in SETTINGS.items()),
        ],
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
    )


def losses(workdir: pathlib.Path) -> dict[int, float]:
    found: dict[int, float] = {}
    for event in read_events(workdir / "events"):
        if event["kind"] == "step":
            loss = event["metrics"]["loss"]
            assert found.setdefault(event["step"], loss) == loss, event["step"]
    return found


def test_killed_and_undisturbed_runs_have_the_same_losses(
    tmp_path: pathlib.Path,
) -> None:
    # Two of them: a run that is not deterministic tells nothing about restarts.
    for name in ("reference", "again"):
        undisturbed = start(tmp_path / name)
        _, err = undisturbed.communicate()
        assert undisturbed.returncode == 0, err
    theirs = losses(tmp_path / "reference")
    assert theirs.keys() == set(range(1, 401))
    assert losses(tmp_path / "again") == theirs, "the run itself is not deterministic"
    killed = start(tmp_path / "killed")
    for attempt in range(3):
        pid = None
        while pid is None:
            time.sleep(0.05)
            assert killed.poll() is None
            events = read_events(tmp_path / "killed" / "events")
            pids = [
                e["worker_pid"]
                for e in events
                if e["kind"] == "launch" and e["attempt"] == attempt
            ]
            if pids and any(
                e["kind"] == "step" and e["pid"] == pids[0] for e in events
            ):
                pid = pids[0]
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
    _, err = killed.communicate()
    assert killed.returncode == 0, err
    ours = losses(tmp_path / "killed")
    assert ours == {step: theirs[step] for step in ours}
    assert json.dumps(theirs)


def test_restored_state_is_bit_equal_and_donated(tmp_path: pathlib.Path) -> None:
    config = Config()
    config.data.corpus = Corpus.SYNTHETIC
    settings.lock(configs.resolve(config))
    parts = build(config, workdir=tmp_path, emit=ignore_event)
    state = parts.train_step.init()
    batch, word = parts.train_step.place(next(parts.iterator))
    state, _ = parts.train_step(state, batch, word)
    before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    parts.manager.save(1, state, data=parts.iterator.get_state(), force=True)
    parts.manager.wait()
    restored = parts.manager.restore(parts.train_step.abstract_state)
    assert restored is not None
    after = [np.asarray(x) for x in jax.tree.leaves(restored.state.params)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    parts.train_step(restored.state, batch, word)
    assert all(x.is_deleted() for x in jax.tree.leaves(restored.state.params))
    parts.iterator.close()


@pytest.mark.parametrize("plan", ["dots", "names(attn,up)", "full", "offload(attn,up)"])
def test_remat_lowers_the_compiled_memory(tmp_path: pathlib.Path, plan: str) -> None:
    temp_bytes = {}
    for each in ("none", plan):
        config = Config()
        config.data.corpus = Corpus.SYNTHETIC
        config.model.num_layers = 8
        config.remat.plan = each
        settings.lock(configs.resolve(config))
        parts = build(config, workdir=tmp_path, emit=ignore_event)
        batch, word = parts.train_step.place(parts.example)
        compiled = parts.train_step.lower(
            parts.train_step.abstract_state, batch, word
        ).compile()
        temp_bytes[each] = compiled.memory_analysis().temp_size_in_bytes
        parts.iterator.close()
    assert temp_bytes[plan] < temp_bytes["none"]
