"""Steps are added up; nothing is lost between two events."""

from jaxft.metrics.meters import StepMeter, steps_per_sec


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_is_told_at_once_later_ones_in_bulk() -> None:
    clock = Clock()
    meter = StepMeter(min_secs=1.0, clock=clock)
    meter.start()
    records = []
    for step in range(1, 24):
        clock.now += 0.125
        finite = step != 7
        meter.observe(step, {"loss": float(step)}, finite=finite, data_secs=0.01)
        if (record := meter.take()) is not None:
            records.append(record)
    records.append(meter.take(force=True))
    assert [(r["first_step"], r["step"]) for r in records] == [
        (1, 1),
        (2, 9),
        (10, 17),
        (18, 23),
    ]
    assert [r["metrics"]["loss"] for r in records] == [1.0, 9.0, 17.0, 23.0]
    assert sum(r["num_skipped"] for r in records) == 1
    assert abs(sum(r["secs"] for r in records) - 23 * 0.125) < 1e-9
    assert abs(sum(r["data_secs"] for r in records) - 0.23) < 1e-9
    assert meter.take(force=True) is None


def test_no_limit_is_one_event_a_step() -> None:
    meter = StepMeter(min_secs=0.0, clock=lambda: 5.0)
    meter.start()
    for step in range(1, 4):
        meter.observe(step, {}, finite=True, data_secs=0.0)
        record = meter.take()
        assert record is not None
        assert record["first_step"] == record["step"] == step


def test_rate() -> None:
    assert steps_per_sec({"first_step": 11, "step": 20, "secs": 2.0}) == 5.0
    assert steps_per_sec({"first_step": 1, "step": 1, "secs": 0.0}) == 0.0
