"""What left the loop becomes the fault it is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxft.config import ConfigError
from jaxft.faults import exceptions
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


def evidence_of(function: Callable[[], object]) -> str:
    try:
        function()
    except BaseException as error:
        return fault_of(error).evidence
    raise AssertionError("it raised nothing")


def test_text_that_is_cut_still_reads_as_a_traceback() -> None:
    def deep(depth: int, text: str) -> None:
        if depth:
            # Two bodies, so that the frames are not folded into one line.
            deep(depth - 1, text) if depth % 2 else [deep(depth - 1, text)]
        raise RuntimeError(text)

    for depth, text in ((300, "short"), (300, "y" * 9000 + " end"), (0, "z" * 9000)):
        text_of = evidence_of(lambda d=depth, t=text: deep(d, t))
        assert len(text_of.encode()) <= MAX_EVIDENCE_BYTES
        first, *_, last = text_of.strip().splitlines()
        assert first == "Traceback (most recent call last):"
        assert last.startswith(f"RuntimeError: {text[:5]}")
        assert last.endswith(text[-5:])
        assert "in deep\n" in text_of


def test_text_of_many_bytes_is_cut_between_letters() -> None:
    def fail() -> None:
        raise ValueError("\u20ac" * 9000 + "!")

    assert evidence_of(fail).rstrip().endswith("\u20ac!")


def test_notes_of_the_user_stay() -> None:
    error = ValueError("no")
    error.add_note("look at row 7")
    assert fault_of(error).evidence == "ValueError: no\nlook at row 7\n"


def test_a_call_of_exit_is_a_bug_too() -> None:
    fault = fault_of(SystemExit(3))
    assert (fault.kind, fault.exit_code) == (FaultKind.EXCEPTION, 70)
    assert fault.evidence.strip() == "SystemExit: 3"


@pytest.mark.device
@pytest.mark.parametrize("wrap", [None, "cause", "context", "group"])
def test_through_jax_the_exception_itself_is_last(wrap: str | None) -> None:
    """JAX puts a note behind it; if it no longer does, `_JAX_NOTE` may go."""

    def traced(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    def fail() -> None:
        try:
            jax.jit(traced)(1.0)
        except KeyError as error:
            notes.extend(error.__notes__)
            if wrap == "cause":
                raise RuntimeError("mine") from error
            if wrap == "context":
                raise RuntimeError("mine")  # noqa: B904 (that is the case)
            if wrap == "group":
                raise ExceptionGroup("mine", [error]) from None
            raise

    notes: list[str] = []
    text = evidence_of(fail)
    assert any(exceptions._JAX_NOTE in note for note in notes)
    assert "JAX has removed" not in text
    if wrap != "group":  # Its last line is a frame of dashes.
        assert "mine" in text.strip().splitlines()[-1]


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
    with pytest.raises(FaultError, match="steps 7 to 9; none of them was applied"):
        rule.observe(9, finite=False)


def test_nonfinite_rule_knows_whether_there_is_a_guard() -> None:
    rule = NonfiniteRule(max_in_a_row=1, guarded=False)
    with pytest.raises(FaultError, match="steps 5 to 5; all were applied"):
        rule.observe(5, finite=False)
