import itertools
import os
import pathlib
import sysconfig
import time

import numpy as np
import pytest

from jaxft.config import Config, ConfigError, Corpus, DataConfig
from jaxft.data import sources as sources_module
from jaxft.data.sources import SyntheticSource, TokenSource, make_sources


def make_config(corpus, **fields):
    return DataConfig(**{"seq_len": 8, "corpus": corpus, **fields})


def tokens_of(source):
    """All tokens that the rows cover, checked to be consecutive."""
    rows = [source[i] for i in range(len(source))]
    for row in rows:
        np.testing.assert_array_equal(row["inputs"][1:], row["targets"][:-1])
    for one, two in itertools.pairwise(rows):
        assert one["targets"][-1] == two["inputs"][0]
    return [int(rows[0]["inputs"][0])] + [
        int(token) for row in rows for token in row["targets"]
    ]


@pytest.fixture
def texts(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02}" + "text " * 20)
    return tmp_path


def text_config(folder, **fields):
    return make_config(Corpus.TEXT, path=str(folder / "*.txt"), **fields)


def save(folder, array, name="tokens.npy"):
    np.save(folder / name, array)
    return str(folder / name)


def test_rows_have_the_promised_format():
    source = TokenSource(np.arange(30, dtype=np.uint8), seq_len=8, fingerprint="f")
    assert len(source) == 3
    row = source[1]
    assert row["inputs"].tolist() == list(range(8, 16))
    assert row["targets"].tolist() == list(range(9, 17))
    assert row["inputs"].dtype == row["targets"].dtype == np.int32
    assert row["inputs"].shape == row["targets"].shape == (8,)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)]
)
def test_every_token_but_the_first_is_a_target_once(num_tokens, num_rows):
    tokens = np.arange(num_tokens, dtype=np.uint16)
    source = TokenSource(tokens, seq_len=8, fingerprint="f")
    assert len(source) == num_rows
    if num_rows:
        assert tokens_of(source) == list(range(8 * num_rows + 1))


@pytest.mark.parametrize("index", [-1, 3, 10**9])
def test_rows_that_do_not_exist(index):
    tokens = TokenSource(np.zeros(30, np.uint8), seq_len=8, fingerprint="f")
    synthetic = SyntheticSource(seq_len=8, seed=0, rows=range(3))
    for source in (tokens, synthetic):
        with pytest.raises(IndexError, match=f"row {index} of 3"):
            source[index]


def test_stdlib_is_real_text_and_fast():
    start = time.monotonic()
    train, heldout = make_sources(DataConfig())
    secs = time.monotonic() - start
    assert secs < 5  # 0.1 s on an idle machine
    assert len(train) > 20_000
    assert 0.04 < len(heldout) / (len(train) + len(heldout)) < 0.051
    assert train.max_token < 256
    argparse = pathlib.Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    whole = [
        b"".join(
            bytes(row["inputs"].astype(np.uint8))
            for row in map(part.__getitem__, range(len(part)))
        )
        for part in (train, heldout)
    ]
    assert [argparse[:5000] in text for text in whole].count(True) == 1


def test_stdlib_is_the_same_every_time():
    one, two = make_sources(DataConfig()), make_sources(DataConfig())
    assert one.train.fingerprint == two.train.fingerprint
    assert one.heldout.fingerprint == two.heldout.fingerprint
    assert one.train.fingerprint != one.heldout.fingerprint


def test_a_python_without_library_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds no \.py file") as caught:
        make_sources(DataConfig())
    assert caught.value.path == "data.corpus"


def test_text_is_files_that_each_end_with_a_zero_byte(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\x80bytes")
    (tmp_path / "a.txt").write_text("first")
    train, heldout = make_sources(
        text_config(tmp_path, seq_len=1, holdout_fraction=0.0)
    )
    assert heldout is None
    assert bytes(tokens_of(train)) == b"first\0\xff\x80bytes\0"
    assert train.max_token == 0xFF


def test_text_holds_out_whole_files(texts):
    train, heldout = make_sources(text_config(texts, seq_len=1, holdout_fraction=0.1))
    parts = [bytes(tokens_of(part)).split(b"\0")[:-1] for part in (train, heldout)]
    assert len(parts[1]) == 4
    together = sorted(parts[0] + parts[1])
    assert together == sorted(path.read_bytes() for path in texts.iterdir())
    # Fixed by names alone: another run, another machine, the same files.
    assert [text[:2] for text in parts[1]] == [b"18", b"20", b"27", b"39"]


def test_one_file_holds_out_its_tail(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    train, heldout = make_sources(
        text_config(tmp_path, seq_len=1, holdout_fraction=0.2)
    )
    text = bytes(tokens_of(train) + tokens_of(heldout))
    assert text == b"0123456789" * 10 + b"\0"
    assert len(tokens_of(heldout)) == 20


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, ">i4"])
def test_npy_is_mapped_and_holds_out_its_tail(tmp_path, dtype):
    path = save(tmp_path, np.arange(200).astype(dtype))
    train, heldout = make_sources(
        make_config(Corpus.NPY, path=path, seq_len=1, holdout_fraction=0.1)
    )
    assert tokens_of(train) == list(range(180))
    assert tokens_of(heldout) == list(range(180, 200))
    assert train.max_token == 199
    assert isinstance(train._tokens.base, np.memmap | np.ndarray)
    assert not train._tokens.flags.owndata


