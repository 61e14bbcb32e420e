"""What the loop pays: it waits little for a save; a restore holds the state once."""

import ctypes
import gc
import pathlib
import re
import time

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


def _make_state(size):
    """A function that makes a state of so many MiB."""
    shape = (size // 4 * MIB // 4 // 256, 256)

    @jax.jit
    def make(first):
        return {f"w{i}": jnp.full(shape, i + first, jnp.float32) for i in range(4)}

    return make


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_the_loop_waits_for_a_small_part_of_a_save(tmp_path, full, layout):
    # The more there is to write, the less is the share of what does not grow with it.
    size, most = (512, 0.2) if full else (64, 0.5)
    make, events = _make_state(size), []
    with CheckpointManager(
        tmp_path, layout=layout, emit=lambda kind, /, **fields: events.append(fields)
    ) as checkpoints:
        # The first one compiles.
        for step in range(5 if full else 4):
            state = jax.block_until_ready(make(float(step)))
            start = time.perf_counter()
            checkpoints.save(step, state, force=True)
            events.append({"step": step, "measured_secs": time.perf_counter() - start})
            checkpoints.wait()
    saves = {}
    for event in events:
        if "step" in event:
            saves.setdefault(event["step"], {}).update(event)
    for save in saves.values():
        assert 0 < save["blocking_secs"] <= save["measured_secs"]
        assert save["num_bytes"] > size * MIB
    # Of the quietest: others want these processors, too.
    shares = [saves[step]["blocking_secs"] / saves[step]["secs"] for step in saves]
    assert min(shares[1:]) < most


@pytest.mark.parametrize("layout", ["files", "ocdbt"])
def test_the_peak_of_a_restore_is_the_state_and_the_budget(tmp_path, layout):
    make = _make_state(SIZE)
    with CheckpointManager(
        tmp_path, layout=layout, memory_budget=f"{BUDGET}MiB"
    ) as checkpoints:
        # Both stay, so that no memory that one of them gave back is used again.
        state = make(1.0)
        checkpoints.save(1, state)
        checkpoints.wait()
        # The first one loads code.
        first = checkpoints.restore(jax.eval_shape(make, 1.0))
        growth, restored = _growth(
            lambda: checkpoints.restore(jax.eval_shape(make, 1.0))
        )
    for held in (state, first.state, restored.state):
        assert float(held["w3"][-1, -1]) == 4.0
    # Less would mean that it measures nothing.
    assert 0.75 * SIZE < growth < SIZE + BUDGET + SLACK
