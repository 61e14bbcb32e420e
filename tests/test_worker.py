"""How a run begins: from its mirror, from parameters of others, after a rollback."""

import os
import pathlib
import shutil
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import jaxft
from jaxft import config as configs
from jaxft import settings, worker
from jaxft.checkpoint import decisions, run_record
from jaxft.config import Config, ConfigError, Corpus, ResumeMode, Schedule
from jaxft.events import EventLog, read_events
from jaxft.faults.preemption import StopRequests
from jaxft.records import ExitCode, FaultError
from jaxft.recovery.workdir import WorkdirLock

pytestmark = pytest.mark.device


def small(num_steps: int = 4, **overrides: Any) -> Config:
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
    for path, value in overrides.items():
        section, name = path.split("__")
        setattr(getattr(config, section), name, value)
    return config


def _events(workdir: pathlib.Path, kind: str) -> list[Any]:
    return [e for e in read_events(workdir / "events") if e["kind"] == kind]


def _equal(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_a_run_that_lost_its_disk_goes_on_from_the_mirror(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = str(tmp_path / "mirror")
    straight = jaxft.run(small(8), workdir=tmp_path / "straight")
    jaxft.run(small(4, checkpoint__mirror=mirror), workdir=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"never, but .* holds step 4"):
        jaxft.run(
            small(8, checkpoint__mirror=mirror, resume__mode=ResumeMode.NEVER),
            workdir=tmp_path / "run",
        )
    required = small(8, checkpoint__mirror=mirror, resume__mode=ResumeMode.REQUIRED)
    state = jaxft.run(required, workdir=tmp_path / "run")
    assert _equal(state.params, straight.params)
    (restored,) = _events(tmp_path / "run", "restore")
    assert restored["step"] == 4
    assert _events(tmp_path / "run", "mirror_fetch")[0]["step"] == 4
    told = capsys.readouterr()
    assert f"resuming at step 4, fetched from the mirror {mirror}\n" in told.err
    assert "step 8 is its newest" in told.out


@pytest.mark.slow
def test_parameters_of_another_run_with_everything_else_fresh(
    tmp_path: pathlib.Path,
) -> None:
    first = jaxft.run(small(4), workdir=tmp_path / "first")
    origin = str(tmp_path / "first" / "checkpoints")
    chosen = small(
        1,
        init__checkpoint=origin,
        optimizer__learning_rate=1e-30,
        optimizer__weight_decay=0.0,
        train__ema_decay=0.5,
    )
    second = jaxft.run(chosen, workdir=tmp_path / "second")
    assert int(second.step) == 1
    assert _equal(second.params, first.params)
    assert _equal(second.opt_state.average, first.params)
    # Read once: from now on the run has checkpoints of its own.
    shutil.rmtree(tmp_path / "first")
    assert int(jaxft.run(chosen, workdir=tmp_path / "second").step) == 1


@pytest.mark.parametrize("where", ["nowhere", "first/checkpoints/77"])
def test_an_origin_that_is_not_there_is_no_fresh_start(
    tmp_path: pathlib.Path, where: str
) -> None:
    config = small(init__checkpoint=str(tmp_path / where))
    with pytest.raises(ConfigError, match=f"init.checkpoint: .*{where} is not there"):
        jaxft.run(config, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rename_rule_that_is_none_is_named(tmp_path: pathlib.Path) -> None:
    config = small(init__checkpoint=str(tmp_path), init__rename="a to b")
    with pytest.raises(ConfigError, match=r"init\.rename"):
        jaxft.run(config, workdir=tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"checkpoint__mirror": "/proc/nope"}, "checkpoint.mirror"),
        ({"checkpoint__mirror": "run/copy"}, ""),
        ({"checkpoint__mirror": "run/checkpoints"}, "checkpoint.mirror"),
        ({"init__checkpoint": "other"}, "init.checkpoint"),
    ],
)
def test_a_place_that_cannot_work_leaves_the_workdir_as_it_was(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, str],
    path: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    if not path:
        # Beside the root, within the workdir, it is as good as any.
        overrides |= {"init__checkpoint": "other"}
        path = "init.checkpoint"
    with pytest.raises(ConfigError) as caught:
        jaxft.run(small(**overrides), workdir=tmp_path / "run")
    assert caught.value.path == path
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.slow
def test_a_rollback_goes_on_from_its_step_without_the_skipped_batches(
    tmp_path: pathlib.Path,
) -> None:
    # As few steps as make it sure that each border's save is not skipped.
    jaxft.run(small(2), workdir=tmp_path / "run")
    jaxft.run(small(4), workdir=tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    decisions.roll_back(root, to=2, reason="loss spike", skip=(2, 4))
    jaxft.run(small(4), workdir=tmp_path / "run")
    restored = [event["step"] for event in _events(tmp_path / "run", "restore")]
    assert restored == [2, 2]
    record = run_record.read_record(str(root / "4"))
    assert record["timeline"] == 1
    assert record["data"]["skipped"] == [[2, 4]]
    # The windows are in the data position now: a further start adds nothing.
    jaxft.run(small(6), workdir=tmp_path / "run")
    record = run_record.read_record(str(root / "6"))
    assert record["data"]["skipped"] == [[2, 4]]
    assert (root / "4.abandoned-t0").is_dir()


def test_what_this_command_has_saved_is_no_fresh_start(tmp_path: pathlib.Path) -> None:
    config = settings.lock(configs.resolve(small(1)))
    with WorkdirLock.acquire(tmp_path / "run") as lock:
        log = EventLog(lock.workdir / "events", role="worker")
        with StopRequests(config.preemption, emit=log) as stops:
            one = worker.Worker(
                config,
                workdir=lock.workdir,
                log=log,
                stops=stops,
                attempt=1,
                committed_step=7,
            )
            with pytest.raises(FaultError, match="step 7 was saved, and"):
                one.live()
    (fault,) = _events(tmp_path / "run", "fault")
    assert (fault["exit_code"], fault["step"]) == (66, 7)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_a_stop_ends_the_wait_for_the_mirror(
    tmp_path: pathlib.Path, again: bool
) -> None:
    config = small(
        1,
        checkpoint__mirror=str(tmp_path / "mirror"),
        checkpoint__mirror_rate="1MiB",
        model__width=512,
        preemption__signals="SIGUSR1",
        preemption__grace_secs=60.0 if again else 1.0,
    )
    config = settings.lock(configs.resolve(config))
    started: list[float] = []

    def listen(line: str) -> None:
        if '"mirror"' in line:
            # The first asks; the second says: now.
            os.kill(os.getpid(), signal.SIGUSR1)
            started.append(time.monotonic())
            if again:
                timer = threading.Timer(3.5, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()

    with WorkdirLock.acquire(tmp_path / "run") as lock:
        log = EventLog(lock.workdir / "events", role="worker", tee=listen)
        with StopRequests(config.preemption, emit=log) as stops:
            one = worker.Worker(config, workdir=lock.workdir, log=log, stops=stops)
            _, ending = one.live()
            assert ending == "stopped"  # Not all of it is where it shall be.
            assert time.monotonic() - started[0] < 10
    phases = [e["name"] for e in _events(tmp_path / "run", "phase")]
    assert phases[-1] == "mirror"
    (failed,) = _events(tmp_path / "run", "mirror_failed")
    assert "not over within" in failed["reason"]
    assert _events(tmp_path / "run", "end")


@pytest.mark.slow
def test_a_last_state_that_is_not_finite_is_no_success(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(
        6,
        optimizer__learning_rate=2e9,
        optimizer__weight_decay=2e9,
        train__guard=False,
        checkpoint__save="steps(100)",
    )
    with pytest.raises(FaultError, match="not finite") as error:
        jaxft.run(config, workdir=tmp_path / "run")
    assert error.value.fault.exit_code == ExitCode.NONFINITE
    assert _events(tmp_path / "run", "save_unhealthy")
    assert "step 6 was not saved: params/" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_that_is_moved_aside_is_told_at_once(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jaxft.run(small(2), workdir=tmp_path / "run")
    jaxft.run(small(4), workdir=tmp_path / "run")
    (tmp_path / "run/checkpoints/4/run/metadata").unlink()
    capsys.readouterr()
    jaxft.run(small(4), workdir=tmp_path / "run")
    told = capsys.readouterr().err
    moved = tmp_path / "run/checkpoints/4.quarantined-1"
    assert "step 4 was moved aside: " in told
    assert f"kept as {moved}\n" in told
    assert told.index("moved aside") < told.index("resuming at step 2")
