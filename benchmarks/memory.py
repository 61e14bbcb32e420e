"""Whether memory stays flat over hundreds of saves.

Command:   python benchmarks/memory.py [--megabytes=50] [--num_saves=200]
Hardware:  Linux with glibc; any device
Time:      two minutes on two CPU cores
Expected:  a slope under 1 MiB a save

Each step changes and donates the state, each save is waited for, as is its retention.
The proportional set size is read after `malloc_trim`, so that what the allocator keeps
for itself does not count; the first quarter of the saves is warm-up.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from jaxft.checkpoint.manager import CheckpointManager

_MEGABYTES = flags.DEFINE_float("megabytes", 50.0, "size of the state")
_NUM_SAVES = flags.DEFINE_integer("num_saves", 200, "saves in a row")
_LAYOUT = flags.DEFINE_enum("layout", "files", ["files", "ocdbt"], "of the arrays")
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-memory", "checkpoint root")


def read_pss() -> float:
    """Proportional set size in MiB, of what is really in use."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return float(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[1]) / 1024


def main(_: list[str]) -> None:
    """Prints the slope."""
    logging.set_verbosity(logging.ERROR)
    shutil.rmtree(_FOLDER.value, ignore_errors=True)
    num_leaves = 10
    size = int(_MEGABYTES.value * 1e6 / 4 / num_leaves)
    state = {f"w{i}": jnp.full((size,), float(i), jnp.float32) for i in range(10)}
    step_fn = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 1.0001 + 1, state), donate_argnums=0
    )
    found = []
    with CheckpointManager(_FOLDER.value, layout=_LAYOUT.value) as checkpoints:
        for step in range(1, _NUM_SAVES.value + 1):
            state = step_fn(state)
            checkpoints.save(step, state, force=True)
            checkpoints.wait()
            found.append(read_pss())
    begin = len(found) // 4
    slope = np.polyfit(np.arange(begin, len(found)), found[begin:], 1)[0]
    print(
        f"{_LAYOUT.value}: {slope:.3f} MiB a save over {len(found) - begin} saves; "
        f"{found[begin]:.0f} MiB then, {found[-1]:.0f} MiB at the end"
    )
    shutil.rmtree(_FOLDER.value, ignore_errors=True)


if __name__ == "__main__":
    app.run(main)
