"""Decisions after a worker's death, as plain values."""

from __future__ import annotations

import dataclasses
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.records import EXIT_CODES, ExitCode, FaultKind
from jaxft.recovery.policy import ActionKind, CacheMode, RestartPolicy, WorkerExit

POLICY = RestartPolicy(
    max_restarts=4, refill_steps=100, backoff_secs=0.5, backoff_max_secs=3.0
)


def killed(last_step: int = -1, *, first_step: int = 1, **fields) -> WorkerExit:
    if last_step >= 0:
        fields |= {
            "first_step": first_step,
            "last_step": last_step,
            "reached_first_step": True,
        }
    return WorkerExit(
        kind=FaultKind.KILLED, status=-9, evidence="killed by SIGKILL", **fields
    )


def raised(step: int, *, evidence: str) -> WorkerExit:
    return WorkerExit(
        kind=FaultKind.EXCEPTION,
        status=70,
        first_step=1,
        last_step=step,
        reached_first_step=True,
        evidence=evidence,
    )


def test_finished_ends_with_zero():
    action = POLICY.decide([WorkerExit(kind=None, status=0)])
    assert action.kind is ActionKind.FINISH
    assert action.exit_code == 0
    assert action.budget_left == 4


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FaultKind.CONFIG, 78),
        (FaultKind.STOPPED, 75),
        (FaultKind.NO_CHECKPOINT, 66),
        (FaultKind.NONFINITE, 65),
        (FaultKind.OUT_OF_MEMORY, 77),
        (FaultKind.WORKDIR_IN_USE, 73),
    ],
)
def test_never_restarted(kind, code):
    action = POLICY.decide([WorkerExit(kind=kind, status=code, evidence="why\nso")])
    assert action.kind is ActionKind.STOP
    assert action.exit_code == code
    assert action.cause == kind
    assert action.reason == "so"


def test_every_other_kind_is_restarted_first():
    for kind in (FaultKind.KILLED, FaultKind.EXCEPTION, FaultKind.SAVE_FAILED):
        action = POLICY.decide([WorkerExit(kind=kind, status=1)])
        assert action.kind is ActionKind.RESTART


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 2, in <module>
    | ValueError: inner
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("evidence", "summary"),
    [
        ("", "exception"),
        ("why\nso\n", "so"),
        ("x" * 5000, "x" * 5000),
        (
            "Traceback (most recent call last):\n  File\nValueError: a\nb\n",
            "ValueError: a",
        ),
        (
            "Traceback (most recent call last):\n  ...\n\nKeyError: 'k'\nnote",
            "KeyError: 'k'",
        ),
        ("Traceback (most recent call last):\n  File\n    code\n", "code"),
        (GROUP, "ValueError: inner"),
    ],
)
def test_summary_is_the_exception_itself_and_whole(evidence, summary):
    worker = WorkerExit(kind=FaultKind.EXCEPTION, status=70, evidence=evidence)
    assert worker.summary == summary


def test_summary_of_a_real_chain():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second\nline") from error
    except ValueError:
        evidence = traceback.format_exc()
    worker = WorkerExit(kind=FaultKind.EXCEPTION, status=70, evidence=evidence)
    assert worker.summary == "ValueError: second"


def save_failed(last_step: int, committed_step: int) -> WorkerExit:
    worker = killed(last_step, committed_step=committed_step)
    return dataclasses.replace(worker, kind=FaultKind.SAVE_FAILED, evidence="disk full")


def test_a_failed_save_is_tried_again_by_a_restart():
    first = save_failed(20, 10)
    assert POLICY.decide([first]).kind is ActionKind.RESTART
    # The same again, and nothing was committed in between.
    action = POLICY.decide([first, save_failed(20, 10)])
    assert (action.kind, action.exit_code) == (ActionKind.STOP, ExitCode.SAVE_FAILED)
    assert "disk full" in action.reason
    assert action.verdict == "saving failed again"
    # A step was committed: another hiccup, paid from the budget.
    assert POLICY.decide([first, save_failed(30, 20)]).kind is ActionKind.RESTART
    # Another death in between says nothing about the disk.
    assert POLICY.decide([first, killed(20), first]).kind is ActionKind.RESTART


