"""Two real processes, one of which takes longer than any collective may."""

import pytest

pytestmark = [pytest.mark.device, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(80, exit=True)
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxft import records
from jaxft.parallel import distributed
from jaxft.records import ALONE
from jaxft.checkpoint import together

me = jax.process_index()
assert together.gather(me) == [0, 1]  # the collective is compiled and connected
told = []
job = distributed.Job(ALONE, emit=lambda kind, **fields: told.append((kind, fields)))
distributed._joined.append(job)
with together.same_end("read it"):
    time.sleep(8 * me)
for kind, fields in told:
    assert (kind, fields["what"], fields["absent"]) == ("peer_wait", "read it", [1])
assert len(told) == 1 - me
print(together.gather(me))
try:
    with together.same_end("read it", deadline_secs=0.5):
        time.sleep(4 * (1 - me))
    print("all came")
except records.FaultError as error:
    print(error)
"""


def test_a_slow_disk_is_not_bound_by_the_time_of_a_collective(
    run_processes, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=5")
    for out, _ in run_processes(PROGRAM):
        both, late = [line for line in out.splitlines() if "[Gloo]" not in line]
        assert both == "[0, 1]"
        assert late.startswith("waited at most 0.5 s until all processes read it: ")
        assert late.endswith(("process 0 did not come", "process 1 did not come"))
