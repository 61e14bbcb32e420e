"""What left the loop becomes the fault it is."""

import jax
import jax.numpy as jnp
import pytest

from jaxft.config import ConfigError
from jaxft.faults.exceptions import fault_of
from jaxft.faults.nonfinite import NonfiniteRule
from jaxft.records import MAX_EVIDENCE_BYTES, Fault, FaultError, FaultKind


def test_kinds() -> None:
    fault = Fault(kind=FaultKind.SAVE_FAILED, step=3)
    assert fault_of(FaultError(fault), step=9) is fault
    config = fault_of(ConfigError("model.width", "too wide"))
    assert (config.kind, config.exit_code) == (FaultKind.CONFIG, 78)
    assert config.evidence == "config.model.width: too wide"
    assert fault_of(MemoryError()).kind is FaultKind.OUT_OF_MEMORY


def test_a_bug_keeps_the_end_of_its_traceback() -> None:
    try:
        raise ValueError("x" * 10_000 + " the end")
    except ValueError as error:
        fault = fault_of(error, step=5)
    assert (fault.kind, fault.step, fault.exit_code) == (FaultKind.EXCEPTION, 5, 70)
    assert fault.evidence.rstrip().endswith("the end")
    assert len(fault.evidence.encode()) <= MAX_EVIDENCE_BYTES


@pytest.mark.device
def test_a_real_allocation_that_does_not_fit() -> None:
    def huge() -> jax.Array:
        return jnp.ones((1 << 24, 1 << 24), jnp.float32)

    with pytest.raises(Exception) as error:  # noqa: PT011 (jaxlib's own class)
        jax.jit(huge)().block_until_ready()
    fault = fault_of(error.value, step=1)
    assert fault.kind is FaultKind.OUT_OF_MEMORY, fault
    assert "data.global_batch" in fault.evidence


def test_nonfinite_rule_counts_in_a_row_only() -> None:
    rule = NonfiniteRule(max_in_a_row=3)
    for step, finite in enumerate([False, False, True, False, False, True], start=1):
        rule.observe(step, finite=finite)
    rule.observe(7, finite=False)
    rule.observe(8, finite=False)
    with pytest.raises(FaultError, match="steps 7 to 9"):
        rule.observe(9, finite=False)