def test_npy_without_holdout(tmp_path):
    path = save(tmp_path, np.arange(200, dtype=np.uint16))
    config = make_config(Corpus.NPY, path=path, holdout_fraction=0.0)
    assert make_sources(config).heldout is None


def test_a_large_npy_is_identified_by_blocks_of_it(tmp_path, monkeypatch):
    # Blocks of 16 bytes instead of 1 MiB, and 4 of them instead of 1024.
    monkeypatch.setattr(sources_module, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(sources_module, "_NUM_BLOCKS", 4)
    tokens = np.arange(1000, dtype=np.uint16)

    def fingerprint(tokens):
        config = make_config(Corpus.NPY, path=save(tmp_path, tokens))
        return make_sources(config).train.fingerprint

    def changed(index):
        other = tokens.copy()
        other[index] += 1
        return other

    assert fingerprint(tokens) == fingerprint(tokens.copy())
    assert fingerprint(changed(0)) != fingerprint(tokens)
    assert fingerprint(changed(999)) != fingerprint(tokens)
    assert fingerprint(tokens[:-1]) != fingerprint(tokens)
    monkeypatch.undo()
    assert fingerprint(changed(500)) != fingerprint(tokens)


def test_synthetic_rows_are_a_function_of_seed_and_row():
    config = make_config(Corpus.SYNTHETIC, seq_len=64)
    train, heldout = make_sources(config)
    again = make_sources(config)
    assert len(train) + len(heldout) == 2**14
    assert len(heldout) == round(2**14 * 0.05)
    for i in (0, 1, len(heldout) - 1):
        np.testing.assert_array_equal(train[i]["inputs"], again.train[i]["inputs"])
        assert not np.array_equal(train[i]["inputs"], train[i + 1]["inputs"])
        assert not np.array_equal(train[i]["inputs"], heldout[i]["inputs"])
    other = make_sources(make_config(Corpus.SYNTHETIC, seq_len=64, seed=1))
    assert not np.array_equal(train[0]["inputs"], other.train[0]["inputs"])
    assert train.fingerprint != other.train.fingerprint != heldout.fingerprint


def test_synthetic_rows_are_learnable_token_ids():
    train = make_sources(make_config(Corpus.SYNTHETIC, seq_len=64)).train
    rows = np.stack([train[i]["inputs"] for i in range(500)])
    assert rows.dtype == np.int32
    assert rows.min() == 0
    assert rows.max() == train.max_token == 63
    # The next token follows from two before it, but for the noise.
    predicted = (2 * rows[:, 1:-1] - rows[:, :-2]) % 64
    assert 0.75 < (predicted == rows[:, 2:]).mean() < 0.9


def test_synthetic_rows_never_change():
    # Fixed for good: stored losses of tests rest on them.
    row = SyntheticSource(seq_len=12, seed=0, rows=range(9))[7]
    assert row["inputs"].tolist() == [44, 47, 50, 53, 56, 59, 62, 1, 4, 7, 10, 13]


def test_synthetic_without_holdout():
    config = make_config(Corpus.SYNTHETIC, holdout_fraction=0.0)
    train, heldout = make_sources(config)
    assert len(train) == 2**14
    assert heldout is None


def change_content(folder):
    (folder / "07.txt").write_text("07" + "texT " * 20)


def rename_file(folder):
    os.rename(folder / "07.txt", folder / "07a.txt")


def add_file(folder):
    (folder / "x.txt").write_text("")


@pytest.mark.parametrize("change", [change_content, rename_file, add_file])
def test_fingerprint_sees_every_change_of_the_corpus(texts, change):
    configs = [text_config(texts, holdout_fraction=share) for share in (0.0, 0.1)]
    before = [make_sources(config) for config in configs]
    change(texts)
    after = [make_sources(config) for config in configs]
    for one, two in zip(before, after, strict=True):
        assert one.train.fingerprint != two.train.fingerprint
    assert before[1].heldout.fingerprint != after[1].heldout.fingerprint


@pytest.mark.parametrize("change", [{"seq_len": 4}, {"holdout_fraction": 0.2}])
@pytest.mark.parametrize("corpus", [Corpus.TEXT, Corpus.SYNTHETIC])
def test_fingerprint_sees_how_rows_are_cut(texts, corpus, change):
    path = str(texts / "*.txt") if corpus is Corpus.TEXT else ""
    fields = {"path": path, "holdout_fraction": 0.1}
    before = make_sources(make_config(corpus, **fields))
    after = make_sources(make_config(corpus, **(fields | change)))
    assert after.train.fingerprint != before.train.fingerprint


def test_a_corpus_may_move_as_a_whole(texts, tmp_path_factory):
    before = make_sources(text_config(texts, holdout_fraction=0.1))
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    texts.rename(moved)
    after = make_sources(text_config(moved, holdout_fraction=0.1))
    assert after.train.fingerprint == before.train.fingerprint


def refused(config, path):
    with pytest.raises(ConfigError) as caught:
        make_sources(config)
    assert caught.value.path == path
    assert "\n" not in str(caught.value)
    return caught.value.problem


@pytest.mark.parametrize("corpus", [Corpus.TEXT, Corpus.NPY])
def test_empty_path_is_refused(corpus):
    assert "is empty" in refused(make_config(corpus), "data.path")


@pytest.mark.parametrize("corpus", [Corpus.STDLIB, Corpus.SYNTHETIC])
def test_a_path_that_nothing_reads_is_refused(corpus):
    problem = refused(make_config(corpus, path="my.txt"), "data.path")
    assert f"data.corpus={corpus.value} reads no path" in problem


def test_options_that_nothing_reads_are_refused():
    config = Config().data
    config.options.vocabulary = "words"
    assert "['vocabulary']" in refused(config, "data.options")


def test_text_without_match_is_refused(tmp_path):
    assert "matches no file" in refused(text_config(tmp_path), "data.path")


def test_text_too_short_for_a_row_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    config = text_config(tmp_path, holdout_fraction=0.0)
    problem = refused(config, "data.path")
    assert "6 tokens to train on, but one row of data.seq_len=8 needs 9" in problem


def test_holdout_too_short_for_a_row_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    problem = refused(text_config(tmp_path), "data.holdout_fraction")
    assert "is 3 tokens, but one row of data.seq_len=8 needs 9; 0 holds" in problem


def write_text(path):
    path.write_text("no array\nat all\n")


def write_nothing(path):
    path.touch()


def write_torn(path):
    np.save(path, np.arange(1000))
    os.truncate(path, 400)


def write_pickle(path):
    np.save(path, np.array([{}]), allow_pickle=True)


def write_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))


