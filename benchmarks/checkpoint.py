"""What a checkpoint costs beside stock Orbax and a bare write, as ratios of pairs.

Command:   python benchmarks/checkpoint.py [--gigabytes=1] [--num_pairs=7]
           python benchmarks/checkpoint.py --leaves=5000 --leaf_kb=8 --layout=ocdbt
Hardware:  any; one device, a disk with room for three copies of the state
Time:      five minutes on two quiet CPU cores
Expected:  at 1 GB: total save at most 0.8 of Orbax's, or 1.15 of the bare write's;
           restore with full verification at most 0.9, blocking at most 1.1, peak
           memory no higher; with 5,000 leaves of 8 kB all at most 1.1

jaxft's save takes fingerprints on the device, writes and syncs the arrays, the run
record and the manifest, and renames; its restore checks the manifest and every file,
the crc32c of every chunk, and the fingerprint of every leaf on the device. Orbax is an
`AsyncCheckpointer` with default options. The bare write puts the same bytes into one
file and syncs it. The contestants alternate in one process in random order; the values
are random float32, so that nothing compresses; memory is touched and the disk is
synced before the clock starts. Orbax against itself is the A/A comparison.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pairs
from absl import app, flags, logging
from host_memory import read_memory, reset_peak

from jaxft import durable
from jaxft.checkpoint import leaves, manifest, orbax_io, run_record, step_files
from jaxft.checkpoint.state_digests import Digests
from jaxft.parallel import fingerprint

_GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "size of the state")
_LEAVES = flags.DEFINE_integer("leaves", 0, "leaves of one size; 0: a transformer's")
_LEAF_KB = flags.DEFINE_integer("leaf_kb", 8, "size of each of --leaves")
_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 7, "rounds that count")
_LAYOUT = flags.DEFINE_enum("layout", "files", ["files", "ocdbt"], "of jaxft's arrays")
_CODEC = flags.DEFINE_enum("codec", "raw", ["raw", "lz4", "zstd"], "of jaxft's chunks")
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-bench", "on the disk to measure")

State = dict[str, Any]
# What was measured of one save and one restore.
Figures = dict[str, float]


def make_state(seed: int = 0) -> State:
    """Random float32 leaves that nothing compresses, in memory that was touched."""
    if _LEAVES.value:
        sizes = [(_LEAF_KB.value * 250,)] * _LEAVES.value
    else:
        # Large matrices and, for each, two vectors, as in a transformer.
        num_large = max(1, round(_GIGABYTES.value * 1e9 / 40e6))
        sizes = [(2500, 4000), (4000,), (2500,)] * num_large
    rng = np.random.default_rng(seed)
    values = [_random(rng, shape) for shape in sizes]
    state = {f"leaf_{i:05d}": jax.device_put(value) for i, value in enumerate(values)}
    return jax.block_until_ready(jax.tree.map(lambda x: x * 1, state))


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Finite numbers all of whose other bits are random."""
    bits = rng.integers(2**32, size=shape, dtype=np.uint32) & np.uint32(0xBFFFFFFF)
    return bits.view(np.float32)


# --- contestants --------------------------------------------------------------


class Jaxft:
    """One step in jaxft's way."""

    def __init__(self):
        self._options = orbax_io.ArrayOptions(layout=_LAYOUT.value, codec=_CODEC.value)

    def save(self, path: str, state: State) -> float:
        """Saves, waits and returns the time until the call came back."""
        begin = time.perf_counter()
        stored, types = leaves.encode(state)
        record = run_record.make_record(1, time_secs=time.time(), state=types)
        digests = Digests(state)

        def seal(folder: pathlib.Path) -> None:
            files = step_files.collect_files(folder, array_layout=_LAYOUT.value)
            entries = {
                name: manifest.LeafEntry(
                    path=name,
                    name=name,
                    dtype="float32",
                    shape=state[name].shape,
                    fingerprint=digest.fingerprint,
                    num_nonfinite=digest.num_nonfinite,
                    written_at=1,
                )
                for name, digest in digests.all().items()
            }
            whole = manifest.Manifest(
                step=1,
                timeline=0,
                array_layout=_LAYOUT.value,
                codec=_CODEC.value,
                healthy=True,
                unhealthy=(),
                leaves=entries,
                files=files,
            )
            manifest.write(folder, whole)

        write = orbax_io.write_async(
            path,
            stored,
            record=record,
            timeout_secs=600,
            arrays=self._options,
            seal=seal,
            meanwhile=digests.take,
        )
        digests.start()
        write.begin()
        blocking = time.perf_counter() - begin
        write.wait()
        if error := write.error():
            raise error
        return blocking

    def restore(self, path: str, target: State) -> State:
        """Restores and proves every byte."""
        proof = manifest.read(path)
        if problems := manifest.check_files(path, proof, full=True):
            raise ValueError(problems[0])
        record = run_record.read_record(path)
        state = orbax_io.read_state(path, target, record=record, proof=proof)
        digests = fingerprint.start_digests(state).result()
        for name, entry in proof.leaves.items():
            if digests[name].fingerprint != entry.fingerprint:
                raise ValueError(f"leaf {name} has another fingerprint")
        return jax.block_until_ready(state)


