import hashlib
import json
import random
import signal
import subprocess
import sys

import grain
import numpy as np
import pytest

from jaxft.config import ConfigError, Corpus, DataConfig
from jaxft.data.iterator import BatchIterator
from jaxft.data.pipeline import Pipeline, heldout_batches
from jaxft.data.sources import SyntheticSource, make_sources


class Rows:
    """Row i is {"id": i, "x": [i, i]}."""

    def __init__(self, num_rows, *, fingerprint="rows"):
        self.fingerprint = f"{fingerprint} {num_rows}"
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def __getitem__(self, index, /):
        return {"id": np.int64(index), "x": np.full(2, index, np.float32)}


def make_config(**fields):
    return DataConfig(**{"global_batch": 8, **fields})


def ids(pipeline, count):
    return np.concatenate([pipeline.sample_ids(b) for b in range(count)])


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_together_read_the_global_batch(num_processes):
    source, config = Rows(30), make_config()
    whole = Pipeline(source, config=config)
    share = 8 // num_processes
    parts = [
        Pipeline(source, config=config, rows=range(p * share, (p + 1) * share))
        for p in range(num_processes)
    ]
    assert {part.fingerprint for part in parts} == {whole.fingerprint}
    for b in range(12):
        together = np.concatenate([part.read(b)["id"] for part in parts])
        np.testing.assert_array_equal(together, whole.read(b)["id"])
        np.testing.assert_array_equal(together, whole.sample_ids(b))


def test_rows_need_not_be_neighbours():
    whole = Pipeline(Rows(30), config=make_config())
    part = Pipeline(Rows(30), config=make_config(), rows=[5, 0])
    np.testing.assert_array_equal(part.read(3)["id"], whole.sample_ids(3)[[5, 0]])


def test_leaves_keep_shape_and_dtype():
    batch = Pipeline(Rows(30), config=make_config()).read(0)
    assert batch["id"].shape == (8,)
    assert batch["id"].dtype == np.int64
    assert batch["x"].shape == (8, 2)
    assert batch["x"].dtype == np.float32


@pytest.mark.parametrize("num_rows", [1, 3, 8, 30, 101])
def test_each_epoch_is_a_permutation_and_no_row_is_dropped(num_rows):
    # 30 and 101 rows do not fill whole batches of 8; 1 and 3 not even one.
    pipeline = Pipeline(Rows(num_rows), config=make_config())
    order = ids(pipeline, num_rows)
    assert pipeline.num_rows == num_rows
    epochs = order.reshape(-1, num_rows)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))
    if num_rows >= 30:
        assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_without_shuffle_rows_come_in_order():
    pipeline = Pipeline(Rows(30), config=make_config(shuffle=False))
    np.testing.assert_array_equal(ids(pipeline, 10), np.arange(80) % 30)


def test_any_batch_is_read_alone():
    order = ids(Pipeline(Rows(30), config=make_config()), 40).reshape(40, 8)
    numbers = list(range(40))
    random.Random(0).shuffle(numbers)
    fresh = Pipeline(Rows(30), config=make_config())
    for b in numbers:
        np.testing.assert_array_equal(fresh.read(b)["id"], order[b])
    assert fresh.read(10**12)["id"].shape == (8,)


def test_seeds_do_not_share_orders():
    # grain seeds epoch e with seed + e; seeds 0 and 1 must not be one epoch apart.
    def epochs(seed):
        order = ids(Pipeline(Rows(32), config=make_config(seed=seed)), 16)
        return {epoch.tobytes() for epoch in order.reshape(4, 32)}

    assert not epochs(0) & epochs(1)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**70])
def test_any_integer_is_a_seed(seed):
    order = ids(Pipeline(Rows(32), config=make_config(seed=seed)), 4)
    np.testing.assert_array_equal(np.sort(order), np.arange(32))


def test_the_order_never_changes():
    # Fixed for good: another value means that no old run can be resumed.
    pipeline = Pipeline(Rows(30), config=make_config())
    assert pipeline.sample_ids(4).tolist() == [9, 25, 10, 18, 23, 15, 14, 26]
    assert pipeline.probe() == "08a3c58d141d3774"


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"shuffle": False}, {"global_batch": 4}]
)
def test_fingerprint_sees_what_changes_the_stream(change):
    plain = Pipeline(Rows(30), config=make_config())
    other = Pipeline(Rows(30), config=make_config(**change))
    assert other.fingerprint != plain.fingerprint


def test_fingerprint_and_probe_see_the_source_and_not_the_speed():
    plain = Pipeline(Rows(30), config=make_config())
    same = Pipeline(Rows(30), config=make_config(num_threads=7, prefetch=9))
    assert same.fingerprint == plain.fingerprint
    assert same.probe() == plain.probe()
    other = Pipeline(Rows(30, fingerprint="other"), config=make_config())
    assert other.fingerprint != plain.fingerprint
    assert Pipeline(Rows(31), config=make_config()).probe() != plain.probe()
    assert Pipeline(Rows(30), config=make_config(seed=1)).probe() != plain.probe()


