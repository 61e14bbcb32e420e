"""What the loop does not do while steps are bad."""

import pytest

from jaxft.faults.nonfinite import BadStepsError
from jaxft.faults.spikes import SpikeRule
from jaxft.loop import Ending
from tests.test_loop import Recorder, config_of

pytestmark = pytest.mark.device


def test_nothing_is_saved_in_the_middle_of_bad_steps() -> None:
    recorder = Recorder(config_of(100, max_nonfinite=10))
    recorder.finite = False
    with pytest.raises(BadStepsError) as bad:
        recorder.loop().run(0)
    assert (bad.value.first_step, bad.value.last_step) == (1, 10)
    # A resume from one of the borders 3, 6 and 9 would begin behind the first.
    assert recorder.committed == [0]


def test_a_stop_in_the_middle_of_bad_steps_leaves_on_the_last_save() -> None:
    recorder = Recorder(config_of(100, max_nonfinite=10))
    recorder.finite, recorder.stop = False, "SIGTERM"
    assert recorder.loop().run(0) == (2, Ending.STOPPED)
    assert recorder.committed == [0]


def test_losses_are_looked_at_one_step_late() -> None:
    recorder = Recorder(config_of(4))
    rule = SpikeRule(factor=5.0, window=4, num_steps=1)
    recorder.loop(spikes=rule).run(0)
    assert rule.get_state() == [[step, 1.0] for step in (1, 2, 3, 4)]
