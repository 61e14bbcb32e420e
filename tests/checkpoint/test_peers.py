"""Two real processes that save together: what fails or lasts in one is so for both."""

import contextlib
import io
import os
import threading

import pytest

from jaxft.checkpoint import decisions
from jaxft.cli.__main__ import main

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

START = """
import faulthandler, pathlib, random, sys, time
faulthandler.dump_traceback_later(80, exit=True)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jaxft import records
from jaxft.checkpoint.manager import CheckpointManager

root, me = pathlib.Path(sys.argv[1]), jax.process_index()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
make = jax.jit(lambda step: {"w": jnp.arange(65536.0) * step}, out_shardings=rows)
"""

FAIL = """
import resource, signal
# The whole disk of one process: none of its files may be that long.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))

checkpoints = CheckpointManager(root, timeout_secs=60)
for step, bad in ((1, None), (2, 1), (3, 0)):
    begun = time.monotonic()
    limit(40_000 if me == bad else -1)
    assert checkpoints.save(step, make(step), force=True)
    try:
        checkpoints.wait()
    except records.FaultError as error:
        fault, secs = error.fault, time.monotonic() - begun
        print(fault.kind, fault.process, secs < 20, fault.evidence.split("; the")[0])
limit(-1)
# The failure was told; the same step again is a new save.
assert checkpoints.save(3, make(3))
checkpoints.wait()
try:
    checkpoints.save(4, make(4) | ({"t": object()} if me else {}))
except (records.FaultError, ValueError) as error:
    print(type(error).__name__, str(error).split(";")[0])
print(checkpoints.restore(make(0)).step, sorted(p.name for p in root.iterdir()))
"""

# Only with several processes can an end be seen here and not yet there.
LAST = """
rng, deleted = random.Random(me), []

def emit(kind, /, **fields):
    assert kind not in ("delete_failed", "save_failed"), fields
    if kind == "deleted":
        deleted.append(fields["step"])

settings = {"save": "steps(1)", "keep": "last(1)", "timeout_secs": 30, "emit": emit}
with CheckpointManager(root, **settings) as checkpoints:
    for step in range(1, int(sys.argv[1].rpartition("-")[2]) + 1):
        checkpoints.maybe_save(step, make(step))
        time.sleep(rng.random() / 20)
print(checkpoints.num_skipped, checkpoints.last_committed, len(deleted))
"""


class Looks(threading.Thread):
    """A third party that lists and verifies the root all the time.

    Attributes:
        codes: what the toolbox ended with, from the first step on.
        seen: the newest steps.
    """

    def __init__(self, root):
        super().__init__()
        self.root, self.codes, self.seen = str(root), set(), set()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            if steps := decisions.discover(self.root).steps:
                self.seen.add(steps[-1])
            if self.seen:
                for command in ("ls", "verify"):
                    with contextlib.redirect_stdout(io.StringIO()):
                        self.codes.add(main(["ckpt", command, self.root]))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.join()


@pytest.fixture
def run(run_processes):
    """What each of two processes says."""

    def lines(program, root):
        return [
            [line for line in out.splitlines() if "[Gloo]" not in line]
            for out, _ in run_processes(START + program, root)
        ]

    return lines


def test_a_write_that_fails_in_one_fails_in_both_soon_and_by_one_cause(tmp_path, run):
    root = tmp_path / "root"
    refusals = (
        f"FaultError save of step 4 to {root}/4 failed in process 1: leaf t is a "
        "builtins.object",
        "LeafError leaf t is a builtins.object",
    )
    for lines, refusal in zip(run(FAIL, root), refusals, strict=True):
        *failures, refused, last = lines
        assert refused.startswith(refusal)
        assert failures == [
            f"save_failed {bad} True save of step {step} to {root}/{step} failed in "
            f"process {bad}: file too large; raise the limit on file sizes, see ulimit "
            "-f"
            for step, bad in ((2, 1), (3, 0))
        ]
        assert last == "3 ['1', '3']"


@pytest.mark.slow
def test_a_save_that_one_still_waits_for_is_skipped_by_both(tmp_path, run):
    num_steps = 60
    root = tmp_path / f"root-{num_steps}"
    with Looks(root) as looks:
        ((first,), (second,)) = run(LAST, root)
    num_skipped, last, num_deleted = map(int, first.split())
    assert 0 < num_skipped < num_steps
    assert last > num_steps // 4
    # The primary process alone deletes, and does not trip up who looks meanwhile.
    assert second == f"{num_skipped} {last} 0"
    assert num_deleted == num_steps - num_skipped - 1
    assert os.listdir(root) == [str(last)]
    assert looks.codes == {0}
    assert len(looks.seen) > 5
