"""The mark of a mirrored step, and what of a step in the root it speaks of.

World: host-only. Floor: above `manifest`, below `mirror_folder` and `mirror_objects`.
Read `jaxft/checkpoint/manifest.py` before and `jaxft/checkpoint/mirror.py` after.

    <step>/COMMIT     one JSON object; a step without it is not on the mirror

The mark lists every file with its length and sha256, so that whoever fetches the step
needs nothing else to prove it, and `written_at`: a file that a later step shares with
an earlier one by hard link has the same there, and is not sent again. What two saves
wrote is there twice on the mirror too, equal or not.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxft.checkpoint import layout, manifest, run_record, step_files

FORMAT_NAME = "jaxft-mirror"
FORMAT_VERSION = 1

MARK_FILE = "COMMIT"
# On the mirror, a folder for each root: what was decided about it.
DECIDED = "decided"
# Nothing is held in larger pieces, whatever the size of the files.
PIECE_BYTES = 2**25

_MANIFEST = f"{layout.MANIFEST_ITEM}/{manifest.MANIFEST_FILE}"

# Path, the step that wrote it, proof, length.
_Key = tuple[str, int, str, int]


class MirrorError(Exception):
    """Why a step is not on the mirror, or does not come back from it."""


class SourceError(MirrorError):
    """It is the step in the root that is not as it was written."""


class DamageError(MirrorError):
    """It is the step on the mirror that is not as it was written."""


class CopyStoppedError(Exception):
    """The mirror was told to end while it copied."""


# --- marks --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirroredFile:
    """One file of a mirrored step.

    Attributes:
        num_bytes: its length.
        sha256: of its bytes.
        written_at: the step whose save wrote them.
        proof: what the root's manifest says of its content.
    """

    num_bytes: int
    sha256: str
    written_at: int
    proof: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """One step that is on the mirror, whole.

    Attributes:
        step: its label.
        timeline: as in its manifest.
        healthy: as in its manifest: whether it may be a resume point.
        source: identity of the root that wrote it here; nobody else deletes it.
        identity: sha256 of its manifest: equal steps, equal identities.
        files: by path relative to the step.
        metrics: as in its run record, for the keep policy.
    """

    step: int
    timeline: int
    healthy: bool
    source: str
    identity: str
    files: Mapping[str, MirroredFile]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def encode(mark: Mark) -> bytes:
    """The mark as it lies on the mirror, with its own digest at the end."""
    value = {
        "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
        "step": mark.step,
        "timeline": mark.timeline,
        "healthy": mark.healthy,
        "source": mark.source,
        "identity": mark.identity,
        "metrics": dict(mark.metrics),
        "files": {
            path: [file.num_bytes, file.sha256, file.written_at, file.proof]
            for path, file in mark.files.items()
        },
    }
    return _dump({**value, "sha256": _digest(value)})


def decode(data: bytes, *, source: str) -> Mark:
    """Reads what `encode` gave.

    Args:
        data: the bytes.
        source: where they are from, for errors.

    Raises:
        MirrorError: they are damaged, or of a newer jaxft.
    """
    try:
        value = json.loads(data)
        is_whole = value.pop("sha256") == _digest(value)
        form = value["format"]
        name, version = form["name"], form["version"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MirrorError(f"{source} is no mark of a mirror: {error!r}") from error
    if not is_whole:
        raise MirrorError(f"{source} is damaged: it does not match its own digest")
    if (name, version) != (FORMAT_NAME, FORMAT_VERSION):
        raise MirrorError(
            f"{source} is written as {name} {version}, this jaxft reads "
            f"{FORMAT_NAME} {FORMAT_VERSION}: use the jaxft that wrote it"
        )
    fields = [field.name for field in dataclasses.fields(MirroredFile)]
    files = {
        path: MirroredFile(**dict(zip(fields, entry, strict=True)))
        for path, entry in value["files"].items()
    }
    for path in files:
        if path.startswith("/") or {"", ".", ".."} & set(path.split("/")):
            raise MirrorError(f"{source} names {path!r}, which is outside of the step")
    return Mark(
        step=value["step"],
        timeline=value["timeline"],
        healthy=value["healthy"],
        source=value["source"],
        identity=value["identity"],
        files=files,
        metrics=value["metrics"],
    )


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _digest(value: Any) -> str:
    return hashlib.sha256(_dump(value)).hexdigest()


# --- steps in the root --------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a step in the root.

    Attributes:
        path: relative to the step.
        num_bytes: its length.
        sha256: what it must be; empty where the manifest does not say.
        written_at: the step whose save wrote it.
        proof: what the manifest says of its content.
    """

    path: str
    num_bytes: int
    sha256: str
    written_at: int
    proof: str

    def sent(self, sha256: str) -> MirroredFile:
        """What the mark says of it, once its bytes have been read.

        Raises:
            SourceError: they are not what the manifest says.
        """
        if self.sha256 and sha256 != self.sha256:
            raise SourceError(f"{self.path} has changed since it was written")
        return MirroredFile(
            num_bytes=self.num_bytes,
            sha256=sha256,
            written_at=self.written_at,
            proof=self.proof,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A committed step of the root, as its manifest describes it.

    Attributes:
        path: its folder.
        step: its label.
        timeline: as in its manifest.
        healthy: as in its manifest.
        identity: see `Mark`.
        files: all of them, the manifest last.
        metrics: see `Mark`.
    """

    path: str
    step: int
    timeline: int
    healthy: bool
    identity: str
    files: tuple[SourceFile, ...]
    metrics: Mapping[str, float]

    def mark(self, files: Mapping[str, MirroredFile], *, source: str) -> Mark:
        """The mark of its copy."""
        return Mark(
            step=self.step,
            timeline=self.timeline,
            healthy=self.healthy,
            source=source,
            identity=self.identity,
            files=files,
            metrics=self.metrics,
        )


def identify(step_path: str) -> str:
    """The identity of a step in the root; see `Mark`.

    Raises:
        OSError: it cannot be read.
    """
    file = _identity_file(step_path)
    stat = os.stat(file)
    return _identify(file, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2**17)  # All steps are asked in turn.
def _identify(file: str, *stat: int) -> str:
    del stat  # Another file under the same name is read anew.
    return step_files.file_sha256(file)


def _identity_file(step_path: str) -> str:
    """Its manifest; of a step that was written without one, its run record."""
    file = os.path.join(step_path, _MANIFEST)
    if os.path.lexists(file):
        return file
    return os.path.join(step_path, layout.RUN_ITEM, run_record.RECORD_FILE)


def describe(step_path: str) -> Source:
    """What a step of the root consists of.

    Raises:
        SourceError: its manifest or run record is damaged, or a file is missing.
        OSError: it cannot be read.
        FaultError: a newer jaxft wrote it (kind CONFIG).
    """
    step = int(os.path.basename(step_path))
    try:
        sizes = step_files.list_files(step_path)
        sizes.pop(MARK_FILE, None)  # The mirror's own.
        record = run_record.read_record(step_path)
        timeline, healthy, files = record["timeline"], True, {}
        if os.path.lexists(os.path.join(step_path, _MANIFEST)):
            proven = manifest.read(step_path)
            timeline, healthy = proven.timeline, proven.healthy
            files = _proven_files(proven, sizes)
            sizes[_MANIFEST] = os.stat(os.path.join(step_path, _MANIFEST)).st_size
    except (manifest.ManifestError, run_record.RecordError) as error:
        raise SourceError(str(error)) from error
    except FileNotFoundError as error:
        raise SourceError(f"{error.filename} is missing") from error
    rest = [
        SourceFile(path=path, num_bytes=size, sha256="", written_at=step, proof="")
        for path, size in sizes.items()
        if path not in files
    ]
    return Source(
        path=step_path,
        step=step,
        timeline=timeline,
        healthy=healthy,
        identity=identify(step_path),
        files=(*files.values(), *rest),
        metrics=record["metrics"],
    )


def _proven_files(
    proven: manifest.Manifest, sizes: Mapping[str, int]
) -> dict[str, SourceFile]:
    """The files that the manifest lists, with what it says of their content."""
    folders = {
        f"{layout.STATE_ITEM}/{leaf.name}": leaf for leaf in proven.leaves.values()
    }
    files = {}
    for path, entry in proven.files.items():
        if path == MARK_FILE:
            continue
        if sizes.get(path) != entry.num_bytes:
            found = sizes.get(path, "no")
            raise SourceError(
                f"{path} has {found} bytes, {entry.num_bytes} were written"
            )
        leaf = next((folders[at] for at in _parents(path) if at in folders), None)
        proof = entry.sha256 or (f"{leaf.fingerprint}-{proven.codec}" if leaf else "")
        files[path] = SourceFile(
            path=path,
            num_bytes=entry.num_bytes,
            sha256=entry.sha256,
            written_at=proven.step if leaf is None else leaf.written_at,
            proof=proof,
        )
    return files


def _parents(path: str) -> Iterator[str]:
    """The folders that a file lies in, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def shared_keys(mark: Mark) -> dict[_Key, MirroredFile]:
    """The files that other steps may share, by what they have in common then."""
    return {
        (path, file.written_at, file.proof, file.num_bytes): file
        for path, file in mark.files.items()
        if file.proof
    }


class Known:
    """What the mirror holds already of the files that a step shares.

    Args:
        marks: of steps that the same root wrote.
    """

    def __init__(self, marks: Iterable[Mark]):
        self._files = {
            key: (mark.step, file)
            for mark in marks
            for key, file in shared_keys(mark).items()
        }

    def find(self, file: SourceFile, *, step: int) -> tuple[int, MirroredFile] | None:
        """The mirrored step that holds a file of `step`, and its entry there.

        None unless an earlier save wrote the bytes: equal ones that were written
        apart stay apart.
        """
        if file.written_at == step:
            return None
        key = (file.path, file.written_at, file.proof, file.num_bytes)
        return self._files.get(key)


# --- reading, at a pace -------------------------------------------------------


class Pace:
    """Lets bytes through at a bounded rate, and not at all once stopped.

    Args:
        bytes_per_sec: the bound; 0 for none.
        stop: set by whoever wants the copy to end.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        bytes_per_sec: float,
        stop: threading.Event,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._bytes_per_sec = bytes_per_sec
        self._stop = stop
        self._clock = clock
        self._free_at = 0.0

    def spend(self, num_bytes: int) -> None:
        """Waits until so many more bytes may have gone through.

        Raises:
            CopyStoppedError: it was stopped.
        """
        wait_secs = 0.0
        if self._bytes_per_sec > 0:
            now = self._clock()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_sec
            wait_secs = self._free_at - now
        if self._stop.wait(wait_secs) if wait_secs else self._stop.is_set():
            raise CopyStoppedError


def read_pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file in pieces of bounded size; none of an empty one."""
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
