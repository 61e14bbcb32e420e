"""Steps to mirror, an S3 server, and a wire between that can be made bad."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
import tensorstore as ts

from jaxft import fingerprints
from jaxft.checkpoint import layout, manifest, mirror, run_record, step_files

CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


def _write_array(folder: pathlib.Path, value: np.ndarray) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {
            "data_type": str(value.dtype),
            "shape": list(value.shape),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, n // 2) for n in value.shape]},
            },
            "codecs": CODECS,
        },
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result().write(value).result()


def _link_tree(old: pathlib.Path, new: pathlib.Path) -> None:
    for folder, _, files in os.walk(old):
        below = new / os.path.relpath(folder, old)
        below.mkdir(parents=True, exist_ok=True)
        for file in files:
            os.link(os.path.join(folder, file), below / file)


class Root:
    """A root whose steps are written as ours are: files, crc32c, manifest."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def step_path(self, step: int) -> pathlib.Path:
        return self.path / str(step)

    def add(
        self,
        step: int,
        *,
        links: dict[str, int] | None = None,
        timeline: int = 0,
        healthy: bool = True,
        metrics: dict[str, float] | None = None,
        **leaves: np.ndarray,
    ) -> str:
        """Commits a step; `links` are leaf -> the step whose files it shares."""
        links = links or {}
        made = self.path / f"{step}{layout.TMP_MARK}-test"
        state = made / layout.STATE_ITEM
        (made / layout.RUN_ITEM).mkdir(parents=True)
        old = {
            name: manifest.read(self.step_path(at)).leaves[name]
            for name, at in links.items()
        }
        for name, value in leaves.items():
            _write_array(state / name, value)
        for name, at in links.items():
            _link_tree(self.step_path(at) / "state" / name, state / name)
        names = [*leaves, *links]
        notes = {
            repr((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],
                "value_metadata": {
                    "value_type": "jax.Array",
                    "skip_deserialize": False,
                },
            }
            for name in names
        }
        text = {"tree_metadata": notes, "use_zarr3": True, "use_ocdbt": False}
        (state / "_METADATA").write_text(json.dumps(text))
        (state / "nothing").touch()
        types = {name: (str(v.dtype), v.shape) for name, v in leaves.items()}
        types |= {name: (leaf.dtype, leaf.shape) for name, leaf in old.items()}
        kind = run_record.LeafKind.ARRAY
        specs = {
            n: str(run_record.LeafSpec(kind, *type_)) for n, type_ in types.items()
        }
        record = run_record.make_record(
            step, time_secs=0.0, state=specs, timeline=timeline, metrics=metrics
        )
        file = made / layout.RUN_ITEM / run_record.RECORD_FILE
        file.write_text(json.dumps(record))
        entries = {
            name: manifest.LeafEntry(
                path=name,
                name=name,
                dtype=str(value.dtype),
                shape=value.shape,
                fingerprint=fingerprints.digest_array(value).fingerprint,
                written_at=step,
            )
            for name, value in leaves.items()
        }
        manifest.write(
            made,
            manifest.Manifest(
                step=step,
                timeline=timeline,
                array_layout="files",
                codec="raw",
                healthy=healthy,
                leaves=entries | old,
                files=step_files.collect_files(made, array_layout="files"),
            ),
        )
        made.rename(self.step_path(step))
        return str(self.step_path(step))


@pytest.fixture
def root(tmp_path: pathlib.Path) -> Root:
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    return Root(path)


class Events:
    """An `Emit` that keeps what it is told."""

    def __init__(self):
        self.all: list[tuple[str, dict]] = []

    def __call__(self, kind: str, /, **fields) -> None:
        self.all.append((kind, fields))

    def of(self, kind: str) -> list[dict]:
        return [fields for name, fields in self.all if name == kind]

    def wait_for(self, kind: str, *, num: int = 1, timeout_secs: float = 30) -> dict:
        end = time.monotonic() + timeout_secs
        while len(self.of(kind)) < num:
            assert time.monotonic() < end, self.all
            time.sleep(0.01)
        return self.of(kind)[num - 1]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def sync(root, events):
    """Mirrors the root as it is now, by a mirror of its own."""

    def run(target, **options) -> None:
        copier = mirror.Mirror(str(target), emit=events, **options)
        copier.offer(os.fspath(root.path / "0"))
        assert copier.close(60)

    return run


def files_of(step: str | os.PathLike[str]) -> dict[str, bytes]:
    return {
        path.relative_to(step).as_posix(): path.read_bytes()
        for path in sorted(pathlib.Path(step).rglob("*"))
        if path.is_file() and path.name != "COMMIT"
    }


@pytest.fixture
def same_files():
    """Whether two steps hold the same files, whatever else one of them is."""
    return lambda one, other: files_of(one) == files_of(other)


# --- an S3 server and the way to it -------------------------------------------


# Not for the session: other tests look whether a process has children left.
@pytest.fixture(scope="module")
def s3_port():
    """A real server process; buckets are per test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(
        [*command, "-H", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


class S3:
    """A bucket of the server, by way of any port."""

    def __init__(self, port: int, bucket: str):
        self.port = port
        self.bucket = bucket
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{bucket}", method="PUT"
        )
        urllib.request.urlopen(request, timeout=10).close()

    def url(self, *, port: int = 0, prefix: str = "mirror") -> str:
        port = port or self.port
        query = f"endpoint=http://127.0.0.1:{port}&aws_region=us-east-1"
        return f"s3://{self.bucket}/{prefix}?{query}"

    def store(self) -> ts.KvStore:
        spec = {"driver": "s3", "bucket": self.bucket, "aws_region": "us-east-1"}
        spec["endpoint"] = f"http://127.0.0.1:{self.port}"
        return ts.KvStore.open(spec).result(10)

    def list_keys(self) -> list[str]:
        return sorted(key.decode() for key in self.store().list().result(10))


@pytest.fixture
def s3(s3_port, request, monkeypatch) -> S3:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return S3(s3_port, f"bucket-{name.strip('-').lower()}"[:60].strip("-"))


class Wire:
    """A TCP proxy: passes bytes on, late, or not at all.

    Attributes:
        latency_secs: before each piece of an answer.
        num_cuts: so many next connections are cut in the middle of the request.
        num_errors: so many next connections are answered with 503.
        is_dead: takes connections and says nothing.
        num_connections: that were made.
        num_cut: that were cut.
    """

    def __init__(self, port: int):
        self._port = port
        self.latency_secs = 0.0
        self.num_cuts = 0
        self.num_errors = 0
        self.is_dead = False
        self.num_connections = 0
        self.num_cut = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            if self.num_errors > 0:
                self.num_errors -= 1
                client.recv(4096)
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            self._open += [client, server]
            for pair in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source, sink, is_request: bool) -> None:
        try:
            while data := source.recv(4096):
                if is_request and self.num_cuts > 0:
                    self.num_cuts -= 1
                    self.num_cut += 1
                    sink.sendall(data[: len(data) // 2])
                    break
                while self.is_dead:
                    time.sleep(0.05)
                if not is_request:
                    time.sleep(self.latency_secs)
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_dead = False
        for one in (self._socket, *self._open):
            one.close()


@pytest.fixture
def wire(s3_port):
    wire = Wire(s3_port)
    yield wire
    wire.close()