class Orbax:
    """One step in Orbax's way, default options."""

    def __init__(self):
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, path: str, state: State) -> float:
        """Saves, waits and returns the time until the call came back."""
        begin = time.perf_counter()
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(state))
        blocking = time.perf_counter() - begin
        self._checkpointer.wait_until_finished()
        return blocking

    def restore(self, path: str, target: State) -> State:
        """Restores."""
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
        return jax.block_until_ready(self._checkpointer.restore(path, args=args))


def write_bare(path: str, state: State) -> None:
    """The same bytes in one file, synced."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    for value in state.values():
        rest = memoryview(np.asarray(value)).cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]
    os.fsync(fd)
    os.close(fd)
    durable.sync_folder(os.path.dirname(path))


# --- measuring ----------------------------------------------------------------


def measure(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, seconds, and gigabytes by which memory rose above the start."""
    gc.collect()
    os.sync()
    reset_peak()
    before = read_memory("VmRSS")
    begin = time.perf_counter()
    result = call()
    secs = time.perf_counter() - begin
    return result, secs, (read_memory("VmHWM") - before) / 1e3


def run_once(contestant: Any, folder: str, state: State, *, check: bool) -> Figures:
    """One save and one restore."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    path = os.path.join(folder, "1")
    blocking, total, memory = measure(lambda: contestant.save(path, state))
    figures = {"save": total, "blocking": blocking, "save memory": memory}
    restored, secs, memory = measure(lambda: contestant.restore(path, state))
    if check and not all(np.array_equal(restored[k], state[k]) for k in state):
        raise RuntimeError("the restored state is another one")
    shutil.rmtree(folder)
    return figures | {"restore": secs, "restore memory": memory}


def run(state: State, *, num_pairs: int, seed: int = 0) -> dict[str, list[Figures]]:
    """Figures of each contestant in each round."""
    contestants = {"jaxft": Jaxft(), "orbax": Orbax(), "again": Orbax()}
    order = np.random.default_rng(seed)
    found: dict[str, list[Figures]] = {name: [] for name in contestants}
    found["bare"] = []
    for number in range(-1, num_pairs):  # the first compiles and warms up
        for index in order.permutation(len(found)):
            name = list(found)[index]
            folder = os.path.join(_FOLDER.value, name)
            if name == "bare":
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder)
                path = os.path.join(folder, "file")
                _, secs, _ = measure(lambda path=path: write_bare(path, state))
                figures = {"save": secs}
                shutil.rmtree(folder)
            else:
                figures = run_once(contestants[name], folder, state, check=number < 0)
            if number >= 0:
                found[name].append(figures)
    return found


def print_table(found: dict[str, list[Figures]]) -> None:
    """One row a ratio: medians of both, ratio, interval."""
    print(f"{'what':<28}{'':>9}{'base':>9}{'ratio':>8}   95 % interval")
    rows = [("jaxft", "orbax", field) for field in found["orbax"][0]]
    rows += [("jaxft", "bare", "save")]
    rows += [("again", "orbax", field) for field in found["orbax"][0]]
    for name, base, field in rows:
        ours = np.array([figures[field] for figures in found[name]])
        theirs = np.array([figures[field] for figures in found[base]])
        ratio, low, high = pairs.ratio(ours, np.maximum(theirs, 1e-3))
        label = f"{field}: {name} / {base}"
        print(
            f"{label:<28}{np.median(ours):>9.3f}{np.median(theirs):>9.3f}"
            f"{ratio:>8.3f}   {low:.3f} to {high:.3f}"
        )


def main(_: list[str]) -> None:
    """Prints the table."""
    logging.set_verbosity(logging.ERROR)
    state = make_state()
    size = sum(value.nbytes for value in state.values())
    print(
        f"{len(state)} leaves, {size / 1e9:.2f} GB, {_LAYOUT.value}, {_CODEC.value}, "
        f"{_NUM_PAIRS.value} pairs, load {json.dumps(os.getloadavg())}"
    )
    print_table(run(state, num_pairs=_NUM_PAIRS.value))


if __name__ == "__main__":
    app.run(main)
