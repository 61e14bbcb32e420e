import json
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft.config import ConfigError
from jaxft.data.iterator import BatchIterator, batch_index

WINDOWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-3, 12)).map(lambda w: (w[0], sum(w))),
    max_size=6,
)
SKIPPED = ((7, 9), (2, 3), (8, 11), (30, 30))


class Numbers:
    """Batch b is [b]; `before_read` may block or raise."""

    def __init__(self, before_read=lambda number: None, *, fingerprint="f", order="o"):
        self.fingerprint = fingerprint
        self._order = order
        self._before_read = before_read
        self.reads, self.done = [], []

    def probe(self):
        return self._order

    def read(self, batch_number, /):
        self.reads.append(batch_number)
        self._before_read(batch_number)
        self.done.append(batch_number)
        return {"x": np.array([batch_number])}


def iterate(batches, **options):
    return BatchIterator(batches, **{"num_threads": 2, "prefetch": 4, **options})


def take(iterator, count):
    return [int(next(iterator)["x"][0]) for _ in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 10 s"
        time.sleep(0.001)


@settings(deadline=None)
@given(step=st.integers(0, 60), skipped=WINDOWS)
def test_batch_index_equals_counting(step, skipped):
    outside = [
        number
        for number in range(200)
        if not any(start <= number < stop for start, stop in skipped)
    ]
    assert batch_index(step, skipped) == outside[step]


@settings(deadline=None)
@given(skipped=WINDOWS, data=st.data())
def test_a_window_above_the_position_moves_nothing_before_it(skipped, data):
    step = data.draw(st.integers(1, 50))
    first_unread = batch_index(step, skipped)
    start = data.draw(st.integers(first_unread, 100))
    more = [*skipped, (start, start + data.draw(st.integers(0, 9)))]
    for earlier in range(step):
        assert batch_index(earlier, more) == batch_index(earlier, skipped)


def test_batch_index_reaches_far_steps_at_once():
    assert batch_index(10**15, [(10**9, 10**12)]) == 10**15 + 10**12 - 10**9


def test_batch_index_refuses_negative_steps():
    with pytest.raises(ValueError, match="no step -1"):
        batch_index(-1)


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_come_in_order(prefetch, num_threads):
    # Later batches are faster: without order, the last would come first.
    slow_first = Numbers(lambda number: time.sleep(0.004 if number % 4 == 0 else 0))
    with iterate(slow_first, num_threads=num_threads, prefetch=prefetch) as iterator:
        assert take(iterator, 30) == list(range(30))


@pytest.mark.parametrize("prefetch", [1, 8])
def test_state_at_every_step_continues_in_a_new_iterator(prefetch):
    with iterate(Numbers(), skipped=SKIPPED) as iterator:
        states, batches = [], []
        for _ in range(30):
            states.append(json.loads(json.dumps(iterator.get_state())))
            batches += take(iterator, 1)
    assert batches[:8] == [0, 1, 3, 4, 5, 6, 11, 12]
    for k, state in enumerate(states):
        with iterate(Numbers(), prefetch=prefetch) as restored:
            restored.set_state(state)
            assert restored.step == k
            assert take(restored, 30 - k) == batches[k:]


def test_the_position_is_the_consumers():
    batches = Numbers()
    with iterate(batches, prefetch=8) as iterator:
        take(iterator, 5)
        wait_until(lambda: len(batches.reads) == 13)
        state = iterator.get_state()
        assert state["step"] == 5
        # The same iterator, too: what it has read beyond is not delivered twice.
        iterator.set_state(state)
        assert take(iterator, 3) == [5, 6, 7]
    with iterate(Numbers(), prefetch=8) as restored:
        restored.set_state(state)
        assert take(restored, 1) == [5]


@pytest.mark.parametrize("prefetch", [1, 5])
def test_threads_read_no_further_than_prefetch(prefetch):
    batches = Numbers()
    with iterate(batches, num_threads=3, prefetch=prefetch) as iterator:
        take(iterator, 4)
        wait_until(lambda: len(batches.reads) == 4 + prefetch)
        time.sleep(0.02)
        assert sorted(batches.reads) == list(range(4 + prefetch))


def test_seek_while_every_thread_is_inside_a_read():
    entered, release = threading.Semaphore(0), threading.Event()

    def block_early(number):
        if number < 10:
            entered.release()
            assert release.wait(10)

    batches = Numbers(block_early)
    with iterate(batches, num_threads=2, prefetch=2) as iterator:
        assert entered.acquire(timeout=10)
        assert entered.acquire(timeout=10)
        start = time.monotonic()
        # The same steps, but other batches: 0 and 1 are in the readers' hands.
        iterator.seek(0, skipped=[(0, 50)])
        assert time.monotonic() - start < 1
        release.set()
        wait_until(lambda: len(batches.done) == 4)
        assert take(iterator, 3) == [50, 51, 52]
        iterator.seek(100)
        assert iterator.step == 100
        assert take(iterator, 2) == [150, 151]
        assert iterator.skipped == ((0, 50),)


def test_seek_refuses_negative_steps_and_stays():
    with iterate(Numbers()) as iterator:
        take(iterator, 2)
        with pytest.raises(ValueError, match="no step -1"):
            iterator.seek(-1)
        assert take(iterator, 1) == [2]


def test_an_error_of_a_reader_reaches_the_consumer_in_its_turn():
    failures = [OSError("the disk is gone")]

    def fail_once(number):
        if number == 3 and failures:
            raise failures.pop()

    with iterate(Numbers(fail_once)) as iterator:
        assert take(iterator, 3) == [0, 1, 2]
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(iterator)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert "fail_once" in [frame.name for frame in frames]
        # It was not delivered, so it is not counted, and a second try reads it.
        assert iterator.get_state()["step"] == 3
        assert take(iterator, 2) == [3, 4]


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt])
def test_no_error_of_a_reader_looks_like_the_end(error):
    def stop(number):
        raise error

    raises = pytest.raises(RuntimeError, match=error.__name__)
    with iterate(Numbers(stop)) as iterator, raises:
        list(iterator)


