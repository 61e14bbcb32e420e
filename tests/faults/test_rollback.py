"""Where a run goes on after bad steps."""

from hypothesis import given
from hypothesis import strategies as st

from jaxft.faults.rollback import (
    ResumePoint,
    RollbackPolicy,
    RollbackQuestion,
)

POLICY = RollbackPolicy(
    max_rollbacks=3, near_batches=1000, skip_before=1, skip_after=10
)


def decide(policy=POLICY, **changes):
    steps = changes.pop("steps", [100, 200, 300])
    asked = {
        "first_step": 251,
        "first_batch": 250,
        "points": [ResumePoint(step=step, next_batch=step) for step in steps],
    }
    return policy.decide(RollbackQuestion(**(asked | changes)))


def test_the_newest_step_before_the_window():
    answer = decide()
    assert (answer.to, answer.skip) == (200, (249, 261))
    assert answer.reason == "back to step 200, without batches 249 to 260"


def test_a_step_inside_the_window_is_too_new():
    # Step 250 has trained on batch 249, which is to be left out.
    assert decide(steps=[200, 250]).to == 200
    assert decide(steps=[200, 249]).to == 249


def test_of_steps_that_are_all_too_new_the_oldest():
    answer = decide(steps=[250])
    assert (answer.to, answer.skip) == (250, (250, 261))


def test_a_step_behind_the_bad_one_is_no_place_to_go_on():
    answer = decide(steps=[251, 300])
    assert answer.to is None
    assert answer.reason == "no checkpoint from before step 251"


def test_a_spike_has_begun_before_it_was_seen():
    assert decide(margin_steps=50).to == 200
    assert decide(margin_steps=51).to == 100
    assert decide(margin_steps=500).to == 100


def test_the_window_doubles_where_it_did_not_help():
    first = decide()
    second = decide(first_batch=261, earlier=[first.skip])
    assert second.skip == (259, 282)
    third = decide(first_batch=282, earlier=[first.skip, second.skip])
    assert third.skip == (278, 323)
    last = decide(first_batch=330, earlier=[first.skip, second.skip, third.skip])
    assert last.to is None
    assert last.reason == "rolled back 3 times within 1000 batches already"
    # Far from there it is another matter.
    far = decide(first_batch=2000, earlier=[first.skip, second.skip, third.skip])
    assert far.skip == (1999, 2011)


def test_off():
    policy = RollbackPolicy(
        max_rollbacks=0, near_batches=1000, skip_before=1, skip_after=10
    )
    assert decide(policy).reason == "rollbacks are off"


@given(
    steps=st.lists(st.integers(1, 400), unique=True).map(sorted),
    shift=st.integers(0, 50),
    bad=st.integers(0, 400),
    before=st.integers(0, 20),
    after=st.integers(0, 20),
    margin_steps=st.integers(0, 100),
    earlier=st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 40)).map(
            lambda pair: (pair[0], sum(pair))
        ),
        max_size=4,
    ),
)
def test_whatever_was_seen(steps, shift, bad, before, after, margin_steps, earlier):
    points = [ResumePoint(step=step, next_batch=step + shift) for step in steps]
    policy = RollbackPolicy(
        max_rollbacks=3, near_batches=100, skip_before=before, skip_after=after
    )
    answer = decide(
        policy,
        first_step=bad + 1,
        first_batch=bad + shift,
        margin_steps=margin_steps,
        points=points,
        earlier=earlier,
    )
    if answer.to is None:
        near = [w for w in earlier if abs(bad + shift - w[1]) < 100]
        assert len(near) >= 3 or not [p for p in points if p.step <= bad]
        return
    start, stop = answer.skip
    # The bad batch is left out, and no batch that the state was trained on.
    assert start <= bad + shift < stop
    (point,) = [p for p in points if p.step == answer.to]
    assert point.next_batch <= start
    assert point.step <= bad
    best = [
        p.step for p in points if p.step <= bad - margin_steps and p.next_batch <= start
    ]
    fits = point.step <= bad - margin_steps
    assert point.step == (max(best) if fits else min(steps))


def test_rollbacks_end():
    """Data that is bad for ever ends the run after a few."""
    earlier, bad = [], 250
    while (answer := decide(first_batch=bad, earlier=earlier)).to is not None:
        earlier.append(answer.skip)
        bad = answer.skip[1]
    assert len(earlier) == 3
