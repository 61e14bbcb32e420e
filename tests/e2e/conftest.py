"""Runs the real command in real processes, breaks it, and compares bits."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxft.checkpoint import layout, manifest
from jaxft.checkpoint.run_record import read_record
from jaxft.events import read_events
from jaxft.process_state import process_state
from jaxft.recovery.generations import Generation, Generations

REPO = pathlib.Path(__file__).parents[2]

# The demo, small: the same code in every part, about ten milliseconds a step.
SMALL = {
    "model.width": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "data.seq_len": 32,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 5,
    "optimizer.decay_steps": 1000,
    "train.num_steps": 60,
    "eval.every_steps": 0,
    "checkpoint.save": "steps(10)",
    "supervisor.max_restarts": 100,
    # Few of these runs last long enough to need one; all would make room for it.
    "supervisor.spare": "never",
    "log.event_secs": 0,
}


def programs() -> pathlib.Path:
    """What earlier commands of this session have compiled, in all its processes."""
    return pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "commands")


class Command:
    """One `python -m jaxft.main` on one workdir.

    Its compile cache is warm, as after a restart, unless the workdir is to be `cold`.
    `num_devices` are the CPU devices of the next start; `prefix` is a command that
    becomes it, such as `unshare`.
    """

    def __init__(self, workdir: pathlib.Path, settings: dict[str, Any], *, cold: bool):
        self.workdir = workdir
        self.settings = SMALL | settings
        self.process: subprocess.Popen[str] | None = None
        self._cache = workdir / "compile_cache"
        self.is_cold = cold
        self.num_devices = 1
        self.prefix: list[str] = []

    def keep_programs(self) -> None:
        """Adds what was compiled here to what the next commands begin with."""
        for path in self._cache.glob("*/*-cache"):
            kept = programs() / path.relative_to(self._cache)
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                new = kept.with_name(f".{os.getpid()}")
                shutil.copyfile(path, new)
                new.rename(kept)

    def argv(self, *words: str) -> list[str]:
        return [
            *(sys.executable, "-m", "jaxft.main"),
            f"--config={REPO / 'configs' / 'tiny_lm.py'}",
            f"--workdir={self.workdir}",
            *(f"--config.{path}={value}" for path, value in self.settings.items()),
            *words,
        ]

    def warm(self) -> None:
        """Fills the compile cache, the first time, unless it is to be cold."""
        if not self.is_cold and programs().is_dir():
            shutil.copytree(programs(), self._cache, dirs_exist_ok=True)
        self.is_cold = True  # What follows finds what it finds.

    def start(self, *words: str) -> subprocess.Popen[str]:
        self.warm()
        self.process = subprocess.Popen(
            [*self.prefix, *self.argv(*words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"JAX_NUM_CPU_DEVICES": str(self.num_devices)},
            start_new_session=True,
        )
        return self.process

    def finish(self, *, timeout_secs: float = 90.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the started command."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=timeout_secs)
        return self.process.returncode, out, err

    def run(self, *words: str, timeout_secs: float = 90.0) -> tuple[int, str, str]:
        self.start(*words)
        return self.finish(timeout_secs=timeout_secs)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        events = read_events(self.workdir / "events")
        return [e for e in events if kind in (None, e["kind"])]

    def wait_for(
        self,
        ready: Callable[[], Any],
        *,
        timeout_secs: float = 60.0,
        poll_secs: float = 0.002,
    ) -> Any:
        """Polls until `ready()` is true and returns what it gave."""
        deadline = time.monotonic() + timeout_secs
        while time.monotonic() < deadline:
            if value := ready():
                return value
            if self.process is not None and self.process.poll() is not None:
                pytest.fail(f"the command ended early: {self.finish()}")
            time.sleep(poll_secs)
        return pytest.fail(f"not within {timeout_secs} s: {ready}")

    def kill_group(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def losses(self) -> dict[int, float]:
        """Step -> loss; a step that ran twice must have given the same bits."""
        losses: dict[int, float] = {}
        for event in self.events("step"):
            loss = event["metrics"]["loss"]
            assert losses.setdefault(event["step"], loss) == loss, event
        return losses

    def state(self, step: int) -> dict[str, Any]:
        """Leaf path -> bytes of the committed state, read by an untouched Orbax."""
        target = self.workdir / "checkpoints" / str(step) / "state"
        code = (
            "import sys, jax, numpy as np, orbax.checkpoint as ocp\n"
            "tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])\n"
            "import json, hashlib\n"
            "def bits(x):\n"
            "    if hasattr(x, 'dtype') and "
            "jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):\n"
            "        x = jax.random.key_data(x)\n"
            "    a = np.asarray(x)\n"
            "    return [str(a.dtype), list(a.shape), "
            "hashlib.sha256(a.tobytes()).hexdigest()]\n"
            "leaves = jax.tree_util.tree_flatten_with_path(tree)[0]\n"
            "print(json.dumps({jax.tree_util.keystr(p): bits(x) for p, x in leaves}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)],
            capture_output=True,
            text=True,
            check=True,
            # As many as a run here has had: Orbax goes by the shardings of the file.
            env=environment() | {"JAX_NUM_CPU_DEVICES": "8"},
        )
        return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """One CPU device, as on a newcomer's machine; this checkout first."""
    left_out = ("JAX_NUM_CPU_DEVICES", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and "_CACHE_" not in name
    }
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}


