"""What is held of a state while its digests are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import fingerprints
from jaxft.checkpoint.state_digests import Digests

pytestmark = pytest.mark.device

NUM_LEAVES, NUM_ELEMENTS = 8, 1 << 19  # of 2 MiB


def _train(state):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    return jax.block_until_ready(step(state))


@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 40])
def test_a_budget_says_how_much_of_a_state_is_held(memory_bytes):
    state = {f"w{i}": jnp.full((NUM_ELEMENTS,), float(i)) for i in range(NUM_LEAVES)}
    state = _train(state)
    before = {leaf.unsafe_buffer_pointer() for leaf in state.values()}
    digests = Digests(state, memory_bytes=memory_bytes)
    digests.start()
    state = _train(state)
    reused = {leaf.unsafe_buffer_pointer() for leaf in state.values()} & before
    # Within the budget nothing is written to until it is digested.
    assert bool(reused) == (memory_bytes < NUM_LEAVES * NUM_ELEMENTS * 4)
    expected = {
        f"w{i}": fingerprints.digest_array(np.full(NUM_ELEMENTS, i + 1.0, np.float32))
        for i in range(NUM_LEAVES)
    }
    assert digests.all() == expected
