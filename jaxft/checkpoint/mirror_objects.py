"""A mirror in an object store: `s3://bucket/prefix`, `gs://bucket/prefix`.

World: host-only. Floor: above `array_store` and `mirror_mark`, below `mirror`. Read
`jaxft/checkpoint/mirror_mark.py` before and `jaxft/checkpoint/mirror.py` after.

    <step>/COMMIT                                the mark; one write makes the step
    decided/<source>/<n>.json                    see `jaxft/checkpoint/decisions.py`
    blobs/<source>/<sha256>.<written_at>[.<n>]   the files, and their n-th pieces

Object stores have no links and no rename. So files are stored under what they hold
and when they were written, and steps that share a file name the same object. Nothing
is overwritten but marks, so a kill at any time leaves whole steps, and objects that
no mark names, which the next copy uses or the next start deletes. Each root has a
folder of its own for them, so that no start deletes what another root is copying.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxft import records
from jaxft.checkpoint import array_store, mirror_mark

_BLOBS = "blobs/"
_MARK = re.compile(rf"(0|[1-9]\d*)/{mirror_mark.MARK_FILE}")
# Of addresses -> TensorStore's name of the driver.
DRIVERS = {"s3": "s3", "gs": "gcs"}
_MAX_IN_FLIGHT = 32
# A store that refuses says so within seconds; one that is silent has the deadline.
_RETRIES = {"max_retries": 4, "initial_delay": "200ms", "max_delay": "2s"}


class ObjectStore:
    """Whole objects by key, every answer within a deadline.

    Args:
        url: the place, of one of `DRIVERS`. `?endpoint=...&aws_region=...` after it
            go to TensorStore's driver, for stores that are not where their provider's
            are.
        timeout_secs: the deadline of each request.

    Raises:
        MirrorError: TensorStore cannot open it.
    """

    def __init__(self, url: str, *, timeout_secs: float):
        self.where, _, query = url.partition("?")
        self._timeout_secs = timeout_secs
        scheme = self.where.partition("://")[0]
        fields: dict[str, Any] = {}
        if scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:
            # Else the search for others writes about files that are not there.
            fields["aws_credentials"] = {"type": "environment"}
        try:
            self._store: Any = array_store.open_kvstore(
                self.where,
                context={f"{DRIVERS[scheme]}_request_retries": _RETRIES},
                **fields,
                **dict(urllib.parse.parse_qsl(query, strict_parsing=bool(query))),
            )
        except Exception as error:
            text = records.first_line(error)
            raise mirror_mark.MirrorError(f"{url} cannot be opened: {text}") from error

    def keys(self, start: str, end: str) -> list[str]:
        """The keys from `start` up to, but without, `end`.

        Raises:
            MirrorError: the store fails or does not answer, here and below.
        """
        between = self._store.KeyRange(start, end)
        (found,) = self._wait([self._store.list(between)])
        return [key.decode() for key in found]

    def get(self, keys: Iterable[str]) -> list[bytes | None]:
        """What is stored under each key; None for nothing."""
        results = self._wait([self._store.read(key) for key in keys])
        return [r.value if r.state == "value" else None for r in results]

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Stores each value and reads it back.

        Raises:
            MirrorError: also when what comes back is something else.
        """
        self._wait([self._store.write(key, value) for key, value in objects])
        found = self.get(key for key, _ in objects)
        for (key, value), again in zip(objects, found, strict=True):
            if again != value:
                raise mirror_mark.MirrorError(
                    f"{self.where}: {key} does not read back as it was written"
                )

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes each; what is not there is fine."""
        for start in range(0, len(keys), _MAX_IN_FLIGHT):
            part = keys[start : start + _MAX_IN_FLIGHT]
            self._wait([self._store.write(key, None) for key in part])

    def _wait(self, futures: Sequence[Any]) -> list[Any]:
        end = time.monotonic() + self._timeout_secs
        try:
            return [
                future.result(timeout=max(0.001, end - time.monotonic()))
                for future in futures
            ]
        except TimeoutError as error:
            raise mirror_mark.MirrorError(
                f"{self.where} did not answer within {self._timeout_secs:g} s"
            ) from error
        except Exception as error:
            text = records.first_line(error)
            raise mirror_mark.MirrorError(f"{self.where}: {text}") from error
        finally:
            for future in futures:
                future.cancel()  # of those that were not waited for


class ObjectTarget:
    """Steps in an object store.

    Args:
        url: see `ObjectStore`.
        timeout_secs: the deadline of each request.
    """

    def __init__(self, url: str, *, timeout_secs: float):
        self._store = ObjectStore(url, timeout_secs=timeout_secs)
        self.where = self._store.where
        self._marks: dict[int, mirror_mark.Mark | None] = {}

    def marks(self) -> dict[int, mirror_mark.Mark | None]:
        """Step -> its mark; None where a step is there and nobody can tell whose.

        Raises:
            MirrorError: the store fails or does not answer, here and below.
        """
        matches = map(_MARK.fullmatch, self._store.keys("0", ":"))
        steps = sorted(int(match[1]) for match in matches if match)
        # A mark lists thousands of files: each is read once.
        unread = [step for step in steps if self._marks.get(step) is None]
        for step, data in zip(unread, self._store.get(map(_key, unread)), strict=True):
            try:
                source = f"{self.where}/{_key(step)}"
                mark = mirror_mark.decode(data or b"", source=source)
                self._marks[step] = mark if mark.step == step else None
            except mirror_mark.MirrorError:
                self._marks[step] = None
        self._marks = {step: self._marks[step] for step in steps}
        return dict(self._marks)

    def decisions(self, owner: str) -> dict[str, bytes]:
        """What was decided about a root: file name -> content."""
        folder = f"{mirror_mark.DECIDED}/{owner}/"
        keys = self._store.keys(folder, f"{folder}~")
        return {
            key.removeprefix(folder): value
            for key, value in zip(keys, self._store.get(keys), strict=True)
            if value is not None
        }

    def add_decision(self, name: str, text: bytes, *, owner: str) -> None:
        """Keeps a decision.

        Args:
            name: of its file.
            text: what that holds.
            owner: identity of the root that it is about.
        """
        self._store.put([(f"{mirror_mark.DECIDED}/{owner}/{name}", text)])

    def add(
        self,
        source: mirror_mark.Source,
        *,
        owner: str,
        known: mirror_mark.Known,
        pace: mirror_mark.Pace,
    ) -> tuple[mirror_mark.Mark, int]:
        """Copies a step; it is there when this returns, and only then.

        Args:
            source: the step.
            owner: identity of its root.
            known: what need not be sent again.
            pace: of the copy.

        Returns:
            Its mark, and the bytes that were sent.

        Raises:
            SourceError: the step is not as it was written.
            OSError: it cannot be read.
            CopyStoppedError: by the pace.
        """
        sender = _Sender(self._store, folder=_folder(owner), pace=pace)
        files = {}
        for file in source.files:
            if held := known.find(file, step=source.step):
                pace.spend(0)
                files[file.path] = held[1]
            else:
                files[file.path] = sender.send(file, step_path=source.path)
        sender.flush()
        mark = source.mark(files, source=owner)
        self._store.put([(_key(source.step), mirror_mark.encode(mark))])
        replaced, self._marks[source.step] = self._marks.get(source.step), mark
        if replaced is not None:
            self._delete_blobs(_blob_keys(replaced), marks=self._marks)
        return mark, sender.num_sent_bytes

    def remove(
        self, step: int, *, marks: Mapping[int, mirror_mark.Mark | None]
    ) -> None:
        """Deletes a step: its mark first, then what no other step names.

        Args:
            step: its label.
            marks: of all steps that are there.
        """
        mark = marks[step]
        self._store.delete([_key(step)])
        self._marks.pop(step, None)
        rest = {other: marks[other] for other in marks if other != step}
        if mark is not None:
            self._delete_blobs(_blob_keys(mark), marks=rest)

    def sweep(
        self, owner: str, *, marks: Mapping[int, mirror_mark.Mark | None]
    ) -> None:
        """Deletes the objects that no mark names: interrupted copies left them.

        Args:
            owner: identity of the root whose copies they were.
            marks: of all steps that are there.
        """
        folder = _folder(owner)
        self._delete_blobs(self._store.keys(folder, f"{folder}~"), marks=marks)

    def _delete_blobs(
        self, keys: Iterable[str], *, marks: Mapping[int, mirror_mark.Mark | None]
    ) -> None:
        if None in marks.values():
            return  # What a mark that cannot be read names is not known.
        named = {key for mark in marks.values() if mark for key in _blob_keys(mark)}
        self._store.delete(sorted(set(keys) - named))

    def read(self, mark: mirror_mark.Mark) -> Iterator[tuple[str, bytes]]:
        """(path, piece) of all files of a step, each file's pieces in order.

        Raises:
            DamageError: an object is missing.
            MirrorError: the store fails or does not answer.
        """
        batch: list[tuple[str, str]] = []
        num_bytes = 0
        for path, file in mark.files.items():
            for key, size in _pieces(file, folder=_folder(mark.source)):
                if num_bytes + size > mirror_mark.PIECE_BYTES or (
                    len(batch) == _MAX_IN_FLIGHT
                ):
                    yield from self._read_batch(batch)
                    batch, num_bytes = [], 0
                batch.append((path, key))
                num_bytes += size
        yield from self._read_batch(batch)

    def _read_batch(self, batch: Sequence[tuple[str, str]]) -> list[tuple[str, bytes]]:
        values = self._store.get(key for _, key in batch)
        found = []
        for (path, key), value in zip(batch, values, strict=True):
            if value is None:
                raise mirror_mark.DamageError(f"{path} is missing: {key}")
            found.append((path, value))
        return found


class _Sender:
    """Sends files in batches of bounded size.

    Args:
        store: where to.
        folder: where the root's files are in it.
        pace: of the copy.
    """

    def __init__(self, store: ObjectStore, *, folder: str, pace: mirror_mark.Pace):
        self._store = store
        self._folder = folder
        self._pace = pace
        self._batch: list[tuple[str, bytes]] = []
        self._num_batch_bytes = 0
        self._sent: set[str] = set()
        self.num_sent_bytes = 0
        # Of an interrupted copy of the same step.
        self._there = set(store.keys(folder, f"{folder}~"))

    def send(
        self, file: mirror_mark.SourceFile, *, step_path: str
    ) -> mirror_mark.MirroredFile:
        """Sends one file, at the latest with the next `flush`."""
        path = os.path.join(step_path, file.path)
        digest = hashlib.sha256()
        pieces = [] if file.num_bytes else [b""]
        num_bytes = 0
        for piece in mirror_mark.read_pieces(path):
            self._pace.spend(0)
            digest.update(piece)
            num_bytes += len(piece)
            # A file of many pieces is read twice: its name is what all of it holds.
            pieces = [piece] if file.num_bytes <= mirror_mark.PIECE_BYTES else []
        sent = file.sent(digest.hexdigest())
        again = hashlib.sha256()
        names = _pieces(sent, folder=self._folder)
        source = pieces or mirror_mark.read_pieces(path)
        for piece, (key, _) in zip(source, names, strict=False):
            again.update(piece)
            self._add(key, piece)
        if num_bytes != file.num_bytes or again.digest() != digest.digest():
            raise mirror_mark.SourceError(f"{file.path} changes while it is read")
        return sent

    def _add(self, key: str, piece: bytes) -> None:
        if key in self._sent:
            return
        if self._num_batch_bytes + len(piece) > mirror_mark.PIECE_BYTES or (
            len(self._batch) == _MAX_IN_FLIGHT
        ):
            self.flush()
        self._sent.add(key)
        self._batch.append((key, piece))
        self._num_batch_bytes += len(piece)

    def flush(self) -> None:
        """Sends what has been collected, but for what lies there already."""
        known = [(key, piece) for key, piece in self._batch if key in self._there]
        found = self._store.get(key for key, _ in known)
        good = {
            key
            for (key, piece), value in zip(known, found, strict=True)
            if value == piece
        }
        new = [(key, piece) for key, piece in self._batch if key not in good]
        num_bytes = sum(len(piece) for _, piece in new)
        self._pace.spend(num_bytes)
        self._store.put(new)
        self.num_sent_bytes += num_bytes
        self._batch, self._num_batch_bytes = [], 0


def _key(step: int) -> str:
    return f"{step}/{mirror_mark.MARK_FILE}"


def _folder(owner: str) -> str:
    """Where the files of a root are."""
    return f"{_BLOBS}{owner}/"


def _pieces(
    file: mirror_mark.MirroredFile, *, folder: str
) -> Iterator[tuple[str, int]]:
    """(key, length) of the objects that hold a file."""
    name = f"{folder}{file.sha256}.{file.written_at}"
    if file.num_bytes <= mirror_mark.PIECE_BYTES:
        yield name, file.num_bytes
        return
    for number, start in enumerate(range(0, file.num_bytes, mirror_mark.PIECE_BYTES)):
        size = min(mirror_mark.PIECE_BYTES, file.num_bytes - start)
        yield f"{name}.{number}", size


def _blob_keys(mark: mirror_mark.Mark) -> set[str]:
    folder = _folder(mark.source)
    files = mark.files.values()
    return {key for file in files for key, _ in _pieces(file, folder=folder)}
