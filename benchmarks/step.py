"""What the built step costs over a step written by hand, as ratios of pairs.

Command:   python benchmarks/step.py [--num-pairs=200] [--width=128] ...
Hardware:  any; one device
Time:      two minutes on two quiet CPU cores
Expected:  an interval of built / hand that reaches below 1.02

The hand-written step has the same model, loss, clipping and AdamW, is jitted and
donates its state, and knows nothing of guards, control words, key folding, metrics
or shardings. A round times one step of each contestant, in random order, on the
same batch; the hand-written step against itself is the A/A comparison: the noise of
the machine stands beside every ratio.

With `--virtual-shards=8` it is the built step with virtual shards over the one without,
on `--num-devices` devices: what the same bits on any number of them cost. Fake devices
of a CPU are asked for by `JAX_NUM_CPU_DEVICES`. With `--alone=1` besides, the one step
or (`--virtual-shards=0`) the other runs by itself, and what is printed is the memory of
the host that it takes beyond the state; on fake devices that is the sum of theirs.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pairs
from host_memory import read_memory, reset_peak

from jaxft.config import (
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RematConfig,
    TrainConfig,
)
from jaxft.models.adapters import from_nnx
from jaxft.models.transformer import make_model, next_token_loss
from jaxft.parallel.mesh import make_mesh
from jaxft.train.optimizer import make_optimizer
from jaxft.train.step import TrainStep, make_train_step
from jaxft.types import Batch, LossFn

# Runs one step and returns its loss once it is finished.
Contestant = Callable[[], float]


def make_hand_step(loss: LossFn, optimizer: optax.GradientTransformation) -> Any:
    """The step that one writes without a framework."""

    def step(
        params: Any, opt_state: Any, batch: Batch, rng: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            sums, _ = loss(params, {}, batch, rng, train=True)
            total, weight = sums["loss"]
            return total / weight

        value, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def start_hand(
    step: Any,
    optimizer: optax.GradientTransformation,
    *,
    built: TrainStep,
    batch: Batch,
) -> Contestant:
    """The hand-written step, from the same parameters."""
    state = built.init()
    params, opt_state = state.params, optimizer.init(state.params)

    def run() -> float:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch, state.rng)
        jax.block_until_ready(params)
        return float(loss)

    return run


def start_built(step: TrainStep, *, batch: Batch, control: jax.Array) -> Contestant:
    """Jaxft's step, guard and control word included."""
    state = step.init()

    def run() -> float:
        nonlocal state
        state, output = step(state, batch, control)
        jax.block_until_ready(state.params)
        return float(output.metrics["loss"])

    return run


def time_rounds(
    contestants: dict[str, Contestant], *, num_rounds: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Seconds of each contestant in each round, [num_rounds] each.

    Raises:
        RuntimeError: they do not compute the same losses, so that the comparison
            would mean nothing.
    """
    order = np.random.default_rng(seed)
    names = list(contestants)
    secs = {name: np.zeros(num_rounds) for name in names}
    for number in range(-3, num_rounds):  # the first compile and warm up
        losses = {}
        for index in order.permutation(len(names)):
            begin = time.perf_counter()
            losses[names[index]] = contestants[names[index]]()
            if number >= 0:
                secs[names[index]][number] = time.perf_counter() - begin
        # Only at first: rounding differs, and training amplifies it.
        same = np.allclose(list(losses.values()), losses[names[0]], rtol=1e-4)
        if number < 10 and not same:
            raise RuntimeError(f"round {number}: the losses differ: {losses}")
    return secs


def run_alone(build: Callable[[int], TrainStep], rows: Batch, num_shards: int) -> None:
    """Prints what a few steps take beyond the state."""
    step = build(num_shards)
    batch, control = step.place(rows)
    contestant = start_built(step, batch=batch, control=control)
    contestant()  # The compiler needs memory, too.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    reset_peak()
    before = read_memory("VmRSS")
    for _ in range(5):
        contestant()
    peak = read_memory("VmHWM") - before
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(step.init().params))
    print(f"parameters {size / 1e6:.0f} MB, beyond the state {peak:.0f} MB")


def run(args: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """Builds the contestants, times them and returns the two ratios."""
    config = ModelConfig(
        width=args.width, num_layers=args.num_layers, num_heads=args.num_heads
    )
    config.num_kv_heads = config.num_heads
    config.mlp_width = -(-config.width * 8 // 3 // 8) * 8
    model = from_nnx(make_model(config, RematConfig()), next_token_loss(LossConfig()))
    adamw = make_optimizer(OptimizerConfig(decay_steps=10 * args.num_pairs + 200))
    tokens = np.random.default_rng(0).integers(
        config.vocab_size, size=(args.global_batch, args.seq_len + 1), dtype=np.int32
    )
    rows = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}

    def build(virtual_shards: int = 0) -> TrainStep:
        return make_train_step(
            model,
            adamw,
            mesh=make_mesh(MeshConfig(num_devices=args.num_devices)),
            config=TrainConfig(clip_norm=1.0, virtual_shards=virtual_shards),
        )

    if args.alone:
        run_alone(build, rows, args.virtual_shards)
        return {}
    built = build()
    batch, control = built.place(rows)
    if args.virtual_shards:
        names = ("plain", "shards", "again")
        steps = (built, build(args.virtual_shards), build())
        contestants = {
            name: start_built(step, batch=batch, control=control)
            for name, step in zip(names, steps, strict=True)
        }
    else:
        names = ("hand", "built", "again")
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        hand = make_hand_step(model.loss, optimizer)
        contestants = {
            "hand": start_hand(hand, optimizer, built=built, batch=batch),
            "built": start_built(built, batch=batch, control=control),
            "again": start_hand(hand, optimizer, built=built, batch=batch),
        }
    secs = time_rounds(contestants, num_rounds=args.num_pairs)
    base, other, again = names
    label = "plain" if args.virtual_shards else "hand-written"
    print(f"{label} step: {1e3 * np.median(secs[base]):.2f} ms (median)")
    return {
        f"{other} / {base}": pairs.ratio(secs[other], secs[base]),
        f"{base} / {base}": pairs.ratio(secs[again], secs[base]),
    }


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"num-pairs": 200, "width": 128, "num-layers": 2, "num-heads": 4}
    sizes |= {"global-batch": 16, "seq-len": 128, "num-devices": 1}
    sizes |= {"virtual-shards": 0, "alone": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Prints each ratio with its interval."""
    args = parse_args(argv)
    for name, (ratio, low, high) in run(args).items():
        print(
            f"{name}: {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}, "
            f"{args.num_pairs} pairs"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
