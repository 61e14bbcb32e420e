"""The order of operations at a step border, and when the loop ends."""

import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxft.config import Config
from jaxft.faults.grace import SaveTimes
from jaxft.faults.watchdog import Answer, PhaseBoard, Watchdog
from jaxft.limits import TimeLimits
from jaxft.loop import Ending, Loop, StopWhileWaiting
from jaxft.records import Control, Fault, FaultError, FaultKind, Phase
from jaxft.types import StepOutput

pytestmark = pytest.mark.device


class Recorder:
    """Parts that write down in which order they are used."""

    def __init__(self, config: Config):
        self.calls: list[Any] = []
        self.drawn = 0
        self.committed: list[int] = []
        self.failure: FaultError | None = None
        self.stop: str | None = None
        self.urgent = False
        self.in_flight: int | None = None
        self.left_secs = 5.0
        self.notes: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.finite = True
        self.draw_error: Exception | None = None
        self.parts: Any = types.SimpleNamespace(
            config=config,
            iterator=self,
            manager=self,
            heldout=({},),
            train_step=self,
            facts={"jax": "x"},
            items=("rows", 1),
        )

    # the iterator
    @property
    def step(self) -> int:
        return self.drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.draw_error is not None:
            raise self.draw_error
        self.calls.append(("draw", self.drawn))
        self.drawn += 1
        return {}

    def get_state(self) -> dict[str, int]:
        return {"step": self.drawn}

    def take_wait_secs(self) -> float:
        return 0.0

    # placement and step
    def place(self, batch: Any, control: int = 0) -> tuple[Any, int]:
        return batch, control

    def step_fn(self, state: int, batch: Any, word: int) -> tuple[int, Any]:
        self.calls.append(("step", state + 1))
        return state + 1, Output(self, state + 1, word)

    def evaluate(self, state: int, batch: Any) -> dict[str, Any]:
        self.calls.append(("evaluate", state))
        return {"loss": (np.float32(6), np.float32(2))}

    # the manager
    @property
    def last_committed(self) -> int | None:
        return max(self.committed, default=None)

    def should_save(self, step: int) -> bool:
        return step % 3 == 0 and step not in self.committed

    def save(self, step: int, state: int, **content: Any) -> bool:
        self.calls.append(("save", step, content["data"]["step"], content["metrics"]))
        assert state == step
        self.committed.append(step)
        return True

    def latest(self) -> int | None:
        return max(self.committed, default=None)

    def wait(self, timeout_secs: float | None = None) -> None:
        self.calls.append("wait")
        self.left_secs = max(0.0, self.left_secs - (timeout_secs or 0.0))
        if self.stop and self.failure:
            raise self.failure

    def error(self) -> FaultError | None:
        return self.failure

    # the stop requests
    def poll(self) -> str | None:
        return self.stop

    def deadline_secs(self) -> float | None:
        return self.left_secs if self.stop else None

    # the progress line
    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def loop(self, **kwargs: Any) -> Loop:
        return Loop(
            self.parts,
            self.step_fn,
            eval_fn=self.evaluate,
            stops=self,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            progress=self,
            **kwargs,
        )


