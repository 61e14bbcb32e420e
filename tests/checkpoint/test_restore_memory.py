"""A restore holds the state once: not as it was, nor as it was read, beside it."""

import ctypes
import gc
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jaxft.checkpoint.manager import CheckpointManager

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

MIB = 2**20
# In MiB: of the state, and what it may be read through.
SIZE = 96
BUDGET = 8
# Threads, code that is loaded by the first restore, what the allocator rounds up.
SLACK = 24


def _status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) / 1024


def _growth(act):
    """MiB that `act` adds to what is in use, at its peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset here: {error}")
    before = _status("VmRSS")
    result = act()
    return _status("VmHWM") - before, result


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_the_peak_of_a_restore_is_the_state_and_the_budget(tmp_path, layout):
    shape = (SIZE // 4 * MIB // 4 // 256, 256)

    @jax.jit
    def make(first):
        return {f"w{i}": jnp.full(shape, i + first, jnp.float32) for i in range(4)}

    with CheckpointManager(
        tmp_path, layout=layout, memory_budget=f"{BUDGET}MiB"
    ) as checkpoints:
        checkpoints.save(1, make(1.0))
        checkpoints.wait()
        # The first one loads code.
        checkpoints.restore(jax.eval_shape(make, 1.0))
        growth, restored = _growth(
            lambda: checkpoints.restore(jax.eval_shape(make, 1.0))
        )
    assert float(restored.state["w3"][-1, -1]) == 4.0
    # Less would mean that it measures nothing.
    assert 0.75 * SIZE < growth < SIZE + BUDGET + SLACK
