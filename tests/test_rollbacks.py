"""Bad steps are undone in the running process, and their batches left out for good."""

import gc
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import jaxft
from jaxft import rollbacks
from jaxft.checkpoint import decisions, run_record
from jaxft.config import Config, ConfigError, Corpus, Schedule
from jaxft.events import read_events
from jaxft.records import ExitCode, FaultError

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]

# Batches 9 to 11 are bad; around the first of them 8 to 13 are left out.
BAD = {"faults.inject": "nan_grad@9-11", "train.max_nonfinite": 3}
WINDOW = (8, 14)


def small(num_steps: int = 16, **overrides: Any) -> Config:
    config = Config()
    config.model.width = 16
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.mesh.num_devices = 1
    config.data.corpus = Corpus.SYNTHETIC
    config.data.seq_len = 16
    config.data.global_batch = 4
    config.optimizer.schedule = Schedule.CONSTANT
    config.train.num_steps = num_steps
    config.checkpoint.save = "steps(2)"
    config.checkpoint.keep = "last(9)"
    # Where each border's save is to be there, none may be skipped.
    config.rollback.skip_after = 4
    for path, value in overrides.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    return config


def _events(workdir: pathlib.Path, kind: str) -> list[Any]:
    return [e for e in read_events(workdir / "events") if e["kind"] == kind]


def _bits(state: Any) -> list[bytes]:
    leaves = jax.tree.leaves((state.params, state.opt_state, state.step))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_the_same_bits_as_without_the_batches_from_the_start(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = jaxft.run(small(**BAD), workdir=tmp_path / "run")
    told = capsys.readouterr()
    assert "rolled back from step " in told.err
    assert "without batches 8 to 13" in told.err
    assert "\nrollbacks " in told.out
    assert int(state.num_skipped) == 0
    drawn = [e["batch"] for e in _events(tmp_path / "run", "injected")]
    assert drawn[:3] == [9, 10, 11]
    assert set(drawn) <= {9, 10, 11}
    (bad,) = _events(tmp_path / "run", "bad_steps")
    assert (bad["fault"], bad["first_step"], bad["first_batch"]) == ("nonfinite", 10, 9)
    (one,) = decisions.read(tmp_path / "run" / "checkpoints").rollbacks
    assert (one.skip, one.cause) == (WINDOW, "nonfinite")
    assert one.to <= 8
    # Nothing was compiled again.
    assert len(_events(tmp_path / "run", "compile")) == 1
    skipped = small(**BAD, **{"data.skip": "8-13"})
    straight = jaxft.run(skipped, workdir=tmp_path / "straight")
    assert not _events(tmp_path / "straight", "injected")
    assert _bits(state) == _bits(straight)
    record = run_record.read_record(str(tmp_path / "straight/checkpoints/16"))
    assert record["data"]["skipped"] == [list(WINDOW)]


@pytest.mark.slow
def test_a_disk_that_takes_no_decision_is_a_failed_save(tmp_path: pathlib.Path) -> None:
    # A file where the folder of the decisions is to be.
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    (root / "decisions").write_text("")
    with pytest.raises(FaultError, match=r"in steps 10 to 12; .* no rollback: ") as bad:
        jaxft.run(small(**BAD), workdir=tmp_path / "run")
    assert bad.value.fault.exit_code == ExitCode.SAVE_FAILED


@pytest.mark.slow
def test_the_bad_state_is_gone_before_the_good_one_comes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []
    original = rollbacks.roll_back

    def roll_back(*args: Any, **kwargs: Any) -> None:
        gc.collect()
        alive.append(sum(array.nbytes for array in jax.live_arrays()))
        original(*args, **kwargs)

    monkeypatch.setattr(rollbacks, "roll_back", roll_back)
    before = sum(array.nbytes for array in jax.live_arrays())
    state = jaxft.run(small(**BAD), workdir=tmp_path / "run")
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert len(alive) == 1
    assert alive[0] - before < num_bytes / 4


@pytest.mark.slow
def test_bad_for_ever_is_given_up_with_a_report(tmp_path: pathlib.Path) -> None:
    bad = BAD | {"faults.inject": "bad_batch@9-9999", "rollback.max_rollbacks": 2}
    with pytest.raises(FaultError) as error:
        jaxft.run(small(999, **bad), workdir=tmp_path / "run")
    assert error.value.fault.exit_code == ExitCode.NONFINITE
    text = str(error.value)
    assert "given up: rolled back 2 times within 1000 batches already" in text
    assert text.count("not finite in steps") == 3
    windows = [
        one.skip for one in decisions.read(tmp_path / "run" / "checkpoints").rollbacks
    ]
    assert windows == [(8, 14), (12, 23)]


@pytest.mark.slow
def test_a_run_that_was_never_saved_cannot_go_back(tmp_path: pathlib.Path) -> None:
    config = small(**BAD, **{"checkpoint.save": "steps(100)"})
    with pytest.raises(FaultError, match="no checkpoint from before step 10") as error:
        jaxft.run(config, workdir=tmp_path / "run")
    assert error.value.fault.exit_code == ExitCode.NONFINITE


@pytest.mark.slow
def test_without_the_guard_too(tmp_path: pathlib.Path) -> None:
    bad = BAD | {"train.guard": False}
    state = jaxft.run(small(**bad), workdir=tmp_path / "run")
    (one,) = decisions.read(tmp_path / "run" / "checkpoints").rollbacks
    assert one.skip == WINDOW
    skipped = small(**bad, **{"data.skip": "8-13"})
    straight = jaxft.run(skipped, workdir=tmp_path / "straight")
    assert _bits(state) == _bits(straight)


@pytest.mark.slow
def test_a_spike_is_undone(tmp_path: pathlib.Path) -> None:
    spike = {
        "faults.inject": "spike@30-33",
        "rollback.spike_factor": 20.0,
        "rollback.spike_window": 20,
        "rollback.spike_steps": 3,
        "rollback.spike_margin_steps": 5,
    }
    state = jaxft.run(small(40, **spike), workdir=tmp_path / "run")
    (bad,) = _events(tmp_path / "run", "bad_steps")
    assert (bad["fault"], bad["first_batch"]) == ("spike", 30)
    (one,) = decisions.read(tmp_path / "run" / "checkpoints").rollbacks
    assert (one.skip, one.cause) == ((29, 35), "spike")
    assert one.to <= 25
    skipped = small(40, **spike, **{"data.skip": "29-34"})
    straight = jaxft.run(skipped, workdir=tmp_path / "straight")
    assert _bits(state) == _bits(straight)


@pytest.mark.slow
def test_skips_can_be_added_to_what_lies_ahead(tmp_path: pathlib.Path) -> None:
    jaxft.run(small(4), workdir=tmp_path / "run")
    late = small(8, **{"data.skip": "2-3", "resume.allow": "data.skip"})
    with pytest.raises(ConfigError, match=r"data\.skip: step 4 .* cannot be left out"):
        jaxft.run(late, workdir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data\.skip: \(absent\) -> 5-6"):
        jaxft.run(small(8, **{"data.skip": "5-6"}), workdir=tmp_path / "run")
    ahead = small(8, **{"data.skip": "5-6", "resume.allow": "data.skip"})
    state = jaxft.run(ahead, workdir=tmp_path / "run")
    straight = jaxft.run(small(8, **{"data.skip": "5-6"}), workdir=tmp_path / "other")
    assert _bits(state) == _bits(straight)


def test_a_wrong_skip_is_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.skip: '9-3' is empty"):
        jaxft.run(small(**{"data.skip": "9-3"}), workdir=tmp_path / "run")
    assert os.listdir(tmp_path) == []
