"""The manifest: what a step must hold, byte for byte, written last.

World: host-only. Floor: above `run_record`, below `array_store`. Read
`jaxft/checkpoint/run_record.py` before and `jaxft/checkpoint/verify.py` after.

    <step>/manifest/metadata      one JSON object that ends in its own sha256

Chunks of the layout `files` end in crc32c, and their leaf has a fingerprint; so do the
values in the large files of a database. Every other file of the step is here with its
length and sha256. So no bit that is read of a step can change unseen: not in the
arrays, not in what describes them, not in the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxft import fingerprints, records
from jaxft.checkpoint import layout, step_files

FORMAT_NAME = "jaxft-manifest"
FORMAT_VERSION = 1

MANIFEST_FILE = "metadata"

_DIGEST = b',"sha256":"'


class ManifestError(ValueError):
    """A manifest that is damaged, or none at all: the step cannot be proven."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafEntry:
    """One leaf of the state.

    Attributes:
        path: where it is in the tree, `params/dense/kernel`.
        name: what it is stored as, `params.dense.kernel`.
        dtype: as in the run record; int64, float64 or bool for Python numbers.
        shape: global shape.
        fingerprint: of its value in that dtype.
        written_at: the step whose save wrote its bytes.
        num_links: commits since then; 0 when this step wrote them.
        num_chunks: pieces on disk.
        num_bytes: their size on disk.
        num_nonfinite: elements that are no finite numbers.
    """

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: fingerprints.Fingerprint
    written_at: int
    num_links: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    num_nonfinite: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a step is made of.

    Attributes:
        step: its label.
        timeline: how many rollbacks the run had seen.
        array_layout: `files` or `ocdbt`.
        codec: `raw`, `lz4` or `zstd`.
        healthy: whether it may be a resume point.
        unhealthy: paths of the leaves that are the reason why not.
        leaves: by path.
        files: by path.
    """

    step: int
    timeline: int
    array_layout: str
    codec: str
    healthy: bool
    unhealthy: tuple[str, ...] = ()
    leaves: Mapping[str, LeafEntry]
    files: Mapping[str, step_files.FileEntry]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something in a step that is not as it was written.

    Attributes:
        path: the file, relative to the step; the leaf's path where no single file
            is to blame.
        reason: what is wrong, naming the chunk where it is one.
        leaf: path of the leaf that it belongs to; empty for other files.
    """

    path: str
    reason: str
    leaf: str = ""

    def __str__(self) -> str:
        of = f" of leaf {self.leaf}" if self.leaf not in ("", self.path) else ""
        return f"{self.path}{of}: {self.reason}"


# --- writing ------------------------------------------------------------------


