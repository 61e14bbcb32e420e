"""What everything that watches over a run costs beside a bare loop, as ratios of pairs.

Command:   python benchmarks/overhead.py [--num_pairs=25]
           python benchmarks/overhead.py --save_secs=10 --block_secs=12 --num_pairs=9
Hardware:  any; two quiet CPU cores
Time:      four minutes; with saves, six
Expected:  the interval reaches below 1.02; with a save every ten seconds below 1.05

`jaxft` is the loop of the command on the demo's config: events, guard, control word,
watchdog, signals, and the saves of `checkpoint.save = "auto"`, or every so many
seconds. `bare` is a hand-written jitted step with the same model, clipping and
optimizer over the same batches, which reads each loss one step late. They take turns
in blocks of one length in one process; bare against itself is the A/A comparison.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
import pairs
from absl import app, flags, logging

from jaxft import config as configs
from jaxft import settings
from jaxft.build import Parts, build
from jaxft.config import Config, Progress
from jaxft.events import EventLog
from jaxft.faults.preemption import StopRequests
from jaxft.faults.watchdog import Answer, PhaseBoard, Watchdog
from jaxft.loop import Loop
from jaxft.metrics.writers import ProgressLine
from jaxft.models.adapters import from_nnx
from jaxft.models.transformer import make_model, next_token_loss
from jaxft.train.optimizer import make_optimizer

_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 25, "blocks of each that count")
_BLOCK_SECS = flags.DEFINE_float("block_secs", 3.0, "about how long a block is")
_SAVE_SECS = flags.DEFINE_float("save_secs", 0.0, "between saves; 0 is auto")
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-overhead", "the workdir")

_CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def make_config() -> Config:
    """The demo's, without evaluations."""
    sys.path.insert(0, str(_CONFIGS))
    import tiny_lm

    config = tiny_lm.get_config()
    config.eval.every_steps = 0
    config.checkpoint.save = (
        f"secs({_SAVE_SECS.value:g})" if _SAVE_SECS.value else "auto"
    )
    config.train.num_steps = 10**6
    return settings.lock(configs.resolve(config))


class Jaxft:
    """The loop of the command, a block at a time."""

    def __init__(self, parts: Parts, *, board: PhaseBoard, stops: StopRequests):
        self._parts = parts
        self._board = board
        self._stops = stops
        self._state = parts.train_step.init()
        batch, word = parts.train_step.place(parts.example)
        self._step = parts.train_step.lower(self._state, batch, word).compile()
        self._log = EventLog(
            pathlib.Path(_FOLDER.value, "events"), role="work", tee=self._take
        )
        self._log.open()
        self._secs = 0.0
        self._num_done = 0

    def _take(self, line: str) -> None:
        event = json.loads(line)
        if event["kind"] == "step":
            self._secs += event["secs"]

    def run(self, num_steps: int) -> float:
        """Seconds of so many steps, without the save behind the last one."""
        config = dataclasses.replace(
            self._parts.config,
            train=dataclasses.replace(
                self._parts.config.train, num_steps=self._num_done + num_steps
            ),
        )
        loop = Loop(
            dataclasses.replace(self._parts, config=config),
            self._step,
            eval_fn=None,
            stops=self._stops,
            emit=self._log,
            progress=ProgressLine(
                num_steps=num_steps, unit="tokens", restarts=0, mode=Progress.NEVER
            ),
            restored=self._num_done or -1,
            board=self._board,
        )
        self._secs = 0.0
        self._state, _ = loop.run(self._state)
        self._num_done += num_steps
        return self._secs


class Bare:
    """The loop that one writes without a framework."""

    def __init__(self, parts: Parts, config: Config):
        self._parts = parts
        module = make_model(config.model, config.remat)
        model = from_nnx(module, next_token_loss(config.loss))
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.train.clip_norm),
            make_optimizer(config.optimizer),
        )

        def step(state: Any, batch: Any, rng: jax.Array) -> tuple[Any, jax.Array]:
            def mean_loss(params: Any) -> jax.Array:
                sums, _ = model.loss(params, {}, batch, rng, train=True)
                total, weight = sums["loss"]
                return total / weight

            params, opt_state = state
            loss, grads = jax.value_and_grad(mean_loss)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        params = parts.train_step.init().params
        self._state = params, optimizer.init(params)
        self._rng = jax.random.key(0)
        self._step = jax.jit(step, donate_argnums=0)

    def run(self, num_steps: int) -> float:
        """Seconds of so many steps."""
        started, pending = time.perf_counter(), None
        for _ in range(num_steps):
            batch = jax.device_put(next(self._parts.iterator))
            self._state, loss = self._step(self._state, batch, self._rng)
            if pending is not None:
                float(pending)
            pending = loss
        float(pending)
        return time.perf_counter() - started


def measure(contestants: dict[str, Any], *, num_steps: int) -> dict[str, np.ndarray]:
    """Seconds of each contestant in each block."""
    order = np.random.default_rng(0)
    secs: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-1, _NUM_PAIRS.value):
        for index in order.permutation(len(contestants)):
            name = list(contestants)[index]
            took = contestants[name].run(num_steps)
            if number >= 0:
                secs[name].append(took)
    return {name: np.array(values) for name, values in secs.items()}


def print_ratio(name: str, secs: np.ndarray, base: np.ndarray) -> None:
    """One line."""
    ratio, low, high = pairs.ratio(secs, base)
    print(f"{name}: {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}")


def main(_: list[str]) -> None:
    """Prints both ratios."""
    logging.set_verbosity(logging.ERROR)
    shutil.rmtree(_FOLDER.value, ignore_errors=True)
    config = make_config()
    told: list[str] = []

    def emit(kind: str, /, **fields: Any) -> None:
        del fields
        told.append(kind)

    mine = build(config, workdir=_FOLDER.value, emit=emit)
    theirs = build(config, workdir=f"{_FOLDER.value}-bare", emit=emit)
    board = PhaseBoard()
    with (
        StopRequests(config.preemption) as stops,
        Watchdog(board=board, answer=Answer.REPORT),
    ):
        jaxft, bare = Jaxft(mine, board=board, stops=stops), Bare(theirs, config)
        jaxft.run(10)
        bare.run(10)
        num_steps = max(10, round(_BLOCK_SECS.value / (bare.run(20) / 20)))
        secs = measure(
            {"jaxft": jaxft, "bare": bare, "again": bare}, num_steps=num_steps
        )
    num_saves = told.count("save_commit")
    print(
        f"{num_steps} steps a block, {_NUM_PAIRS.value} blocks, {num_saves} saves, "
        f"a bare step {1e3 * np.median(secs['bare']) / num_steps:.1f} ms, "
        f"load {os.getloadavg()}"
    )
    print_ratio("jaxft / bare", secs["jaxft"], secs["bare"])
    print_ratio("bare / bare", secs["again"], secs["bare"])


if __name__ == "__main__":
    app.run(main)