def write_empty_array(path):
    np.save(path, np.zeros(0, np.uint16))


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (write_text, "as .npy: "),
        (write_nothing, "as .npy: "),
        (write_torn, "as .npy: "),
        (write_pickle, "as .npy: "),
        (write_archive, "as .npy: "),
        (write_empty_array, "tokens"),
        (lambda path: np.save(path, np.zeros((3, 4), int)), "has shape (3, 4)"),
        (lambda path: np.save(path, np.int64(3)), "has shape ()"),
        (lambda path: np.save(path, np.zeros(99)), "has dtype float64"),
        (lambda path: np.save(path, np.zeros(99, bool)), "has dtype bool"),
        (lambda path: np.save(path, np.zeros(3, int)), "3 tokens to train on, but"),
        (lambda path: np.save(path, np.arange(99) - 50), "holds -50, which is no"),
        (lambda path: np.save(path, np.full(99, 2**31)), "holds 2147483648"),
    ],
)
def test_a_bad_npy_is_refused(tmp_path, write, problem):
    path = tmp_path / "tokens.npy"
    write(path)
    assert problem in refused(make_config(Corpus.NPY, path=str(path)), "data.path")


def test_a_bad_id_between_the_surveyed_blocks_is_refused_when_read():
    tokens = np.zeros(100, np.int64)
    tokens[50] = -1
    source = TokenSource(tokens, seq_len=8, fingerprint="f")
    source[0]
    with pytest.raises(ConfigError, match="holds -1"):
        source[6]
