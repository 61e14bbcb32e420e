"""Where rows come from: the built-in corpora, as random access to numpy rows.

World: host-only (standard library and numpy). Floor: `data`, beside the other
capabilities. Read `jaxft/config.py` (`DataConfig`) and `jaxft/data/files.py` before
this file and `jaxft/data/pipeline.py`, which puts the rows in order, after it.

A corpus of tokens is cut into rows of `seq_len + 1` tokens, row i starting at token
`i * seq_len`, so that every token but the first is a target exactly once. Text is
bytes (256 ids), never decoded; every file ends with one zero byte, which text does
not contain.

Two ways to hold data out of training. Whole files, where files fit well enough into
`holdout_fraction`: no held-out text continues a text that was trained on. Otherwise
(one file, few large ones, token arrays) the tail of the corpus.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from jaxft.config import ConfigError, Corpus, DataConfig
from jaxft.data.files import find_stdlib, find_text, plan_holdout, read_files


class Source(Protocol):
    """Random access to rows; a row must be a pure function of its index.

    Threads call `__getitem__` at the same time.
    """

    @property
    def fingerprint(self) -> str:
        """Hex digits that identify the content and how rows are cut from it."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """One row, without a batch dim: same names, shapes and dtypes in all."""
        ...


class Sources(NamedTuple):
    """What a data factory returns.

    Attributes:
        train: rows to train on.
        heldout: rows to evaluate on; None for none.
    """

    train: Source
    heldout: Source | None = None


class TokenSource:
    """Rows cut from one long array of token ids.

    Args:
        tokens: [num_tokens] of an integer dtype; a memory map stays one.
        seq_len: tokens a row.
        fingerprint: hex digits; see `Source`.
        max_token: largest id that was seen in the corpus; None where nobody looked.

    A row is `{"inputs": int32[seq_len], "targets": int32[seq_len]}`, the targets one
    token ahead.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_len: int,
        fingerprint: str,
        max_token: int | None = None,
    ):
        self.fingerprint = fingerprint
        self.max_token = max_token
        self._tokens = tokens
        self._seq_len = seq_len
        self._num_rows = max(len(tokens) - 1, 0) // seq_len
        # The narrow unsigned dtypes cannot hold an id that int32 cannot.
        self._always_fits = tokens.dtype in (np.uint8, np.uint16)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """Row `index`.

        Raises:
            IndexError: there is no such row.
            ConfigError: an id is negative or beyond int32.
        """
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        start = index * self._seq_len
        ids = self._tokens[start : start + self._seq_len + 1]
        if not self._always_fits:
            _check_ids(int(ids.min()), int(ids.max()))
        row = np.asarray(ids).astype(np.int32)
        return {"inputs": row[:-1], "targets": row[1:]}


