"""Batches that are bad by their number, whenever they are read."""

import math

import numpy as np

from jaxft.faults.plan import parse_plan
from jaxft.faults.poison import (
    GRADIENT_FIELD,
    LOSS_FIELD,
    PoisonedBatches,
    factors,
    with_factors,
)


class Stream:
    fingerprint = "stream"

    def probe(self):
        return "order"

    def read(self, batch_number):
        return {"inputs": np.full((3, 2), batch_number, np.int32)}


def plan(text):
    return parse_plan(text, num_steps=100)


def test_factors_by_number():
    faults = plan("nan_grad@2-3; bad_batch@5; spike@7; spike@8:4; spike@8:2")
    one = (1.0, 1.0)
    assert [factors(faults, n) for n in (0, 1, 4, 6, 9)] == [one] * 5
    for number in (2, 3):
        loss, gradient = factors(faults, number)
        assert loss == 1.0
        assert math.isnan(gradient)
    assert all(math.isnan(x) for x in factors(faults, 5))
    assert factors(faults, 7) == (1000.0, 1000.0)
    assert factors(faults, 8) == (8.0, 8.0)


def test_a_batch_is_bad_whenever_it_is_read():
    stream = PoisonedBatches(Stream(), plan("bad_batch@1"))
    assert stream.fingerprint == "stream"
    assert stream.probe() == "order"
    for _ in range(2):
        for number in (0, 1, 2):
            batch = stream.read(number)
            assert (batch["inputs"] == number).all()
            for name in (LOSS_FIELD, GRADIENT_FIELD):
                assert batch[name].shape == (3,)
                assert batch[name].dtype == np.float32
                assert np.isnan(batch[name]).all() == (number == 1)


def test_factors_of_one_are_for_whoever_needs_the_fields():
    batch = with_factors({"x": np.zeros((4, 2))})
    assert (batch[LOSS_FIELD] == 1).all()
    assert batch[GRADIENT_FIELD].shape == (4,)
