"""The global order of rows, and the batches that one process reads of it.

World: device (grain loads jax, although no array here is on a device). Floor:
`data`; the only file that imports grain. Read `jaxft/data/sources.py` before it and
`jaxft/data/iterator.py` after it.

A batch is a pure function of (source, seed, batch number). Batch b holds the samples
`b * global_batch` to `(b + 1) * global_batch - 1` of an endless sequence: epoch after
epoch, each in a new order. No row is dropped: a batch may run on over the end of an
epoch, and an epoch may be smaller than a batch. Processes differ only in which rows
of the global batch they read, so their number is no part of a position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import grain
import numpy as np

from jaxft.config import ConfigError, DataConfig
from jaxft.data.sources import Source

# Name -> (shape, dtype) of one row.
_Layout = dict[str, tuple[tuple[int, ...], np.dtype]]

# grain's shuffle works on 32-bit indices.
_MAX_SHUFFLED_ROWS = 2**32


class Pipeline:
    """Random access to the batches of one process.

    Args:
        source: the rows; threads read it at the same time.
        config: the data section: `global_batch`, `seed` and `shuffle`.
        rows: which rows of the global batch this process reads, in this order; None
            for all of them.

    Raises:
        ConfigError: the source has no rows, too many to shuffle, or is not a pure
            function from an index to a dict of arrays.
        ValueError: `rows` is empty or reaches beyond the global batch.
    """

    def __init__(
        self, source: Source, *, config: DataConfig, rows: Sequence[int] | None = None
    ):
        self._source = source
        self._layout = _check_source(source)
        self._global_batch = config.global_batch
        self._rows = _check_rows(rows, global_batch=config.global_batch)
        self._order = _make_order(len(source), config=config)
        facts = [source.fingerprint, config.seed, config.shuffle, config.global_batch]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._source)

    def read(self, batch_number: int) -> dict[str, np.ndarray]:
        """This process's rows of one batch, each leaf [len(rows), ...].

        Raises:
            ConfigError: a row differs from row 0 in names, shapes or dtypes.
        """
        first = _first_sample(batch_number, global_batch=self._global_batch)
        ids = self._ids(first + row for row in self._rows)
        return _gather(self._source, ids, layout=self._layout)

    def sample_ids(self, batch_number: int) -> np.ndarray:
        """int64 [global_batch]: the row of the source at each place of the batch."""
        first = _first_sample(batch_number, global_batch=self._global_batch)
        ids = self._ids(range(first, first + self._global_batch))
        return np.asarray(ids, np.int64)

    def probe(self) -> str:
        """Short hash of the order at fixed places, near and far.

        Equal fingerprints say that the order was asked for in the same way; equal
        probes, that this version of grain also answers in the same way.
        """
        ends = [self.num_rows * epoch - 1 for epoch in (1, 2, 3)]
        places = [*range(8), *ends, *(10**power for power in range(1, 16))]
        ids = json.dumps(self._ids(places))
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def _ids(self, places: Iterable[int]) -> list[int]:
        # grain may leave samples out in general (None), never from a range.
        return [cast(int, self._order[place]) for place in places]


def heldout_batches(
    source: Source,
    *,
    config: DataConfig,
    rows: Sequence[int] | None,
    num_batches: int,
) -> list[dict[str, np.ndarray]]:
    """The fixed batches of every evaluation, in the order of the source.

    Args:
        source: the held-out rows.
        config: the data section: `global_batch`.
        rows: as for `Pipeline`.
        num_batches: at most so many; fewer where the source is short.

    Returns:
        Batches as `Pipeline.read` gives them. Their rows are spread evenly over the
        whole source, so that few batches do not only see its first files.

    Raises:
        ConfigError: the source does not fill one batch, or is no valid source.
        ValueError: as for `Pipeline`.
    """
    layout = _check_source(source)
    rows = _check_rows(rows, global_batch=config.global_batch)
    num_batches = min(num_batches, len(source) // config.global_batch)
    if num_batches == 0:
        raise ConfigError(
            "data.holdout_fraction",
            f"{len(source)} held-out rows do not fill one batch of data.global_batch="
            f"{config.global_batch}; hold out more or set eval.every_steps=0",
        )
    total = num_batches * config.global_batch
    return [
        _gather(
            source,
            [(first + row) * len(source) // total for row in rows],
            layout=layout,
        )
        for first in range(0, total, config.global_batch)
    ]


def _make_order(num_rows: int, *, config: DataConfig) -> grain.MapDataset:
    """Sample number -> row of the source, without end."""
    order = grain.MapDataset.range(num_rows)
    if config.shuffle:
        if num_rows > _MAX_SHUFFLED_ROWS:
            raise ConfigError(
                "data.shuffle",
                f"{num_rows} rows are more than the shuffle can order "
                f"({_MAX_SHUFFLED_ROWS}); set a larger data.seq_len or shuffle=False",
            )
        # grain seeds epoch e with seed + e: with plain seeds, epoch 1 of seed 0 would
        # be epoch 0 of seed 1. The hash also takes any integer to the 32 bits it wants.
        seed = hashlib.sha256(f"order {config.seed}".encode()).digest()[:4]
        order = order.shuffle(seed=int.from_bytes(seed, "little"))
    return order.repeat()


def _first_sample(batch_number: int, *, global_batch: int) -> int:
    if batch_number < 0:
        raise ValueError(f"there is no batch {batch_number}")
    return batch_number * global_batch


def _check_rows(rows: Sequence[int] | None, *, global_batch: int) -> list[int]:
    rows = list(range(global_batch) if rows is None else rows)
    if not rows or min(rows) < 0 or max(rows) >= global_batch:
        raise ValueError(
            f"rows must be some of 0 to {global_batch - 1}, the places of the global "
            f"batch; got {rows[:8]}"
        )
    return rows


def _check_source(source: Source) -> _Layout:
    """Layout of the rows; refuses what could not be read again after a restart."""
    if len(source) == 0:
        raise ConfigError("data.factory", "the source has no rows")
    row, again = source[0], source[0]
    if not isinstance(row, Mapping) or not row:
        raise ConfigError(
            "data.factory",
            f"a row must be a dict of arrays, row 0 is {type(row).__name__}",
        )
    layout = _layout_of(row)
    for name, (_, dtype) in layout.items():
        if dtype.kind in "OSUMm":
            raise ConfigError(
                "data.factory", f"{name!r} of row 0 has dtype {dtype}, not numbers"
            )
    if _layout_of(again) != layout or any(
        np.asarray(row[name]).tobytes() != np.asarray(again[name]).tobytes()
        for name in layout
    ):
        raise ConfigError(
            "data.factory",
            "row 0 read twice gave two results; a row must depend on its index alone, "
            "or no run could be resumed",
        )
    return layout


def _layout_of(row: Mapping[str, np.ndarray]) -> _Layout:
    arrays = {name: np.asarray(value) for name, value in row.items()}
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _gather(
    source: Source, ids: Sequence[int], *, layout: _Layout
) -> dict[str, np.ndarray]:
    rows = [source[index] for index in ids]
    for index, row in zip(ids, rows, strict=True):
        if (found := _layout_of(row)) != layout:
            raise ConfigError(
                "data.factory",
                f"row {index} is {_describe(found)}, row 0 is {_describe(layout)}; "
                "all rows must have the same names, shapes and dtypes",
            )
    return {name: np.stack([row[name] for row in rows]) for name in layout}


def _describe(layout: _Layout) -> str:
    parts = (f"{name}: {dtype}{list(shape)}" for name, (shape, dtype) in layout.items())
    return "{" + ", ".join(parts) + "}"