class SyntheticSource:
    """Learnable rows without storage: noisy arithmetic sequences modulo 64.

    Args:
        seq_len: tokens a row.
        seed: another seed, other rows.
        rows: which rows of the endless sequence of rows these are.

    A row starts anywhere and goes on in steps of 1 to 7; one token in 16 is replaced
    by a random one. Only integer hashing is used, so the rows are the same with every
    version of numpy. Same row format as `TokenSource`.
    """

    def __init__(self, *, seq_len: int, seed: int, rows: range):
        self.max_token = 63
        self.fingerprint = _digest(f"synthetic {seed} {seq_len} {rows}")
        self._key = np.frombuffer(
            hashlib.sha256(str(seed).encode()).digest()[:8], "<u8"
        )
        self._seq_len = seq_len
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """Row `index`.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self._rows):
            raise IndexError(f"row {index} of {len(self._rows)}")
        key = _mix(self._key + np.array([self._rows[index]], np.uint64))
        draws = _mix(key + np.arange(self._seq_len + 3, dtype=np.uint64))
        start, stride, noise = draws[0] % 64, 1 + draws[1] % 7, draws[2:]
        ids = (start + stride * np.arange(self._seq_len + 1, dtype=np.uint64)) % 64
        ids = np.where(noise % 16 == 0, (noise >> 32) % 64, ids).astype(np.int32)
        return {"inputs": ids[:-1], "targets": ids[1:]}


def make_sources(config: DataConfig) -> Sources:
    """The rows of the built-in corpus that `config.corpus` names.

    Args:
        config: the data section.

    Raises:
        ConfigError: the corpus cannot be found, read or cut as the config asks.
    """
    if len(config.options):
        raise ConfigError(
            "data.options",
            f"the built-in corpora take no options, got {sorted(config.options)}; "
            "they are for a data.factory of your own",
        )
    reads_path = config.corpus in (Corpus.TEXT, Corpus.NPY)
    if config.path and not reads_path:
        raise ConfigError(
            "data.path",
            f"is {config.path!r}, but data.corpus={config.corpus.value} reads no path; "
            "set data.corpus to text or npy, or leave the path empty",
        )
    if reads_path and not config.path:
        raise ConfigError(
            "data.path",
            "is empty; text needs a glob such as '~/texts/**/*.txt', npy one .npy file",
        )
    return _CORPORA[config.corpus](config)


def _stdlib(config: DataConfig) -> Sources:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = find_stdlib(root)
    if not files:
        raise ConfigError(
            "data.corpus",
            f"{str(root)!r} holds no .py file: this Python keeps its library "
            "elsewhere; set data.corpus=text and data.path",
        )
    return _cut_files(files, config=config, setting="data.corpus")


def _text(config: DataConfig) -> Sources:
    files = find_text(config.path)
    return _cut_files(files, config=config, setting="data.path")


def _cut_files(
    files: Mapping[str, pathlib.Path], *, config: DataConfig, setting: str
) -> Sources:
    texts = {
        name: text + b"\0" for name, text in read_files(files, setting=setting).items()
    }
    digest = hashlib.sha256(config.corpus.value.encode())
    for name, text in texts.items():
        digest.update(f"{name!r} {len(text)}\n".encode())
        digest.update(text)
    held = plan_holdout(
        {name: len(text) for name, text in texts.items()},
        fraction=config.holdout_fraction,
    )
    if held:
        train = _join(texts[name] for name in texts if name not in held)
        heldout = _join(texts[name] for name in texts if name in held)
    else:
        train, heldout = _split_tail(
            _join(texts.values()), fraction=config.holdout_fraction
        )
    return _cut(
        train,
        heldout,
        config=config,
        setting=setting,
        digest=digest.hexdigest(),
        max_token=max(int(part.max(initial=0)) for part in (train, heldout)),
    )


def _npy(config: DataConfig) -> Sources:
    file = os.path.expanduser(config.path)
    try:
        tokens = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "data.path", f"cannot read {config.path!r} as .npy: {_one_line(error)}"
        ) from error
    if tokens.ndim != 1:
        raise ConfigError(
            "data.path",
            f"{config.path!r} has shape {tokens.shape}; token ids must be 1-D",
        )
    if tokens.dtype.kind not in "iu":
        raise ConfigError(
            "data.path",
            f"{config.path!r} has dtype {tokens.dtype}; token ids must be integers",
        )
    tokens = tokens.view(np.ndarray)  # still mapped, but cheaper to slice
    digest, low, high = _survey(tokens)
    _check_ids(low, high)
    train, heldout = _split_tail(tokens, fraction=config.holdout_fraction)
    return _cut(
        train,
        heldout,
        config=config,
        setting="data.path",
        digest=digest,
        max_token=high,
    )


_BLOCK_BYTES = 2**20
_NUM_BLOCKS = 1024


def _survey(tokens: np.ndarray) -> tuple[str, int, int]:
    """Digest, smallest and largest id of a token array that may exceed memory.

    Up to 1 GiB all of it is read. Of a larger one, 1024 blocks of 1 MiB in equal
    distances, the first and last among them: a start stays a matter of seconds.
    """
    digest = hashlib.sha256(f"npy {tokens.dtype.str} {len(tokens)}".encode())
    low, high = 0, 0
    block = max(1, _BLOCK_BYTES // tokens.dtype.itemsize)
    num_blocks = -(-len(tokens) // block)
    if num_blocks <= _NUM_BLOCKS:
        starts = [i * block for i in range(num_blocks)]
    else:
        last = len(tokens) - block
        starts = [i * last // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)]
    for start in starts:
        ids = np.ascontiguousarray(tokens[start : start + block])
        digest.update(ids.tobytes())
        low, high = min(low, int(ids.min())), max(high, int(ids.max()))
    return digest.hexdigest(), low, high


_SYNTHETIC_ROWS = 2**14


def _synthetic(config: DataConfig) -> Sources:
    cut = _SYNTHETIC_ROWS - round(_SYNTHETIC_ROWS * config.holdout_fraction)
    train, heldout = (
        SyntheticSource(seq_len=config.seq_len, seed=config.seed, rows=rows)
        for rows in (range(cut), range(cut, _SYNTHETIC_ROWS))
    )
    return Sources(train, heldout if len(heldout) else None)


def _split_tail(
    tokens: np.ndarray, *, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    cut = len(tokens) - round(len(tokens) * fraction)
    return tokens[:cut], tokens[cut:]


def _cut(
    train: np.ndarray,
    heldout: np.ndarray,
    *,
    config: DataConfig,
    setting: str,
    digest: str,
    max_token: int,
) -> Sources:
    """Rows of both parts; refuses a part that has not one."""
    parts = [
        TokenSource(
            tokens,
            seq_len=config.seq_len,
            fingerprint=_digest(
                f"{digest} {part} {config.seq_len} {config.holdout_fraction}"
            ),
            max_token=max_token,
        )
        for part, tokens in (("train", train), ("heldout", heldout))
    ]
    needed = f"one row of data.seq_len={config.seq_len} needs {config.seq_len + 1}"
    if not len(parts[0]):
        raise ConfigError(setting, f"{len(train)} tokens to train on, but {needed}")
    if config.holdout_fraction == 0:
        return Sources(parts[0], None)
    if not len(parts[1]):
        raise ConfigError(
            "data.holdout_fraction",
            f"{config.holdout_fraction} of this corpus is {len(heldout)} tokens, but "
            f"{needed}; 0 holds nothing out",
        )
    return Sources(*parts)


def _check_ids(low: int, high: int) -> None:
    if low < 0 or high > np.iinfo(np.int32).max:
        bad = low if low < 0 else high
        raise ConfigError("data.path", f"holds {bad}, which is no int32 token id")


def _join(texts: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _one_line(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return " ".join((strerror or str(error)).split())


def _mix(words: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 over uint64 arrays (they wrap in silence)."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> 27)) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> 31)


_CORPORA: dict[Corpus, Callable[[DataConfig], Sources]] = {
    Corpus.STDLIB: _stdlib,
    Corpus.TEXT: _text,
    Corpus.NPY: _npy,
    Corpus.SYNTHETIC: _synthetic,
}
