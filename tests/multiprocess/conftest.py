"""Runs one job as several real processes, breaks one of them, and reads what is left.

A job has a free port, a log for each process, one JSON result, and a deadline after
which all of its processes are killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from jaxft.checkpoint import layout, manifest
from jaxft.events import parse_line, read_events

REPO = pathlib.Path(__file__).parents[2]
# The demo, small: about ten milliseconds a step.
SMALL = {
    "model.width": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "data.seq_len": 32,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 5,
    "optimizer.decay_steps": 1000,
    "train.num_steps": 30,
    "eval.every_steps": 0,
    "checkpoint.save": "steps(10)",
    "distributed.start_secs": 60,
    "log.event_secs": 0,
}


@dataclasses.dataclass(frozen=True)
class Result:
    """How one process ended; `<logs>/result.json` holds those of all."""

    index: int
    code: int
    secs: float
    out: str
    err: str


class Job:
    """Processes of one job on one workdir.

    Args:
        workdir: of the run.
        logs: where the logs go.
        settings: of the config, path -> value.
    """

    def __init__(
        self, workdir: pathlib.Path, *, logs: pathlib.Path, settings: dict[str, Any]
    ):
        self.workdir = workdir
        self.settings = SMALL | settings
        self.processes: list[subprocess.Popen[bytes]] = []
        self._logs = logs
        self._began = 0.0

    def start(
        self,
        num_processes: int = 2,
        *,
        devices: int = 1,
        own: Mapping[int, Sequence[str]] | None = None,
        only: Sequence[int] | None = None,
        late_secs: Mapping[int, float] | None = None,
    ) -> Job:
        """Starts the job; one process of it is started without any flag.

        Args:
            num_processes: of the job.
            devices: of each process.
            own: more words for single processes.
            only: those that are started; the others never come.
            late_secs: how much later than the others some are started.
        """
        self._warm()
        self._began = time.monotonic()
        self._logs.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.processes = []
        for index in only or range(num_processes):
            if late := (late_secs or {}).get(index):
                time.sleep(late)
            words = ["--role=work", *(own or {}).get(index, ())]
            if num_processes > 1:
                words += [
                    f"--num_processes={num_processes}",
                    f"--process_index={index}",
                    f"--coordinator=127.0.0.1:{port}",
                ]
            with (
                (self._logs / f"{index}.out").open("wb") as out,
                (self._logs / f"{index}.err").open("wb") as err,
            ):
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "jaxft.main"),
                        f"--config={REPO / 'configs' / 'tiny_lm.py'}",
                        f"--workdir={self.workdir}",
                        *(f"--config.{p}={v}" for p, v in self.settings.items()),
                        *words,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=_environment(devices),
                    start_new_session=True,
                )
            self.processes.append(process)
        return self

    def _warm(self) -> None:
        """Fills the compile cache by what earlier jobs of this session compiled."""
        cache = self.workdir / "compile_cache"
        if _programs().is_dir() and not cache.exists():
            shutil.copytree(_programs(), cache)

    def keep_programs(self) -> None:
        """Adds what was compiled here to what the next jobs begin with."""
        cache = self.workdir / "compile_cache"
        for path in cache.glob("*/*-cache"):
            kept = _programs() / path.relative_to(cache)
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                new = kept.with_name(f".{os.getpid()}")
                shutil.copyfile(path, new)
                new.rename(kept)

    def finish(self, *, timeout_secs: float = 150.0) -> list[Result]:
        """Waits for all processes; those that are not over in time are killed."""
        deadline = time.monotonic() + timeout_secs
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes) and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = time.monotonic()
            time.sleep(0.01)
        self.kill()
        results = [
            Result(
                index=index,
                code=process.returncode,
                secs=ended.get(index, time.monotonic()) - self._began,
                out=self._text(index, "out"),
                err=self._text(index, "err"),
            )
            for index, process in enumerate(self.processes)
        ]
        told = [dataclasses.asdict(result) for result in results]
        (self._logs / "result.json").write_text(json.dumps(told))
        late = [i for i in range(len(self.processes)) if i not in ended]
        assert not late, f"not over in {timeout_secs} s: {late}, {told}"
        return results

    def run(self, num_processes: int = 2, **options: Any) -> list[Result]:
        return self.start(num_processes, **options).finish()

    def kill(self) -> None:
        """Whatever still runs, with all of its children."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_for_step(self, step: int, *, timeout_secs: float = 150.0) -> None:
        """Returns when process 0 has told of `step`."""
        self.wait_for(
            lambda: any(e["step"] >= step for e in self.events("step")),
            timeout_secs=timeout_secs,
        )

    def wait_for(
        self, ready: Callable[[], Any], *, timeout_secs: float = 150.0
    ) -> None:
        deadline = time.monotonic() + timeout_secs
        while not ready():
            if time.monotonic() > deadline or any(
                process.poll() is not None for process in self.processes
            ):
                pytest.fail(f"it did not come so far: {self.finish(timeout_secs=1)}")
            time.sleep(0.01)

    def events(
        self, kind: str | None = None, *, process: int | None = None
    ) -> list[dict[str, Any]]:
        """Of the last start, in order of time; of one process where it is given."""
        pids = [p.pid for p in self.processes]
        if process is not None:
            pids = [pids[process]]
        return [
            event
            for event in read_events(self.workdir / "events")
            if event["pid"] in pids and kind in (None, event["kind"])
        ]

    def losses(self) -> dict[int, float]:
        """Step -> loss, over all starts; every process must have seen the same."""
        losses: dict[int, float] = {}
        for event in read_events(self.workdir / "events"):
            if event["kind"] == "step":
                loss = event["metrics"]["loss"]
                assert losses.setdefault(event["step"], loss) == loss, event
        return losses

    def fingerprints(self, step: int) -> dict[str, str]:
        """Leaf path -> fingerprint, of a committed step."""
        leaves = manifest.read(layout.step_path(self.workdir / "checkpoints", step))
        return {path: str(leaf.fingerprint) for path, leaf in leaves.leaves.items()}

    def steps(self) -> list[int]:
        return layout.discover(self.workdir / "checkpoints").steps

    def _text(self, index: int, stream: str) -> str:
        return (self._logs / f"{index}.{stream}").read_text(errors="replace")


def _programs() -> pathlib.Path:
    return pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "commands")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment(devices: int) -> dict[str, str]:
    left_out = ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    kept = {name: value for name, value in kept.items() if "_CACHE_" not in name}
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return kept | own | {"PYTHONPATH": str(REPO)}


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs; what still runs at the end of the test is killed."""
    made: list[Job] = []

    def make(name: str = "run", **settings: Any) -> Job:
        plain = {path.replace("__", "."): value for path, value in settings.items()}
        logs = tmp_path / f"{name}-logs"
        made.append(Job(tmp_path / name, logs=logs, settings=plain))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        one.keep_programs()


def kinds(text: str) -> list[str]:
    """Of event lines in a text."""
    events = map(parse_line, text.splitlines())
    return [event["kind"] for event in events if event]