@pytest.fixture
def clean_environment() -> dict[str, str]:
    return environment()


@pytest.fixture
def command(tmp_path: pathlib.Path) -> Iterator[Callable[..., Command]]:
    """Makes commands; whatever is still running at the end is killed."""
    made: list[Command] = []

    def make(name: str = "run", *, cold: bool = False, **settings: Any) -> Command:
        plain = {path.replace("__", "."): value for path, value in settings.items()}
        made.append(Command(tmp_path / name, plain, cold=cold))
        return made[-1]

    yield make
    for one in made:
        one.kill_group()
        one.keep_programs()
        for event in one.events("launch"):
            # A worker that outlived its supervisor would be a bug of its own.
            assert not _is_alive(event["worker_pid"], one.workdir)


class Job:
    """A command that starts all processes of its job, and a look into it.

    Who runs is asked of the kernel, not of what the run has written: a process that is
    just starting counts, and one that has ended does not, whatever anybody says of it.

    Attributes:
        down_secs: how soon all workers have to be down once one process is dead.
        busy_secs: what a machine that is busy with other things may add to that.
    """

    down_secs = 3.0
    busy_secs = 3.0
    deadline_secs = 150.0

    def __init__(self, run: Command, num_processes: int):
        self.run = run
        self.num_processes = num_processes
        self._offsets: dict[pathlib.Path, int] = {}
        self._newest_step = 0

    def start(self) -> None:
        self.run.start(f"--num_processes={self.num_processes}")

    def finish(self) -> tuple[int, str, str]:
        return self.run.finish(timeout_secs=240)

    def running(self, role: str) -> dict[int, int]:
        """Process index -> process id, of the `worker`s or `supervisor`s that live."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            who, index = self._who(entry) if entry.name.isdigit() else ("", -1)
            if who == role:
                found[index] = int(entry.name)
        return found

    def _who(self, entry: pathlib.Path) -> tuple[str, int]:
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            leads = os.getsid(int(entry.name)) == int(entry.name)
        except (OSError, UnicodeDecodeError):
            return "", -1
        index = [w for w in words if w.startswith("--process_index=")]
        # What a worker starts is in its session and bears its name for a moment.
        if f"--workdir={self.run.workdir}" not in words or not index or not leads:
            return "", -1
        roles = [w.partition("=")[2] for w in words if w.startswith("--role=")]
        role = {"work": "worker", "": "supervisor"}.get("".join(roles), "")
        return role, int(index[0].partition("=")[2])

    def pid(self, role: str, index: int) -> int:
        """Of a process that lives, or will soon."""
        return self.run.wait_for(
            lambda: self.running(role).get(index),
            timeout_secs=self.deadline_secs,
            poll_secs=0.05,
        )

    def newest_step(self) -> int:
        """The highest step that anybody has told of; reads only what is new."""
        for path in (self.run.workdir / "events").glob("*.jsonl"):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = offset + len(whole + newline)
            for line in whole.splitlines():
                if b'"step"' in line and (event := json.loads(line))["kind"] == "step":
                    self._newest_step = max(self._newest_step, event["step"])
        return self._newest_step

    def wait_for_step(self, step: int) -> None:
        self.run.wait_for(
            lambda: self.newest_step() >= step,
            timeout_secs=self.deadline_secs,
            poll_secs=0.02,
        )

    def wait_for_save(self, step: int) -> None:
        """Until what an unfinished save of that step writes is there."""
        root = self.run.workdir / "checkpoints"
        self.run.wait_for(
            lambda: root.is_dir() and list(root.glob(f"{step}*")),
            timeout_secs=self.deadline_secs,
        )

    def kill(self, role: str, index: int) -> float:
        """Seconds until all workers that lived are dead; it waits for its victim."""
        victim = self.pid(role, index)
        living = list(self.running("worker").values())
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.wait_until_dead(living)
        return time.monotonic() - began

    def wait_until_dead(self, pids: Sequence[int]) -> None:
        """By the kernel; a zombie is dead."""
        deadline = time.monotonic() + 60
        while any(process_state(pid).letter not in "?ZX" for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.01)

    def files(self) -> Generations:
        return Generations(self.run.workdir)

    def generations(self) -> list[Generation]:
        files = self.files()
        found = [files.read(n) for n in range(1, files.newest_number() + 1)]
        assert None not in found
        return [generation for generation in found if generation is not None]

    def fingerprints(self) -> dict[str, Any]:
        """Of the last step, by leaf."""
        step = str(self.run.settings["train.num_steps"])
        found = manifest.read(self.run.workdir / "checkpoints" / step)
        return {path: leaf.fingerprint for path, leaf in found.leaves.items()}

    def check_same(self, other: Job) -> None:
        """The same state at the end and the same loss at each step, to the bit."""
        ours, theirs = self.fingerprints(), other.fingerprints()
        assert len(theirs) > 30
        assert ours == theirs
        ours, theirs = self.run.losses(), other.run.losses()
        num_steps = other.run.settings["train.num_steps"]
        assert sorted(theirs) == list(range(1, num_steps + 1))
        assert ours == theirs


class Hosts(Job):
    """The members of a job, each a command of its own, as on hosts of their own."""

    def __init__(self, commands: Sequence[Command]):
        super().__init__(commands[0], len(commands))
        self.commands = commands
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.coordinator = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, *indices: int) -> None:
        """Starts these, or all."""
        for index in indices or range(self.num_processes):
            self.commands[index].start(
                f"--num_processes={self.num_processes}",
                f"--process_index={index}",
                f"--coordinator={self.coordinator}",
            )

    def kill_hosts(self, *indices: int) -> float:
        """Whole ones; seconds until the workers of the others are dead, too."""
        living = list(self.running("worker").values())
        victims = [self.commands[index].process for index in indices]
        began = time.monotonic()
        for process in victims:
            assert process is not None
            process.kill()
        self.wait_until_dead(living)
        secs = time.monotonic() - began
        for process in victims:
            assert process is not None
            process.communicate()
        return secs

    def finish(self, *, code: int = 0) -> None:
        for command in self.commands:
            found, _, err = command.finish(timeout_secs=240)
            assert found == code, err


@pytest.fixture
def hosts(command: Callable[..., Command]) -> Callable[..., Hosts]:
    """Makes jobs whose members are started one by one, of 40 steps."""

    def make(name: str = "run", *, num_hosts: int = 2, **settings: Any) -> Hosts:
        settings = {"train__num_steps": 40} | settings
        return Hosts([command(name, **settings) for _ in range(num_hosts)])

    return make


@pytest.fixture
def job(command: Callable[..., Command]) -> Callable[..., Job]:
    """Makes jobs of several processes on this machine, of 40 steps."""

    def make(name: str = "run", *, num_processes: int = 2, **settings: Any) -> Job:
        return Job(command(name, **{"train__num_steps": 40} | settings), num_processes)

    return make


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """Jobs that nothing happened to, by their number of processes and settings."""
    made: dict[str, Job] = {}

    def get(num_processes: int, **settings: Any) -> Job:
        settings = {"train__num_steps": 40} | settings
        key = json.dumps([num_processes, settings], sort_keys=True)
        if key not in made:
            plain = {path.replace("__", "."): value for path, value in settings.items()}
            workdir = tmp_path_factory.mktemp("reference") / "run"
            one = Job(Command(workdir, plain, cold=False), num_processes)
            one.start()
            code, _, err = one.finish()
            assert code == 0, err
            one.run.keep_programs()
            made[key] = one
        return made[key]

    return get


def _is_alive(pid: int, workdir: pathlib.Path) -> bool:
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(workdir).encode() in words


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Command]:
    """Runs that nothing happened to, one for each choice of settings."""
    runs: dict[str, Command] = {}

    def get(**settings: Any) -> Command:
        key = json.dumps(settings, sort_keys=True)
        if key not in runs:
            plain = {path.replace("__", "."): value for path, value in settings.items()}
            workdir = tmp_path_factory.mktemp("undisturbed") / "run"
            run = Command(workdir, plain, cold=False)
            code, _, err = run.run()
            assert code == 0, err
            run.keep_programs()
            runs[key] = run
        return runs[key]

    return get


@pytest.fixture
def same_samples() -> Callable[[Command, Command], None]:
    """Asserts that two runs read the same samples up to each step that both saved.

    What the record of a step says of the data names, with the step, all samples that
    went before: a batch is a pure function of it.
    """

    def check(run: Command, reference: Command) -> None:
        found = []
        for one in (run, reference):
            root = one.workdir / "checkpoints"
            paths = {s: layout.step_path(root, s) for s in layout.discover(root).steps}
            found.append({s: read_record(path)["data"] for s, path in paths.items()})
        ours, theirs = found
        both = ours.keys() & theirs.keys()
        assert run.settings["train.num_steps"] in both
        assert len(both) > 1
        assert {s: ours[s] for s in both} == {s: theirs[s] for s in both}

    return check


@pytest.fixture
def same() -> Callable[[Command, Command, int], None]:
    """Asserts that two runs ended in the same bits."""

    def check(run: Command, reference: Command, step: int) -> None:
        assert run.state(step) == reference.state(step)
        ours, theirs = run.losses(), reference.losses()
        assert theirs == {s: theirs[s] for s in range(1, step + 1)}
        assert {s: ours[s] for s in ours} == {s: theirs[s] for s in ours}
        assert np.isfinite(list(theirs.values())).all()

    return check