def Output(recorder: Recorder, step: int, word: int) -> StepOutput:
    class Read:
        """Notices when the host reads it."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            recorder.calls.append(("read", step))
            return np.int32(word)

    return StepOutput(
        metrics={"loss": np.float32(1)},
        finite=np.bool_(recorder.finite),
        control=Read(),
    )


def config_of(num_steps: int, *, every: int = 0, max_nonfinite: int = 10) -> Config:
    config = Config()
    config.train.num_steps = num_steps
    config.train.max_nonfinite = max_nonfinite
    config.eval.every_steps = every
    return config


def test_order_at_every_border() -> None:
    recorder = Recorder(config_of(4, every=3))
    state, ending = recorder.loop().run(0)
    assert (state, ending) == (4, Ending.FINISHED)
    evaluated = {"loss": 3.0}
    assert recorder.calls == [
        ("evaluate", 0),
        ("save", 0, 0, evaluated),
        ("draw", 0),
        ("step", 1),
        ("draw", 1),
        ("step", 2),
        ("read", 1),
        ("draw", 2),
        ("step", 3),
        ("read", 2),
        # The border after step 3: evaluate, save before the next draw, draw, step,
        # and only then read what step 3 gave.
        ("evaluate", 3),
        ("save", 3, 3, evaluated),
        ("draw", 3),
        ("step", 4),
        ("read", 3),
        ("evaluate", 4),
        ("read", 4),
        ("save", 4, 4, evaluated),
        "wait",
    ]


def test_the_last_step_is_committed_once_whichever_rule_asked() -> None:
    for num_steps in (1, 3, 5, 6):
        recorder = Recorder(config_of(num_steps))
        recorder.loop().run(0)
        assert recorder.committed.count(num_steps) == 1
        assert recorder.calls[-1] == "wait"


def test_a_resumed_run_that_is_over_does_nothing() -> None:
    recorder = Recorder(config_of(6))
    recorder.drawn, recorder.committed = 6, [6]
    assert recorder.loop(restored=6).run(6) == (6, Ending.FINISHED)
    assert recorder.calls == ["wait"]


def test_a_stop_takes_the_way_of_the_control_word() -> None:
    recorder = Recorder(config_of(100))
    recorder.stop = "SIGTERM"
    state, ending = recorder.loop().run(0)
    # In with the batch of step 1, read after step 2 was dispatched.
    assert (state, ending) == (2, Ending.STOPPED)
    assert recorder.calls[-3:] == [("read", 2), ("save", 2, 2, None), "wait"]


@pytest.mark.parametrize("in_flight", [None, 2])
def test_a_save_that_outlasts_the_grace_is_left_behind(in_flight: int | None) -> None:
    recorder = Recorder(config_of(100))
    recorder.stop, recorder.in_flight = "SIGTERM", in_flight
    fault = Fault(kind=FaultKind.SAVE_FAILED, step=2, evidence="not over")
    error = FaultError(fault)
    original = recorder.save

    def save(*args: Any, **content: Any) -> bool:
        recorder.failure = error
        return original(*args, **content)

    recorder.parts.manager = types.SimpleNamespace(
        **{name: getattr(recorder, name) for name in ("wait", "latest", "in_flight")},
        save=save,
        error=lambda: None,
        should_save=lambda step: False,
        last_committed=None,
    )
    if in_flight is None:
        # It failed in time: that is a reason of its own.
        with pytest.raises(FaultError, match="not over"):
            recorder.loop().run(0)
    else:
        assert recorder.loop().run(0)[1] == Ending.STOPPED
        assert recorder.left_secs == 0
        (told,) = (fields for kind, fields in recorder.events if kind == "save_failed")
        assert told["step"] == 2


def slow_save(recorder: Recorder, *, secs: float, flying: int | None) -> SaveTimes:
    """A manager that takes so long for a save; one has been in flight for 2 s."""
    now = [0.0]
    times = SaveTimes(timer=lambda: now[0])
    for step in (1, 2):
        times.take("save_start", {"step": step, "blocking_secs": 0.0})
        now[0] += secs
        times.take("save_commit", {"step": step, "secs": secs})
    began = now[0]
    if flying is not None:
        recorder.in_flight = flying
        times.take("save_start", {"step": flying, "blocking_secs": 0.0})
        now[0] += 2.0
    save = recorder.save

    def begin(step: int, state: int, **content: Any) -> bool:
        nonlocal began
        assert recorder.in_flight is None
        save(step, state, **content)
        recorder.committed.remove(step)
        recorder.in_flight, began = step, now[0]
        return True

    def wait(timeout_secs: float | None = None) -> None:
        if recorder.in_flight is None:
            return
        slept = min(timeout_secs or 600.0, began + secs - now[0])
        now[0] += slept
        recorder.left_secs = max(0.0, recorder.left_secs - slept)
        if now[0] < began + secs:
            fault = Fault(kind=FaultKind.SAVE_FAILED, evidence="not over")
            raise FaultError(fault)
        recorder.committed.append(recorder.in_flight)
        recorder.in_flight = None

    recorder.save, recorder.wait = begin, wait
    recorder.should_save = lambda step: False
    return times


@pytest.mark.parametrize(
    ("secs", "flying", "actions", "committed"),
    [
        (4.0, None, ["save"], [9]),
        (6.0, None, ["leave"], []),
        (4.0, 5, ["wait", "leave"], [5]),
        (2.4, 5, ["wait", "save"], [5, 9]),
        (2.4, 9, ["wait", "leave"], [9]),
        (7.5, 5, ["leave"], []),
    ],
)
def test_a_stop_does_what_fits_into_the_grace_time(
    secs: float, flying: int | None, actions: list[str], committed: list[int]
) -> None:
    recorder = Recorder(config_of(100))
    recorder.stop, recorder.drawn = "SIGTERM", 7
    times = slow_save(recorder, secs=secs, flying=flying)
    _, ending = recorder.loop(restored=7, save_times=times).run(7)
    assert ending == Ending.STOPPED
    plans = [fields for kind, fields in recorder.events if kind == "stop_plan"]
    assert [plan["action"] for plan in plans] == actions
    assert recorder.committed == committed
    assert plans[0]["in_flight"] == (-1 if flying is None else flying)
    told = []
    if 9 not in committed:
        told = ["step 9: left before any step was committed"]
    if committed == [5]:
        told = ["step 9: left on the last committed step 5"]
    assert recorder.notes == told
    assert plans[0]["save_secs"] == pytest.approx([secs, secs])


@pytest.mark.parametrize("policy_says", ["fail", "warn"])
def test_what_was_in_flight_and_failed_is_made_good_or_told(policy_says: str) -> None:
    recorder = Recorder(config_of(100))
    recorder.stop, recorder.drawn, recorder.in_flight = "SIGTERM", 7, 5
    fault = Fault(kind=FaultKind.SAVE_FAILED, step=5, evidence="disk full")
    recorder.should_save = lambda step: False

    def wait(timeout_secs: float | None = None) -> None:
        if recorder.in_flight is not None:
            recorder.in_flight, recorder.left_secs = None, 0.0
            recorder.failure = FaultError(fault) if policy_says == "fail" else None
            raise FaultError(fault)

    recorder.wait = wait
    if policy_says == "fail":
        with pytest.raises(FaultError, match="disk full"):
            recorder.loop(restored=7).run(7)
    else:
        assert recorder.loop(restored=7).run(7)[1] == Ending.STOPPED
    assert recorder.committed == []


def test_a_save_that_ends_as_the_wait_gives_up_is_no_failure() -> None:
    recorder = Recorder(config_of(100))
    recorder.stop, recorder.drawn = "SIGTERM", 7
    recorder.should_save = lambda step: False

    def save(step: int, state: int, **content: Any) -> bool:
        recorder.in_flight = step
        return True

    def wait(timeout_secs: float | None = None) -> None:
        if recorder.in_flight is not None:
            recorder.committed.append(recorder.in_flight)
            recorder.in_flight = None
            fault = Fault(kind=FaultKind.SAVE_FAILED, evidence="not over after 0.1 s")
            raise FaultError(fault)

    recorder.save, recorder.wait = save, wait
    assert recorder.loop(restored=7).run(7)[1] == Ending.STOPPED
    assert recorder.committed == [9]


def test_a_stop_during_the_last_save_keeps_its_grace_time() -> None:
    recorder = Recorder(config_of(8))
    recorder.drawn = 8
    slow_save(recorder, secs=30.0, flying=None)
    begin = recorder.save

    def save(step: int, state: int, **content: Any) -> bool:
        recorder.stop = "SIGTERM"
        return begin(step, state, **content)

    recorder.save = save
    assert recorder.loop(restored=8).run(8)[1] == Ending.STOPPED
    assert recorder.left_secs == 0
    assert recorder.committed == []


def test_an_urgent_stop_saves_nothing() -> None:
    recorder = Recorder(config_of(100))
    recorder.stop, recorder.urgent = "SIGTERM", True
    assert recorder.loop().run(0) == (0, Ending.STOPPED)
    assert recorder.calls == []


def test_a_stop_while_waiting_for_input_leaves_at_that_border() -> None:
    recorder = Recorder(config_of(100))
    recorder.drawn = 7
    recorder.draw_error = StopWhileWaiting()
    assert recorder.loop(restored=7).run(7) == (7, Ending.STOPPED)
    assert recorder.calls == [("save", 7, 7, None), "wait"]


@pytest.mark.parametrize("delay_secs", [0, 0.2, None])
def test_input_that_ends_with_a_stop_costs_no_state(delay_secs: float | None) -> None:
    """A signal to all processes may reach those that read before it reaches this."""
    recorder = Recorder(config_of(100))
    recorder.drawn = 7
    recorder.draw_error = OSError("the pool of readers is gone")
    if delay_secs is None:
        with pytest.raises(OSError, match="readers is gone"):
            recorder.loop(restored=7).run(7)
        assert recorder.calls == []
        return
    asked = threading.Timer(delay_secs, setattr, (recorder, "stop", "SIGTERM"))
    asked.start()
    assert recorder.loop(restored=7).run(7) == (7, Ending.STOPPED)
    assert recorder.calls == [("save", 7, 7, None), "wait"]
    asked.join()


def test_a_failed_save_reaches_the_loop_through_the_word() -> None:
    recorder = Recorder(config_of(100))
    fault = Fault(kind=FaultKind.SAVE_FAILED, step=0, evidence="disk full")
    recorder.failure = FaultError(fault)
    with pytest.raises(FaultError, match="disk full"):
        recorder.loop().run(0)
    assert recorder.calls[-1] == ("read", 1)


def test_a_save_bit_saves_although_no_policy_asked() -> None:
    recorder = Recorder(config_of(5))
    original = recorder.place
    recorder.place = lambda batch, control=0: original(batch, Control.SAVE)
    recorder.loop().run(0)
    assert {2, 4} <= set(recorder.committed)


def test_non_finite_steps_in_a_row_end_the_run() -> None:
    recorder = Recorder(config_of(100, max_nonfinite=3))
    recorder.finite = False
    with pytest.raises(FaultError, match="steps 1 to 3") as error:
        recorder.loop().run(0)
    assert error.value.fault.exit_code == 65


class Board(PhaseBoard):
    """Writes down what is said before it begins."""

    def __init__(self, recorder: Recorder, **options: Any):
        super().__init__(**options)
        self.calls = recorder.calls

    def enter(self, phase: Phase) -> None:
        self.calls.append(("phase", str(phase)))
        super().enter(phase)


def test_every_phase_is_declared_before_it_begins() -> None:
    recorder = Recorder(config_of(4, every=3))
    board = Board(recorder)
    recorder.loop(board=board).run(0)
    before: list[Any] = []
    phase = ""
    for call in recorder.calls:
        if call[0] == "phase":
            phase = call[1]
        else:
            name = call if isinstance(call, str) else call[0]
            before.append((name, phase))
    expected = {
        "evaluate": {"evaluate"},
        "save": {"save"},
        "wait": {"save"},
        "draw": {"data"},
        "step": {"first_step", "step"},
        "read": {"first_step", "step"},
    }
    assert {name: {p for n, p in before if n == name} for name in expected} == expected
    # The first step is over when its output was read, not when it was dispatched.
    steps = [p for name, p in before if name == "step"]
    assert steps == ["first_step", "first_step", "step", "step"]
    assert board.step == 4


@pytest.mark.parametrize("where", ["evaluate", "save", "wait", "step_fn"])
def test_what_hangs_is_named(where: str) -> None:
    recorder = Recorder(config_of(8, every=4))
    now, hangs = [0.0], []
    board = Board(recorder, clock=lambda: now[0])
    dog = Watchdog(
        limits=TimeLimits(),
        answer=Answer.REPORT,
        board=board,
        emit=lambda kind, **fields: hangs.append((fields["phase"], fields["step"])),
        clock=lambda: now[0],
    )
    original = getattr(recorder, where)

    def hang(*args: Any, **kwargs: Any) -> Any:
        if recorder.drawn >= (8 if where == "wait" else 4):
            for _ in range(2000):  # All limits are below half an hour.
                now[0] += 1.0
                dog.tick()
        return original(*args, **kwargs)

    setattr(recorder, where, hang)
    recorder.loop(board=board).run(0)
    phase = {"wait": "save", "step_fn": "step"}.get(where, where)
    assert hangs[0][0] == phase
    assert {name for name, _ in hangs} == {phase}


def test_a_batch_drawn_before_the_save_is_noticed() -> None:
    recorder = Recorder(config_of(10))
    recorder.drawn = 1
    with pytest.raises(AssertionError, match="drawn too early"):
        recorder.loop().run(0)
