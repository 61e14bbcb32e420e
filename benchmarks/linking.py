"""What a save costs when most of the state has not changed: bytes, and time.

Command:   python benchmarks/linking.py [--gigabytes=1] [--num_saves=22]
Hardware:  any; one device, a disk with room for four copies of the state
Time:      three minutes on two quiet CPU cores
Expected:  with 95 % of the bytes unchanged the median linking save writes at most 6 %
           of the bytes and takes at most 35 % of the time of a full one

Two managers take turns in one process: one links unchanged leaves, as by default, one
writes all (`full_every=0`). A save is timed from the call to its commit; the disk is
synced before. The first two saves of the linking one are full by rule and do not
count; of the later ones, every fifth or so writes the frozen leaves anew.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import jax
import numpy as np
import pairs
from absl import app, flags, logging

from jaxft.checkpoint.manager import CheckpointManager

_GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "size of the state")
_FROZEN = flags.DEFINE_float("frozen", 0.95, "share of the bytes that never change")
_NUM_SAVES = flags.DEFINE_integer("num_saves", 22, "saves of each, all counted")
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-linking", "on the disk to measure")

_LEAF_ELEMENTS = 10_000_000 // 4


def make_state() -> dict[str, Any]:
    """Random float32 leaves of 10 MB: those called `live` change, others do not."""
    num_leaves = max(20, round(_GIGABYTES.value * 1e9 / (4 * _LEAF_ELEMENTS)))
    num_live = round(num_leaves * (1 - _FROZEN.value))
    rng = np.random.default_rng(0)
    names = [f"live_{i}" if i < num_live else f"base_{i}" for i in range(num_leaves)]
    state = {
        name: jax.device_put(rng.random(_LEAF_ELEMENTS, np.float32)) for name in names
    }
    return jax.block_until_ready(jax.tree.map(lambda x: x * 1, state))


def train(state: dict[str, Any]) -> dict[str, Any]:
    """Changes what is live."""
    return {
        name: value * 0.999 if name.startswith("live") else value
        for name, value in state.items()
    }


class Contestant:
    """A manager, and what its saves cost."""

    def __init__(self, name: str, *, full_every: int):
        self.root = os.path.join(_FOLDER.value, name)
        self.rows: list[tuple[float, float]] = []
        self._facts: dict[str, Any] = {}
        self._manager = CheckpointManager(
            self.root,
            full_every=full_every,
            layout="files",
            keep="last(2)",
            emit=self._take,
        )

    def _take(self, kind: str, /, **fields: Any) -> None:
        if kind == "save_commit":
            self._facts = fields

    def save(self, step: int, state: dict[str, Any]) -> None:
        """One save: seconds, and the share of the bytes that it wrote."""
        os.sync()
        begin = time.perf_counter()
        self._manager.save(step, state, force=True)
        while self._manager.in_flight is not None:
            time.sleep(0.001)
        secs = time.perf_counter() - begin
        self._manager.wait()
        written = 1 - self._facts["linked_bytes"] / sum(
            v.nbytes for v in state.values()
        )
        self.rows.append((secs, written))


def main(_: list[str]) -> None:
    """Prints the medians and the ratio of times."""
    logging.set_verbosity(logging.ERROR)
    shutil.rmtree(_FOLDER.value, ignore_errors=True)
    state = make_state()
    linking = Contestant("linking", full_every=10)
    full = Contestant("full", full_every=0)
    for step in range(1, _NUM_SAVES.value + 1):
        order = (linking, full) if step % 2 else (full, linking)
        for contestant in order:
            contestant.save(step, state)
        state = jax.block_until_ready(train(state))
    ours, theirs = np.array(linking.rows[2:]), np.array(full.rows[2:])
    print(f"load {os.getloadavg()}, {len(ours)} saves of {len(state)} leaves")
    print(f"linking: median {np.median(ours[:, 0]):.3f} s", end=", ")
    print(f"writes median {np.median(ours[:, 1]):.3f}, mean {np.mean(ours[:, 1]):.3f}")
    print(f"full:    median {np.median(theirs[:, 0]):.3f} s")
    ratio, low, high = pairs.ratio(ours[:, 0], theirs[:, 0])
    print(f"time, linking / full: {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    shutil.rmtree(_FOLDER.value, ignore_errors=True)


if __name__ == "__main__":
    app.run(main)