def write(step_path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Writes the manifest into a step's folder; the commit makes it durable.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    folder = pathlib.Path(step_path, layout.MANIFEST_ITEM)
    folder.mkdir(exist_ok=True)
    with open(folder / MANIFEST_FILE, "xb") as file:
        file.write(encode(manifest))


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies on disk."""
    value = {
        "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
        "step": manifest.step,
        "timeline": manifest.timeline,
        "array_layout": manifest.array_layout,
        "codec": manifest.codec,
        "healthy": manifest.healthy,
        "unhealthy": list(manifest.unhealthy),
        "leaves": {
            path: {
                "name": leaf.name,
                "dtype": leaf.dtype,
                "shape": list(leaf.shape),
                "fingerprint": str(leaf.fingerprint),
                "written_at": leaf.written_at,
                "num_links": leaf.num_links,
                "num_chunks": leaf.num_chunks,
                "num_bytes": leaf.num_bytes,
                "num_nonfinite": leaf.num_nonfinite,
            }
            for path, leaf in manifest.leaves.items()
        },
        "files": {
            path: [file.num_bytes, file.sha256] for path, file in manifest.files.items()
        },
        "crc32c": {
            path: file.crc32c for path, file in manifest.files.items() if file.crc32c
        },
    }
    body = json.dumps(value, separators=(",", ":")).encode()[:-1]
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    """The end of a manifest: the digest of what stands before it."""
    return _DIGEST + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


# --- reading ------------------------------------------------------------------


def read(step_path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a step.

    Raises:
        OSError: it cannot be read; FileNotFoundError when there is none.
        ManifestError: it is damaged.
        FaultError: a newer jaxft wrote it (kind CONFIG).
    """
    file = pathlib.Path(step_path, layout.MANIFEST_ITEM, MANIFEST_FILE)
    return decode(file.read_bytes(), source=os.fspath(file))


def decode(data: bytes, *, source: str) -> Manifest:
    """Reads what `encode` gave.

    Args:
        data: the bytes.
        source: where they are from, for errors.

    Raises:
        ManifestError: they are damaged.
        FaultError: a newer jaxft wrote them (kind CONFIG).
    """
    # In every version the digest is found like this: a flipped bit in the version
    # is damage and no newer version.
    body, _, _ = data.rpartition(_DIGEST)
    if not body or data != body + _seal(body):
        raise ManifestError(f"{source} is damaged: it does not match its own digest")
    try:
        value = json.loads(body + b"}")
        form = value["format"]
        name, version = form["name"], form["version"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ManifestError(f"{source} is no manifest: {error!r}") from error
    if name != FORMAT_NAME or version != FORMAT_VERSION:
        text = (
            f"{source} is written as {name} {version}, this jaxft reads "
            f"{FORMAT_NAME} {FORMAT_VERSION}: use the jaxft that wrote it"
        )
        raise records.fault_error(records.FaultKind.CONFIG, text)
    try:
        return _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"{source} cannot be understood: {error!r}") from error


def _parse(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=_count(value["step"]),
        timeline=_count(value["timeline"]),
        array_layout=_text(value["array_layout"]),
        codec=_text(value["codec"]),
        healthy=bool(value["healthy"]),
        unhealthy=tuple(map(_text, value["unhealthy"])),
        leaves={
            path: _parse_leaf(path, leaf) for path, leaf in value["leaves"].items()
        },
        files={
            _inside(path): step_files.FileEntry(
                path=path,
                num_bytes=_count(size),
                sha256=_text(digest),
                crc32c=_text(value.get("crc32c", {}).get(path, "")),
            )
            for path, (size, digest) in value["files"].items()
        },
    )


def _parse_leaf(path: str, leaf: Mapping[str, Any]) -> LeafEntry:
    counts = ("written_at", "num_links", "num_chunks", "num_bytes", "num_nonfinite")
    return LeafEntry(
        path=path,
        name=_text(leaf["name"]),
        dtype=_text(leaf["dtype"]),
        shape=tuple(map(_count, leaf["shape"])),
        fingerprint=fingerprints.Fingerprint.parse(leaf["fingerprint"]),
        **{name: _count(leaf[name]) for name in counts},
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value


def _inside(path: str) -> str:
    """The path, which must not lead out of the step: files are copied by it."""
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is no path inside a step")
    return path


# --- checking -----------------------------------------------------------------


def check_files(
    step_path: str | os.PathLike[str], manifest: Manifest, *, full: bool
) -> list[Problem]:
    """Files of a step that are not what its manifest says.

    Args:
        step_path: the step's folder.
        manifest: its manifest.
        full: also reads what has a sha256; otherwise looks at lengths alone. Chunks
            that prove themselves are read by whoever reads their leaf.

    Raises:
        OSError: a file that is there cannot be read.
    """
    owners = {
        f"{layout.STATE_ITEM}/{leaf.name}": leaf.path
        for leaf in manifest.leaves.values()
    }
    problems: dict[str, str] = {}
    for path, entry in manifest.files.items():
        if reason := _check_length(os.path.join(step_path, path), entry):
            problems[path] = reason
    if full:
        whole = [
            path
            for path, entry in manifest.files.items()
            if entry.sha256 and path not in problems
        ]
        for path, digest in step_files.digest_files(step_path, whole).items():
            if digest != manifest.files[path].sha256:
                problems[path] = "its bytes have changed (sha256 differs)"
    return [
        Problem(path, problems[path], _owner(path, owners))
        for path in manifest.files
        if path in problems
    ]


def _check_length(path: str, entry: step_files.FileEntry) -> str:
    try:
        size = os.stat(path).st_size
        if not os.path.isfile(path):
            return "is no file"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if size != entry.num_bytes:
        return f"has {size} bytes, {entry.num_bytes} were written"
    return ""


def _owner(path: str, owners: Mapping[str, str]) -> str:
    """Path of the leaf in whose folder a file lies."""
    parts = path.split("/")
    for end in range(len(parts) - 1, 1, -1):
        if leaf := owners.get("/".join(parts[:end])):
            return leaf
    return ""
