"""The door to JAX's rule that process 0 alone writes what it compiles."""

import subprocess
import sys

import pytest
from jax._src import compiler, distributed  # noqa: TID251

from jaxft.parallel.cache_writers import EveryoneWrites

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

# Compiles as process 1 would: what that changes for JAX is this number alone.
PROGRAM = """
import os, sys, jax, jax.numpy as jnp
from jax._src import distributed
from jaxft.parallel.cache_writers import EveryoneWrites
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
distributed.global_state.process_id = 1
door = EveryoneWrites()
for number in range(4):
    if number == 1:
        assert door.turn_on() == ""
    if number == 3:
        door.turn_off()
        door.turn_off()
    jax.jit(lambda x: jnp.cos(x) * number)(jnp.ones(8))
    print(len([n for n in os.listdir(sys.argv[1]) if "lambda" in n and "-cache" in n]))
"""

# A program that spans two processes, with the cache as a worker has it.
TWO = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
root, mode, address, index = sys.argv[1:]
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(address, 2, int(index))
from jaxft.parallel.compile_cache import CompileCache
mesh = Mesh(np.array(jax.devices()), ("data",))
events = []
cache = CompileCache(root, mode=mode, emit=lambda kind, **fields: events.append(kind))
assert cache.enable(device=mesh.devices.flat[0]) == ""
rows = NamedSharding(mesh, PartitionSpec("data"))
x = jax.make_array_from_process_local_data(rows, np.ones((1, 8), np.float32))
before = cache.num_hits
program = jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile()
print(cache.num_hits - before, float(program(x)), events)
cache.close()
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_after_a_restart_every_process_is_served(tmp_path, run_processes):
    def hits(mode):
        lines = [
            out.splitlines()[-1].split()
            for out, _ in run_processes(TWO, str(tmp_path), mode)
        ]
        assert [line[1:] for line in lines] == [["32.0", "[]"]] * 2
        return [int(line[0]) for line in lines]

    assert hits("keep") == [0, 0]
    assert hits("keep") == [1, 1]
    assert hits("off") == [0, 0]
    assert hits("fresh") == [0, 0]
    assert hits("keep") == [1, 1]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert sum(".old-" in name for name in names) == 2


def test_jax_still_asks_where_the_door_is(tmp_path):
    """Closed, open, open, closed: only what is compiled in between is written."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "1", "2", "2"]


def test_all_else_that_the_compiler_asks_is_as_before():
    door = EveryoneWrites()
    assert door.turn_on() == ""
    try:
        assert compiler.distributed.global_state.process_id == 0
        state = distributed.global_state
        assert compiler.distributed.global_state.client is state.client
        assert compiler.distributed.global_state.num_processes == state.num_processes
        assert compiler.distributed.initialize is distributed.initialize
    finally:
        door.turn_off()
    assert compiler.distributed is distributed


def test_where_jax_has_changed_it_keeps_its_rule(monkeypatch):
    monkeypatch.delattr(compiler, "distributed")
    door = EveryoneWrites()
    assert "process 0 alone" in door.turn_on()
    door.turn_off()
    assert not hasattr(compiler, "distributed")