@pytest.mark.parametrize("prefetch", [1, 8])
def test_state_at_every_step_of_three_epochs_gives_the_same_next_batches(prefetch):
    def iterate():
        pipeline = Pipeline(Rows(30), config=make_config())
        return BatchIterator(
            pipeline, num_threads=2, prefetch=prefetch, skipped=[(4, 6)]
        )

    with iterate() as iterator:
        states, batches = [], []
        for _ in range(14):
            states.append(json.dumps(iterator.get_state()))
            batches.append(next(iterator)["id"].tolist())
    for k, state in enumerate(states):
        with iterate() as restored:
            restored.set_state(json.loads(state))
            again = [next(restored)["id"].tolist() for _ in range(14 - k)]
        assert again == batches[k:]


def test_positions_move_between_numbers_of_processes():
    # 8 -> 4 -> 8 processes, each change in the middle of an epoch.
    config, state, seen = make_config(), None, []
    for num_processes in (8, 4, 8):
        share = 8 // num_processes
        iterators = [
            BatchIterator(
                Pipeline(
                    Rows(30), config=config, rows=range(p * share, (p + 1) * share)
                ),
                num_threads=1,
                prefetch=2,
            )
            for p in range(num_processes)
        ]
        for iterator in iterators:
            if state is not None:
                iterator.set_state(state)
        for _ in range(5):
            seen += [np.concatenate([next(it)["id"] for it in iterators])]
        states = [iterator.get_state() for iterator in iterators]
        assert all(other == states[0] for other in states)
        state = states[-1]
        for iterator in iterators:
            iterator.close()
    expected = ids(Pipeline(Rows(30), config=config), 15)
    np.testing.assert_array_equal(np.concatenate(seen), expected)


# Draws up to 30 batches; after each, what was seen and the position go to disk as
# one, and the parent is asked whether to go on.
DRAWER = """
import json, os, sys
from jaxft.config import Corpus, DataConfig
from jaxft.data.iterator import BatchIterator
from jaxft.data.pipeline import Pipeline
from jaxft.data.sources import make_sources

config = DataConfig(corpus=Corpus.TEXT, path=sys.argv[1], seq_len=4, global_batch=8)
pipeline = Pipeline(make_sources(config).train, config=config)
seen, skipped = [], [(5, 7)]
with BatchIterator(pipeline, num_threads=2, prefetch=8, skipped=skipped) as iterator:
    if os.path.exists(sys.argv[2]):
        with open(sys.argv[2]) as file:
            seen, state = json.load(file)
        iterator.set_state(state)
    while iterator.step < 30:
        seen.append(next(iterator)["inputs"].tolist())
        with open(sys.argv[2] + ".new", "w") as file:
            json.dump([seen, iterator.get_state()], file)
        os.replace(sys.argv[2] + ".new", sys.argv[2])
        print(len(seen), flush=True)
        sys.stdin.readline()
"""


