"""What every test stands on: 8 fake CPU devices, strict ranks, `--full`."""

import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

# Before jax is imported: a test run never takes an accelerator unless asked to.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Orbax asks for an event loop per thread; grain and absl write to stderr.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import pytest

_PROGRAMS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """What one test has compiled serves the others, in all processes of a session."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # The user's; or, in a worker of xdist, its parent's.
    config.stash[_PROGRAMS] = tempfile.mkdtemp(prefix="jaxft-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[_PROGRAMS]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_PROGRAMS, ""):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="everything at full size")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether `--full` was given: tests with a size choose the large one."""
    return request.config.getoption("--full")


@pytest.fixture
def run_processes() -> Callable[..., list[tuple[str, str]]]:
    """Runs a program as JAX processes, two by default; (stdout, stderr) of each.

    The program gets `arguments`, then the coordinator's address and its own index.
    """

    def run(
        program: str, *arguments: str, num_processes: int = 2, num_devices: int = 1
    ) -> list[tuple[str, str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, "-c", program, *map(str, arguments), address]
        processes = [
            subprocess.Popen(
                [*command, str(index)],
                env=os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(num_processes)
        ]
        try:
            ends = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        assert not any(codes), [err[-2000:] for _, err in ends]
        return ends

    return run


@pytest.fixture
def read_curves() -> Callable[[pathlib.Path], dict[str, list[tuple[int, float]]]]:
    """Reads a folder, or one file, of curves: tag -> steps and values.

    By TensorBoard's rules for what is taken back; each record by its checksums.
    """
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    def records(data: bytes) -> Iterator[event_pb2.Event]:
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
            body, end = data[12 : 12 + length], data[12 + length : 16 + length]
            assert struct.unpack("<I", end) == (masked_crc32c(body),)
            yield event_pb2.Event.FromString(body)
            data = data[16 + length :]

    def read(path: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            first, *rest = records(file.read_bytes())
            assert first.file_version == "brain.Event:2"
            for event in rest:
                if event.session_log.status == event_pb2.SessionLog.START:
                    for points in found.values():
                        points[:] = [p for p in points if p[0] < event.step]
                for value in event.summary.value:
                    points = found.setdefault(value.tag, [])
                    points.append((event.step, value.simple_value))
        return found

    return read


@pytest.fixture
def mount_disk() -> Iterator[Callable[[pathlib.Path, str], pathlib.Path]]:
    """Makes a folder that is a disk of its own, of a size such as `4m`."""
    mounted = []

    def mount(folder: pathlib.Path, size: str) -> pathlib.Path:
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --full")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
