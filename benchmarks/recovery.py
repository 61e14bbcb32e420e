"""From SIGKILL to the first new step: jaxft, its parts alone, and a naive script.

Command:   python benchmarks/recovery.py [--num_pairs=7] [--spare=never]
Hardware:  any; two quiet CPU cores
Time:      five minutes
Expected:  jaxft's time is at most 1.2 of the sum of its parts measured alone, and no
           longer than a naive script's that restores without verification

Three contestants take turns. `jaxft` is the command with the demo's config: its worker
is killed once a spare one waits (seconds after the start; with `--spare=never` there is
none), and its own report says what the way to the next first step consisted of.
`alone` is a fresh process that does the same parts, one after the other, with nothing
around them. `naive` is what one writes by hand with the same model, data and
optimizer: stock Orbax, `jax.jit`, no verification; it is killed and started again at
once, with JAX's compile cache in its folder, or without one (`naive, no cache`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pairs
from absl import app, flags

_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 7, "kills of each contestant")
_SPARE = flags.DEFINE_enum(
    "spare",
    "always",
    ["always", "never"],
    "supervisor.spare; with it, kill once it waits",
)
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-recovery", "for all workdirs")
_ROLE = flags.DEFINE_string("role", "", "internal: alone, or naive")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CONFIG = "configs/tiny_lm.py"
_SETTINGS = {
    "train.num_steps": "1000000",
    "eval.every_steps": "0",
    "checkpoint.save": "steps(20)",
    "log.event_secs": "0",
    "supervisor.max_restarts": "1000",
}
_SAVE_STEPS = int(_SETTINGS["checkpoint.save"][6:-1])
_PARTS = ("imports", "build", "restore", "verify", "compile", "first_step")


def _make_config() -> Any:
    """The demo's config with the settings of this benchmark."""
    sys.path.insert(0, str(_ROOT / "configs"))
    import tiny_lm

    from jaxft import config as configs
    from jaxft import settings

    config = tiny_lm.get_config()
    for path, text in _SETTINGS.items():
        section, name = path.split(".")
        kind = type(getattr(getattr(config, section), name))
        setattr(getattr(config, section), name, kind(text))
    return settings.lock(configs.resolve(config))


# --- contestants --------------------------------------------------------------