def draw(corpus, record, *, kill_after=None):
    """Runs `DRAWER`; SIGKILL arrives after that many of its lines."""
    command = [sys.executable, "-c", DRAWER, str(corpus), str(record)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        for number, _ in enumerate(process.stdout, start=1):
            if number == kill_after:
                process.kill()
                break
            process.stdin.write("go on\n")
            process.stdin.flush()
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return json.loads(record.read_text())[0]


def test_killed_twice_the_batches_are_those_of_an_undisturbed_run(tmp_path):
    # 30 batches of 8 are over five epochs of these rows.
    corpus = tmp_path / "text.txt"
    corpus.write_text("".join(f"{i:03}" for i in range(60)))
    expected = draw(corpus, tmp_path / "undisturbed")
    assert len(expected) == 30
    record = tmp_path / "killed"
    assert draw(corpus, record, kill_after=7) == expected[:7]
    assert draw(corpus, record, kill_after=9) == expected[:16]
    assert draw(corpus, record) == expected


def test_a_changed_corpus_is_refused(tmp_path):
    corpus = tmp_path / "text.txt"
    corpus.write_text("some text " * 40)
    config = DataConfig(corpus=Corpus.TEXT, path=str(corpus), seq_len=4)

    def iterate():
        pipeline = Pipeline(make_sources(config).train, config=config)
        return BatchIterator(pipeline, num_threads=1, prefetch=1)

    with iterate() as iterator:
        state = iterator.get_state()
    with iterate() as iterator:
        iterator.set_state(state)
    corpus.write_text("some text " * 39 + "same text ")
    with iterate() as iterator, pytest.raises(ConfigError, match="another corpus"):
        iterator.set_state(state)


def test_another_shuffle_under_the_same_settings_is_refused(monkeypatch):
    config = make_config()
    with BatchIterator(
        Pipeline(Rows(30), config=config), num_threads=1, prefetch=1
    ) as iterator:
        state = iterator.get_state()
    # As if a new version of grain had another shuffle.
    shuffle = grain.MapDataset.shuffle
    monkeypatch.setattr(
        grain.MapDataset, "shuffle", lambda self, seed: shuffle(self, seed=seed + 1)
    )
    other = Pipeline(Rows(30), config=config)
    assert other.fingerprint == state["fingerprint"]
    with (
        BatchIterator(other, num_threads=1, prefetch=1) as iterator,
        pytest.raises(ConfigError, match="another order") as caught,
    ):
        iterator.set_state(state)
    assert "\n" not in str(caught.value)


def test_threads_read_what_one_reads():
    config = make_config()
    source = SyntheticSource(seq_len=16, seed=3, rows=range(100))
    pipeline = Pipeline(source, config=config)
    digests = []
    for num_threads in (1, 4):
        with BatchIterator(pipeline, num_threads=num_threads, prefetch=8) as iterator:
            digest = hashlib.sha256()
            for _ in range(100):
                digest.update(next(iterator)["inputs"].tobytes())
            digests.append(digest.hexdigest())
    assert digests[0] == digests[1]


def test_heldout_batches_are_fixed_and_spread_over_the_source():
    config = make_config(seed=5)
    batches = heldout_batches(Rows(100), config=config, rows=None, num_batches=3)
    rows = np.concatenate([batch["id"] for batch in batches])
    assert rows.shape == (24,)
    assert (np.diff(rows) > 0).all()
    assert rows[0] == 0
    assert rows[-1] >= 90
    again = heldout_batches(
        Rows(100), config=make_config(seed=6), rows=None, num_batches=3
    )
    for one, two in zip(batches, again, strict=True):
        np.testing.assert_array_equal(one["x"], two["x"])


def test_heldout_batches_are_fewer_where_the_source_is_short():
    batches = heldout_batches(Rows(17), config=make_config(), rows=None, num_batches=9)
    rows = np.concatenate([batch["id"] for batch in batches])
    assert len(np.unique(rows)) == 16


def test_heldout_batches_are_split_like_others():
    config = make_config()
    whole = heldout_batches(Rows(40), config=config, rows=None, num_batches=2)
    half = heldout_batches(Rows(40), config=config, rows=range(4, 8), num_batches=2)
    for one, two in zip(whole, half, strict=True):
        np.testing.assert_array_equal(one["id"][4:], two["id"])


def test_heldout_source_without_one_batch_is_refused():
    with pytest.raises(ConfigError, match="7 held-out rows do not fill") as caught:
        heldout_batches(Rows(7), config=make_config(), rows=None, num_batches=1)
    assert caught.value.path == "data.holdout_fraction"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [[], [8], [-1], range(4, 9)])
def test_rows_outside_the_batch_are_refused(rows):
    with pytest.raises(ValueError, match="0 to 7"):
        Pipeline(Rows(30), config=make_config(), rows=rows)


def test_negative_batches_are_refused():
    pipeline = Pipeline(Rows(30), config=make_config())
    with pytest.raises(ValueError, match="no batch -1"):
        pipeline.read(-1)
    with pytest.raises(ValueError, match="no batch -1"):
        pipeline.sample_ids(-1)


class Custom(Rows):
    """Rows made by a function."""

    def __init__(self, make_row, num_rows=30):
        super().__init__(num_rows)
        self._make_row = make_row

    def __getitem__(self, index, /):
        return self._make_row(index)


@pytest.mark.parametrize(
    ("make_row", "problem"),
    [
        (lambda i: np.zeros(3), "must be a dict of arrays, row 0 is ndarray"),
        (lambda i: {}, "must be a dict of arrays"),
        (lambda i: {"text": np.array("a\nb")}, "'text' of row 0 has dtype <U3"),
        (lambda i: {"x": np.array([None])}, "dtype object"),
        (lambda i: {"a": i, "x": np.random.default_rng().random(4)}, "read twice"),
    ],
)
def test_a_source_that_cannot_be_resumed_is_refused_at_the_start(make_row, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        Pipeline(Custom(make_row), config=make_config())
    assert caught.value.path == "data.factory"
    assert "\n" not in str(caught.value)


def test_an_empty_source_is_refused():
    with pytest.raises(ConfigError, match="no rows"):
        Pipeline(Rows(0), config=make_config())


def test_more_rows_than_the_shuffle_can_order_are_refused():
    with pytest.raises(ConfigError, match=r"data\.shuffle"):
        Pipeline(Rows(2**32 + 1), config=make_config())
    pipeline = Pipeline(Rows(2**32 + 1), config=make_config(shuffle=False))
    assert pipeline.sample_ids(0).tolist() == list(range(8))


@pytest.mark.parametrize(
    "odd",
    [
        {"x": np.zeros(3, np.float32)},
        {"x": np.zeros(2, np.float64)},
        {"y": np.zeros(2, np.float32)},
        {"x": np.zeros(2, np.float32), "y": np.zeros(2)},
    ],
)
def test_a_row_unlike_the_first_is_named(odd):
    plain = {"x": np.zeros(2, np.float32)}
    source = Custom(lambda i: odd if i == 13 else plain)
    pipeline = Pipeline(source, config=make_config(shuffle=False))
    pipeline.read(0)
    with pytest.raises(ConfigError, match=r"row 13 is .*row 0 is ") as caught:
        pipeline.read(1)
    assert "\n" not in str(caught.value)