def test_waiting_is_measured_and_can_be_taken():
    seconds = iter(range(1000))
    with iterate(Numbers(), clock=lambda: next(seconds)) as iterator:
        take(iterator, 3)
        assert iterator.wait_secs == 3
        assert iterator.take_wait_secs() == 3
        assert iterator.wait_secs == 0
        take(iterator, 1)
        assert iterator.wait_secs == 1


def test_waiting_for_a_slow_source_is_measured():
    # Nothing is read before the consumer has waited for a tenth of a second.
    release = threading.Event()
    batches = Numbers(lambda number: release.wait(10))
    with iterate(batches, poll=release.set) as iterator:
        take(iterator, 1)
        assert iterator.wait_secs > 0.09


def test_what_was_read_ahead_is_not_waited_for():
    batches = Numbers(lambda number: time.sleep(0.1))
    with iterate(batches, num_threads=1, prefetch=5) as iterator:
        wait_until(lambda: len(batches.done) == 5)
        take(iterator, 5)
        # Reading them took half a second.
        assert iterator.wait_secs < 0.25


def test_a_waiting_consumer_can_be_called_off():
    release = threading.Event()

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    batches = Numbers(lambda number: release.wait(10))
    with iterate(batches, poll=stop) as iterator:
        with pytest.raises(Stop):
            next(iterator)
        assert iterator.step == 0
        release.set()
        wait_until(lambda: len(batches.reads) > 2)
        assert take(iterator, 1) == [0]


def test_close_ends_the_threads_and_the_iterator():
    before = threading.active_count()
    iterator = iterate(Numbers(), num_threads=3)
    take(iterator, 2)
    assert threading.active_count() == before + 3
    iterator.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    iterator.close()


def test_close_does_not_wait_for_a_stuck_read():
    release = threading.Event()
    iterator = iterate(Numbers(lambda number: release.wait(30)))
    start = time.monotonic()
    iterator.close()
    assert time.monotonic() - start < 5
    release.set()


def test_a_stuck_read_does_not_hold_up_the_interpreter():
    program = (
        "import threading\n"
        "from jaxft.data.iterator import BatchIterator\n"
        "class Stuck:\n"
        "    fingerprint = 'f'\n"
        "    def probe(self): return 'p'\n"
        "    def read(self, number, /): threading.Event().wait()\n"
        "BatchIterator(Stuck(), num_threads=2, prefetch=2)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def test_the_iterator_is_host_only():
    program = (
        "import sys, jaxft.data.iterator, jaxft.data.sources\n"
        "sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def test_state_names_versions_for_people_only():
    with iterate(Numbers()) as iterator:
        state = iterator.get_state()
        assert state["versions"]["numpy"] == np.__version__
        iterator.set_state({**state, "versions": {"grain": "0.0.1"}})


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (Numbers(fingerprint="g"), "another corpus"),
        (Numbers(order="p"), "another order"),
    ],
)
def test_a_position_in_another_stream_is_refused(other, problem):
    with iterate(Numbers()) as iterator:
        take(iterator, 3)
        state = iterator.get_state()
    with iterate(other) as iterator:
        take(iterator, 1)
        with pytest.raises(ConfigError, match=problem) as caught:
            iterator.set_state(state)
        assert caught.value.path == "data"
        assert "\n" not in str(caught.value)
        assert take(iterator, 1) == [1]


@pytest.mark.parametrize(
    "damage",
    [
        {"step": None},
        {"step": 2.5},
        {"step": -1},
        {"step": "3"},
        {"skipped": [[1, 2, 3]]},
        {"skipped": [[1, "x"]]},
        {"skipped": 4},
    ],
)
def test_a_damaged_position_is_refused(damage):
    with iterate(Numbers()) as iterator:
        state = iterator.get_state()
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            iterator.set_state(state | damage)
        assert "\n" not in str(caught.value)
        assert iterator.step == 0


@pytest.mark.parametrize("missing", ["step", "skipped", "fingerprint", "probe"])
def test_an_incomplete_position_is_refused(missing):
    with iterate(Numbers()) as iterator:
        state = iterator.get_state()
        del state[missing]
        with pytest.raises(ConfigError, match=f"cannot be read.*{missing}"):
            iterator.set_state(state)


@pytest.mark.parametrize("name", ["num_threads", "prefetch"])
def test_no_threads_or_no_room_is_refused(name):
    with pytest.raises(ConfigError, match=f"config.data.{name}: must be positive"):
        iterate(Numbers(), **{name: 0})