def test_failed_saves_use_up_the_budget_and_end_with_their_code():
    history = [save_failed(10 * n, 10 * n) for n in range(1, 5)]
    assert POLICY.decide(history).kind is ActionKind.RESTART
    action = POLICY.decide([*history, save_failed(50, 50)])
    assert (action.kind, action.exit_code) == (ActionKind.STOP, ExitCode.SAVE_FAILED)
    assert "no restart left" in action.verdict


def test_same_exception_at_the_same_step_stops():
    first = raised(7, evidence="File x\nValueError: <f at 0x7f00>")
    again = raised(7, evidence="File x\nValueError: <f at 0x7fab>")
    assert POLICY.decide([first]).kind is ActionKind.RESTART
    action = POLICY.decide([first, again])
    assert action.kind is ActionKind.STOP
    assert action.exit_code == ExitCode.CRASHED
    assert action.reason == "the same error again at step 7: ValueError: <f at 0x7fab>"
    # A death of another kind in between does not make it another error.
    assert POLICY.decide([first, killed(7), again]).kind is ActionKind.STOP


@pytest.mark.parametrize(
    "other",
    [
        raised(8, evidence="ValueError: a"),
        raised(7, evidence="ValueError: b"),
        WorkerExit(kind=FaultKind.KILLED, status=1, last_step=7),
    ],
)
def test_another_error_is_another_error(other):
    first = raised(7, evidence="ValueError: a")
    assert POLICY.decide([first, other]).kind is ActionKind.RESTART


def test_progress_costs_one_and_no_progress_two():
    history = [killed(10)]
    assert POLICY.decide(history).budget_left == 3
    history.append(killed(10, first_step=6))
    assert POLICY.decide(history).budget_left == 1
    history.append(killed(11, first_step=6))
    assert POLICY.decide(history).budget_left == 0
    history.append(killed(12, first_step=6))
    action = POLICY.decide(history)
    assert action.kind is ActionKind.STOP
    assert action.exit_code == ExitCode.CRASHED
    assert action.reason == (
        "no restart left: 4 workers died, 1 of them without progress, the last at "
        "step 12; the cause 4 times: killed by SIGKILL"
    )


def test_hangs_at_one_place_are_one_cause_and_end_with_their_code():
    history = [
        dataclasses.replace(
            killed(step),
            kind=FaultKind.HANG,
            status=71,
            evidence=f"stacks\nno progress for {step}.5 s in phase step, at a.py:7",
        )
        for step in (10, 20, 30, 40)
    ]
    for num in (1, 2, 3):
        assert POLICY.decide(history[:num]).kind is ActionKind.RESTART
    action = POLICY.decide([*history[:3], killed(30), history[3]])
    assert (action.kind, action.exit_code) == (ActionKind.STOP, ExitCode.HUNG)
    assert "the cause 4 times: no progress for 40.5 s in phase step" in action.reason


def test_budget_of_one_is_one_restart_and_none_is_none():
    one = dataclasses.replace(POLICY, max_restarts=1)
    assert one.decide([killed()]).kind is ActionKind.RESTART
    assert one.decide([killed(), killed()]).kind is ActionKind.STOP
    none = dataclasses.replace(POLICY, max_restarts=0)
    assert none.decide([killed(50)]).kind is ActionKind.STOP


def test_good_steps_refill_but_never_above_the_budget():
    history = [killed(10), killed(20, first_step=11)]
    assert POLICY.decide(history).budget_left == 2
    history.append(killed(120, first_step=11))
    assert POLICY.decide(history).budget_left == 2
    history.append(killed(5000, first_step=101))
    assert POLICY.decide(history).budget_left == 3


def test_refill_saves_the_last_restart():
    history = [killed(n) for n in (10, 20, 30, 40)]
    assert POLICY.decide(history).budget_left == 0
    assert POLICY.decide([*history, killed(140)]).kind is ActionKind.RESTART
    assert POLICY.decide([*history, killed(41)]).kind is ActionKind.STOP