@contextlib.contextmanager
def run_jaxft(workdir: pathlib.Path) -> Iterator[None]:
    """The command in the background."""
    settings = [f"--config.{name}={value}" for name, value in _SETTINGS.items()]
    settings.append(f"--config.supervisor.spare={_SPARE.value}")
    command = [sys.executable, "-m", "jaxft.main", f"--config={_CONFIG}"]
    process = subprocess.Popen(
        [*command, f"--workdir={workdir}", *settings],
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _events(workdir: pathlib.Path) -> list[dict[str, Any]]:
    found = []
    for file in workdir.glob("events/*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return sorted(found, key=lambda event: event["time"])


def kill_jaxft(workdir: pathlib.Path, *, since: float) -> dict[str, float]:
    """Kills the worker behind its next save; the parts of the way, in seconds."""

    def launched() -> list[int]:
        found = [e for e in _events(workdir) if e["kind"] == "launch"]
        return [e["worker_pid"] for e in found if e["time"] >= since]

    _wait_for(launched)
    (pid,) = launched()
    _wait_for(
        lambda: _is_past_save(workdir, pid=pid) and _is_ready(workdir, since=since)
    )
    os.kill(pid, signal.SIGKILL)
    killed = time.time()

    def first_step() -> bool:
        return any(e["kind"] == "step" and e["time"] > killed for e in _events(workdir))

    _wait_for(first_step)
    report = [sys.executable, "-m", "jaxft.cli", "report", "--json", str(workdir)]
    told = subprocess.run(report, cwd=_ROOT, capture_output=True, check=True).stdout
    way = json.loads(told)["recoveries"][-1]
    return {name: way[f"{name}_secs"] for name in (*_PARTS, "down", "other", "total")}


def _is_past_save(workdir: pathlib.Path, *, pid: int) -> bool:
    """Whether a worker has committed a step and gone on."""
    mine = [e for e in _events(workdir) if e["pid"] == pid]
    saved = [e["step"] for e in mine if e["kind"] == "save_commit"]
    return bool(saved) and any(
        e["kind"] == "step" and e["step"] > saved[-1] + 3 for e in mine
    )


def _is_ready(workdir: pathlib.Path, *, since: float) -> bool:
    """Whether a process waits to be the next worker, if there is to be one."""
    found = [e for e in _events(workdir) if e["kind"] == "spare" and e["time"] >= since]
    return bool(found) or _SPARE.value == "never"


def _wait_for(question: Any, *, timeout_secs: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not question():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.02)


def run_alone(workdir: pathlib.Path) -> dict[str, float]:
    """The parts in a fresh process; the whole from its start to its end."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--role=alone", f"--folder={workdir}"],
        env=os.environ | {"PYTHONPATH": str(_ROOT), "STARTED": repr(started)},
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def alone(workdir: pathlib.Path) -> dict[str, float]:
    """Restores from `workdir` and makes a step, part by part."""
    marks = [float(os.environ["STARTED"])]
    import jax

    import jaxft.worker
    from jaxft.build import build
    from jaxft.parallel.compile_cache import CompileCache

    marks.append(time.time())
    config = _make_config()
    parts = build(config, workdir=workdir, emit=_ignore)
    mesh = parts.train_step.mesh
    cache = CompileCache(workdir / "compile_cache", mode="keep", emit=_ignore)
    cache.enable(device=mesh.devices.flat[0])
    marks.append(time.time())
    told: list[dict[str, Any]] = []
    restored = jaxft.CheckpointManager(
        workdir / "checkpoints",
        emit=lambda kind, /, **fields: kind == "restore" and told.append(fields),
    ).restore(parts.train_step.abstract_state)
    state = jax.block_until_ready(restored.state)
    marks.append(time.time())
    batch, word = parts.train_step.place(parts.example)
    step = parts.train_step.lower(state, batch, word).compile()
    marks.append(time.time())
    parts.iterator.set_state(restored.data)
    placed, word = parts.train_step.place(next(parts.iterator))
    jax.block_until_ready(step(state, placed, word))
    marks.append(time.time())
    names = ("imports", "build", "restore", "compile", "first_step")
    secs = dict(zip(names, np.diff(marks), strict=True))
    secs["verify"] = told[0]["verify_secs"]
    secs["restore"] -= secs["verify"]
    return {name: float(secs[name]) for name in _PARTS} | {
        "total": marks[-1] - marks[0]
    }


def _ignore(kind: str, /, **fields: Any) -> None:
    del kind, fields


@contextlib.contextmanager
def run_naive(workdir: pathlib.Path, *, is_cached: bool) -> Iterator[Any]:
    """The script; gives what waits for a line of it: (seconds since epoch, step)."""
    env = os.environ | {"PYTHONPATH": str(_ROOT)}
    if is_cached:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(workdir / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    process = subprocess.Popen(
        [sys.executable, __file__, "--role=naive", f"--folder={workdir}"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    lines = iter(process.stdout)

    def next_step() -> tuple[float, int]:
        for line in lines:
            if line.startswith("step "):
                return time.time(), int(line.split()[1])
        raise RuntimeError("the naive script ended")

    try:
        yield next_step
    finally:
        process.kill()
        process.wait()


def time_naive(workdir: pathlib.Path, *, is_cached: bool) -> dict[str, float]:
    """Runs it past a save, kills it, starts it again: seconds to its first step."""
    with run_naive(workdir, is_cached=is_cached) as next_step:
        _, first = next_step()
        while next_step()[1] < first + 2 * _SAVE_STEPS:
            pass
    killed = time.time()
    with run_naive(workdir, is_cached=is_cached) as next_step:
        return {"total": next_step()[0] - killed}


def naive(workdir: pathlib.Path) -> None:
    """A training script with checkpoints, as one writes it."""
    import jax
    import optax
    import orbax.checkpoint as ocp

    from jaxft.data.sources import make_sources
    from jaxft.models.adapters import from_nnx
    from jaxft.models.transformer import make_model, next_token_loss
    from jaxft.train.optimizer import make_optimizer

    config = _make_config()
    rows = make_sources(config.data).train
    module = make_model(config.model, config.remat)
    model = from_nnx(module, next_token_loss(config.loss))
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.train.clip_norm),
        make_optimizer(config.optimizer),
    )

    def init(rng: jax.Array) -> Any:
        params, _ = model.init(rng)
        return {"params": params, "opt": optimizer.init(params)}

    def step(state: Any, batch: Any, rng: jax.Array) -> tuple[Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            total, weight = model.loss(params, {}, batch, rng, train=True)[0]["loss"]
            return total / weight

        loss, grads = jax.value_and_grad(mean_loss)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
        }, loss

    step = jax.jit(step, donate_argnums=0)
    saved = ocp.CheckpointManager(
        workdir / "checkpoints",
        options=ocp.CheckpointManagerOptions(
            save_interval_steps=_SAVE_STEPS, max_to_keep=3
        ),
    )
    rng = jax.random.key(0)
    start = saved.latest_step() or 0
    if start:
        shapes = jax.eval_shape(init, rng)
        state = saved.restore(start, args=ocp.args.StandardRestore(shapes))
    else:
        state = jax.jit(init)(rng)
    for number in range(start, 10**6):
        first = number * config.data.global_batch
        picked = [
            rows[i % len(rows)] for i in range(first, first + config.data.global_batch)
        ]
        batch = {name: np.stack([row[name] for row in picked]) for name in picked[0]}
        state, loss = step(state, batch, jax.random.fold_in(rng, number))
        print(f"step {number + 1} {float(loss)}", flush=True)
        saved.save(number + 1, args=ocp.args.StandardSave(state))


# --- measuring ----------------------------------------------------------------


def _table(found: dict[str, list[dict[str, float]]]) -> None:
    totals = {
        name: np.array([one["total"] for one in rows]) for name, rows in found.items()
    }
    for name in ("jaxft", "alone"):
        parts = {
            part: np.median([one[part] for one in found[name]])
            for part in found[name][0]
        }
        print(f"{name:<18}" + "  ".join(f"{k} {v:.2f}" for k, v in parts.items()))
    for name in ("naive", "naive, no cache"):
        print(f"{name:<18}total {np.median(totals[name]):.2f}")
    for name in ("alone", "naive", "naive, no cache"):
        ratio, low, high = pairs.ratio(totals["jaxft"], totals[name])
        print(f"jaxft / {name}: {ratio:.3f}, {low:.3f} to {high:.3f}")


def main(_: list[str]) -> None:
    """Kills and prints."""
    folder = pathlib.Path(_FOLDER.value)
    if _ROLE.value == "alone":
        print(json.dumps(alone(folder)))
        return
    if _ROLE.value == "naive":
        naive(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, list[dict[str, float]]] = {
        name: [] for name in ("jaxft", "alone", "naive", "naive, no cache")
    }
    for number in range(-1, _NUM_PAIRS.value):  # the first fills the caches
        since = time.time()
        with run_jaxft(folder / "jaxft"):
            jaxft = kill_jaxft(folder / "jaxft", since=since)
        rows = {
            "jaxft": jaxft,
            "alone": run_alone(folder / "jaxft"),
            "naive": time_naive(folder / "naive", is_cached=True),
            "naive, no cache": time_naive(folder / "naive", is_cached=False),
        }
        if number >= 0:
            for name, row in rows.items():
                found[name].append(row)
    print(f"{_NUM_PAIRS.value} kills of each, load {os.getloadavg()}")
    _table(found)


if __name__ == "__main__":
    app.run(main)
