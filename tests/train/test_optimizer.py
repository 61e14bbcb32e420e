"""Schedule and weight decay of the shipped optimizer."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.config import ConfigError, OptimizerConfig, Schedule
from jaxft.train.optimizer import decay_mask, make_schedule


def test_schedule_warms_up_then_decays_to_the_end_fraction() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, decay_steps=100)
    rates = [float(make_schedule(config)(step)) for step in range(101)]
    assert 0 < rates[0] < rates[5] < rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    np.testing.assert_allclose(rates[100], config.end_fraction, rtol=1e-6)


def test_schedule_constant_needs_no_end() -> None:
    config = OptimizerConfig(
        learning_rate=0.5, warmup_steps=0, decay_steps=1, schedule=Schedule.CONSTANT
    )
    assert [float(make_schedule(config)(s)) for s in (0, 7, 10_000)] == [0.5] * 3


def test_schedule_refuses_a_warmup_without_end() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps: 100 leaves"):
        make_schedule(OptimizerConfig(warmup_steps=100, decay_steps=100))


def test_decay_acts_on_matrices_not_on_stacked_scales() -> None:
    params = {
        "kernel": jnp.ones((2, 3)),
        "norm": {"scale": jnp.ones((4, 3)), "bias": jnp.ones((4, 3))},
        "vector": jnp.ones(3),
    }
    assert decay_mask(params) == {
        "kernel": True,
        "norm": {"scale": False, "bias": False},
        "vector": False,
    }