def test_resuming_high_is_no_progress_of_the_first_worker():
    # It resumed from step 1000: only what it added counts as new.
    action = POLICY.decide([killed(1001, first_step=1001)])
    assert action.budget_left == 3
    history = [killed(1, first_step=1)] * 3
    high = POLICY.decide([*history, killed(1001, first_step=1001)])
    assert high.kind is ActionKind.STOP


def test_backoff_doubles_without_progress_and_ends_with_it():
    policy = dataclasses.replace(POLICY, max_restarts=100)
    history = []
    delays = []
    for _ in range(6):
        history.append(killed())
        delays.append(policy.decide(history).delay_secs)
    assert delays == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    history.append(killed(5))
    assert policy.decide(history).delay_secs == 0.0
    history.append(killed(5))
    history.append(killed(5))
    assert policy.decide(history).delay_secs == 0.5


def test_compile_cache_is_suspected_after_two_deaths_before_a_step():
    policy = dataclasses.replace(POLICY, max_restarts=100)
    history = []
    modes = []
    mode = CacheMode.KEEP
    for _ in range(6):
        history.append(killed(cache=mode))
        mode = policy.decide(history).cache
        modes.append(mode)
    assert modes == ["keep", "off", "fresh", "keep", "keep", "keep"]
    assert "compile cache off" in policy.decide(history[:2]).reason


def test_a_cache_that_was_to_blame_is_replaced():
    policy = dataclasses.replace(POLICY, max_restarts=100)
    history = [killed(), killed(), killed(9, cache=CacheMode.OFF)]
    assert policy.decide(history).cache is CacheMode.FRESH
    history.append(killed(19, cache=CacheMode.FRESH))
    assert policy.decide(history).cache is CacheMode.KEEP


def test_one_death_before_a_step_among_good_ones_keeps_the_cache():
    policy = dataclasses.replace(POLICY, max_restarts=100)
    history = [killed(5), killed(), killed(8), killed()]
    for end in range(1, 5):
        assert policy.decide(history[:end]).cache is CacheMode.KEEP


EXITS = st.builds(
    lambda first, more, reached: WorkerExit(
        kind=FaultKind.KILLED,
        status=-9,
        first_step=first if reached else -1,
        last_step=first + more if reached else -1,
        reached_first_step=reached,
    ),
    st.integers(1, 300),
    st.integers(0, 300),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(EXITS, min_size=1, max_size=60), st.integers(0, 12), st.integers(1, 400)
)
def test_restarts_stay_within_budget_and_refill(exits, max_restarts, refill_steps):
    policy = RestartPolicy(
        max_restarts=max_restarts,
        refill_steps=refill_steps,
        backoff_secs=0.5,
        backoff_max_secs=60.0,
    )
    num_restarts = 0
    for end in range(1, len(exits) + 1):
        action = policy.decide(exits[:end])
        assert 0 <= action.budget_left <= max(0, max_restarts - 1)
        assert 0.0 <= action.delay_secs <= 60.0
        assert "\n" not in action.reason
        assert action.exit_code == EXIT_CODES[FaultKind.KILLED]
        if action.kind is not ActionKind.RESTART:
            assert action.kind is ActionKind.STOP
            break
        num_restarts += 1
    highest = max((e.last_step for e in exits[:end]), default=0)
    assert num_restarts <= max_restarts + max(0, highest) // refill_steps


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 50), st.lists(st.integers(0, 30), max_size=120))
def test_a_loop_without_progress_always_ends(max_restarts, steps):
    policy = RestartPolicy(
        max_restarts=max_restarts,
        refill_steps=100,
        backoff_secs=0.5,
        backoff_max_secs=60.0,
    )
    history = [killed(30)] + [killed(step) for step in steps]
    stops = [
        end
        for end in range(1, len(history) + 1)
        if policy.decide(history[:end]).kind is ActionKind.STOP
    ]
    assert (len(history) <= max_restarts // 2 + 1) or stops


def test_huge_histories_do_not_overflow():
    policy = dataclasses.replace(POLICY, max_restarts=10_000)
    assert policy.decide([killed()] * 2000).delay_secs == 3.0
