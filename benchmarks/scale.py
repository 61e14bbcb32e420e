"""How checkpoints scale: with processes, with steps in the root, with leaves.

Command:   python benchmarks/scale.py [--parts=processes,steps,leaves]
Hardware:  any; two quiet CPU cores, a disk with room for 3 GB
Time:      four minutes
Expected:  no ratio to linear scaling above 1.2, but for more processes than cores (up
           to 1.5) and for `latest`, which takes 0.1 s with 10,000 steps

`processes`: 1, 2 and 4 processes of one device each save and restore one state, split
over all of them; first of a fixed size, then of a fixed size per process. The slowest
process counts; memory is what a process has at most, while it saves and while it
restores, above what it had before it made its part of the state: a save needs that part
once, and a restore the new one beside the old. Linear scaling takes a time in
proportion to the bytes of the whole state, as all share this machine's cores and disk.

`steps`: what a manager does with 10, 1,000 and 10,000 committed steps in its root, all
of which are kept. The three newest are real; the others are copies of one without
its arrays, which nobody opens until they are restored.

`leaves`: a state of 100, 1,000 and 10,000 leaves of 1 kB.

A ratio to linear scaling is of the growth since the row above: 1 where ten times as
much takes ten times as long, below it where less.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from absl import app, flags, logging
from host_memory import read_memory, reset_peak

_PARTS = flags.DEFINE_list("parts", ["processes", "steps", "leaves"], "which tables")
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 5, "saves and restores that count")
_FIXED_MB = flags.DEFINE_integer("fixed_mb", 400, "state of all processes together")
_EACH_MB = flags.DEFINE_integer("each_mb", 100, "state of each process")
_PROCESSES = flags.DEFINE_list("processes", ["1", "2", "4"], "numbers of processes")
_LAYOUT = flags.DEFINE_enum(
    "layout", "files", ["auto", "files", "ocdbt"], "of the arrays of processes"
)
_STEPS = flags.DEFINE_list("steps", ["10", "1000", "10000"], "steps in the root")
_LEAVES = flags.DEFINE_list("leaves", ["100", "1000", "10000"], "leaves of the state")
_FOLDER = flags.DEFINE_string("folder", "/tmp/jaxft-scale", "on the disk to measure")
_WORK = flags.DEFINE_string("work", "", "internal: what one process is to do, as JSON")

_NUM_LEAVES = 10
_TIMEOUT_SECS = 240
Figures = dict[str, float]


# --- one of several processes -------------------------------------------------


def work(task: dict[str, Any]) -> list[Figures]:
    """Saves and restores as one process of a job; the figures of each round."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if task["num_processes"] > 1:
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            task["address"], task["num_processes"], task["process"]
        )
    from jaxft.checkpoint.manager import CheckpointManager

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    change = jax.jit(lambda state: jax.tree.map(lambda x: x + 1.0, state))

    def make_state(num_rows: int) -> dict[str, Any]:
        shape = (num_rows // mesh.size * mesh.size, 1000)
        return {
            f"leaf_{number}": jax.make_array_from_callback(
                shape, rows, lambda index, seed=number: _random(index, shape, seed=seed)
            )
            for number in range(_NUM_LEAVES)
        }

    # All that is imported and started once is there before memory is looked at.
    settings = {"keep": "last(1)", "layout": task["layout"], "full_every": 0}
    with CheckpointManager(f"{task['root']}-small", **settings) as manager:
        small = make_state(mesh.size)
        manager.save(1, small, force=True)
        manager.restore(small)
    _meet("the state")
    empty = read_memory("VmRSS")
    state = make_state(task["num_bytes"] // (_NUM_LEAVES * 4 * 1000))
    manager = CheckpointManager(task["root"], **settings)  # It links nothing.
    found = []
    for step in range(1, task["num_rounds"] + 2):  # The first compiles and warms up.
        state = jax.block_until_ready(change(state))
        _meet(f"save {step}")
        reset_peak()
        begin = time.perf_counter()
        manager.save(step, state, force=True)
        blocking = time.perf_counter() - begin
        manager.wait()
        save = time.perf_counter() - begin
        figures = {
            "save": save,
            "blocking": blocking,
            "save memory": read_memory("VmHWM") - empty,
        }
        _meet(f"restore {step}")
        reset_peak()
        begin = time.perf_counter()
        restored = manager.restore(state)
        jax.block_until_ready(restored.state)
        figures["restore"] = time.perf_counter() - begin
        figures["restore memory"] = read_memory("VmHWM") - empty
        if step == 1:
            _check_equal(restored.state, state)
        else:
            found.append(figures)
        del restored
        gc.collect()
    manager.close()
    _meet("the end")
    return found


def _random(
    index: tuple[slice, ...], shape: tuple[int, ...], *, seed: int
) -> np.ndarray:
    """Finite numbers whose other bits are random: nothing compresses."""
    start, stop, _ = index[0].indices(shape[0])
    bits = np.random.default_rng([seed, start]).integers(
        2**32, size=(stop - start, *shape[1:]), dtype=np.uint32
    )
    return (bits & np.uint32(0xBFFFFFFF)).view(np.float32)


def _check_equal(restored: Any, state: Any) -> None:
    for name, value in state.items():
        pairs = zip(
            restored[name].addressable_shards, value.addressable_shards, strict=True
        )
        if not all(np.array_equal(a.data, b.data) for a, b in pairs):
            raise RuntimeError(f"{name}: the restored state is another one")


def _meet(what: str) -> None:
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


# --- the table of processes -----------------------------------------------------


def run_job(num_processes: int, *, num_bytes: int, num_rounds: int) -> Figures:
    """Medians of what all processes of a job took, the slowest counted."""
    root = _fresh(_FOLDER.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    task = {"address": address, "num_processes": num_processes, "root": root}
    task |= {"num_bytes": num_bytes, "num_rounds": num_rounds}
    task["layout"] = _LAYOUT.value
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                f"--work={json.dumps(task | {'process': index})}",
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(num_processes)
    ]
    try:
        lines = [p.communicate(timeout=_TIMEOUT_SECS)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(root, ignore_errors=True)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{[p.returncode for p in processes]}: see above")
    rounds = [json.loads(text.splitlines()[-1]) for text in lines]
    return {
        name: float(
            np.median(
                [max(r[name] for r in every) for every in zip(*rounds, strict=True)]
            )
        )
        for name in rounds[0][0]
    }


def print_processes() -> None:
    """Prints a row for each number of processes; linear is in proportion to bytes."""
    print(
        f"\n{'state':<18}{'processes':>10}{'save':>8}{'restore':>9}{'blocking':>10}"
        f"{'each holds':>12}{'memory: save':>14}{'restore':>9}"
        "   ratio to linear: save, restore"
    )
    for label, fixed, each in (
        (f"{_FIXED_MB.value} MB", _FIXED_MB.value, 0),
        (f"{_EACH_MB.value} MB a process", 0, _EACH_MB.value),
    ):
        first: tuple[int, Figures] | None = None
        for count in map(int, _PROCESSES.value):
            size = fixed + each * count
            one = run_job(count, num_bytes=size * 10**6, num_rounds=_NUM_ROUNDS.value)
            first = first or (size, one)
            growth = size / first[0]
            ratios = ", ".join(
                f"{one[name] / first[1][name] / growth:.2f}"
                for name in ("save", "restore")
            )
            print(
                f"{label:<18}{count:>10}{one['save']:>7.2f}s{one['restore']:>8.2f}s"
                f"{one['blocking'] * 1e3:>8.0f}ms{size / count:>10.0f}MB"
                f"{one['save memory']:>12.0f}MB"
                f"{one['restore memory']:>7.0f}MB   {ratios}",
                flush=True,
            )


# --- the manager alone ----------------------------------------------------------


def _fresh(folder: str) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return os.path.join(folder, "root")


def _tiny(num_leaves: int, *, step: int) -> dict[str, Any]:
    import jax

    rng = np.random.default_rng(step)
    return {
        f"leaf_{i:05d}": jax.device_put(rng.normal(size=250).astype(np.float32))
        for i in range(num_leaves)
    }


def _manager(root: str) -> Any:
    from jaxft.checkpoint.manager import CheckpointManager

    return CheckpointManager(root, save="steps(1)", keep="every(1)", emit=_ignore)


def _ignore(kind: str, /, **fields: Any) -> None:
    """The history is nobody's concern here."""


def fill_root(root: str, num_steps: int) -> None:
    """A root with so many steps, of which the newest three are saved for real."""
    real = min(3, num_steps)
    with _manager(root) as manager:
        for step in range(num_steps - real + 1, num_steps + 1):
            manager.save(step, _tiny(_NUM_LEAVES, step=step), force=True)
    model = pathlib.Path(root, str(num_steps))
    files = [p.relative_to(model) for p in sorted(model.rglob("*")) if p.is_file()]
    files = [path for path in files if path.parts[0] != "state"]
    folders = sorted({path.parent for path in files})
    for step in range(1, num_steps - real + 1):
        copy = pathlib.Path(root, str(step))
        for folder in folders:
            os.makedirs(copy / folder, exist_ok=True)
        for path in files:
            os.link(model / path, copy / path)


def measure_manager(root: str, *, num_leaves: int, step: int) -> Figures:
    """Medians of what a manager takes with what is in its root; saves from `step`."""
    import jax

    state = jax.block_until_ready(_tiny(num_leaves, step=0))
    # Thousands of leaves take many seconds each time.
    num_rounds = min(_NUM_ROUNDS.value, max(2, 3000 // num_leaves))
    starts = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        manager = _manager(root)
        manager.check(state)
        jax.block_until_ready(manager.restore(state).state)
        starts.append(time.perf_counter() - begin)
        manager.close()
    manager = _manager(root)
    manager.restore(state)
    figures = {"start": float(np.median(starts))}
    figures["latest"] = _median_secs(manager.latest)
    asked = iter(range(10**9))
    figures["should_save"] = _median_secs(lambda: manager.should_save(next(asked)), 999)
    rounds: dict[str, list[float]] = {"blocking": [], "save": []}
    for number in range(num_rounds + 1):  # The first compiles and warms up.
        new = jax.block_until_ready(_tiny(num_leaves, step=step + number))
        begin = time.perf_counter()
        manager.save(step + number, new, force=True)
        blocking = time.perf_counter() - begin
        manager.wait()
        if number:
            rounds["blocking"].append(blocking)
            rounds["save"].append(time.perf_counter() - begin)
    manager.close()
    return figures | {name: float(np.median(secs)) for name, secs in rounds.items()}


def _median_secs(call: Callable[[], Any], num_calls: int = 5) -> float:
    secs = []
    for _ in range(num_calls):
        begin = time.perf_counter()
        call()
        secs.append(time.perf_counter() - begin)
    return float(np.median(secs))


def print_growth(what: str, rows: Iterable[tuple[int, Figures]]) -> None:
    """Milliseconds, and the ratio of their growth to linear scaling."""
    before, old = 0, Figures()
    for count, figures in rows:
        if not old:
            print(f"\n{what:<8}" + "".join(f"{name:>21}" for name in figures))
        line = f"{count:<8}"
        for name in figures:
            text = f"{figures[name] * 1e3:.4g} ms"
            if old:
                growth = figures[name] / old[name] / (count / before)
                text += f" ({growth:.2f})"
            line += f"{text:>21}"
        print(line, flush=True)
        before, old = count, figures


def measure_steps() -> Iterator[tuple[int, Figures]]:
    """For each number of steps in the root."""
    for count in map(int, _STEPS.value):
        root = _fresh(_FOLDER.value)
        fill_root(root, count)
        found = measure_manager(root, num_leaves=_NUM_LEAVES, step=count + 1)
        yield count, found


def measure_leaves() -> Iterator[tuple[int, Figures]]:
    """For each number of leaves, with three steps in the root."""
    for count in map(int, _LEAVES.value):
        root = _fresh(_FOLDER.value)
        with _manager(root) as manager:
            for step in (1, 2, 3):
                manager.save(step, _tiny(count, step=step), force=True)
        yield count, measure_manager(root, num_leaves=count, step=4)


def main(_: list[str]) -> None:
    """Prints the tables."""
    logging.set_verbosity(logging.ERROR)
    if _WORK.value:
        print(json.dumps(work(json.loads(_WORK.value))))
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(f"{_NUM_ROUNDS.value} rounds, load {json.dumps(os.getloadavg())}")
    try:
        if "processes" in _PARTS.value:
            print_processes()
        if "steps" in _PARTS.value:
            print_growth("steps", measure_steps())
        if "leaves" in _PARTS.value:
            print_growth("leaves", measure_leaves())
    finally:
        shutil.rmtree(_FOLDER.value, ignore_errors=True)


if __name__ == "__main__":
    app.run(main)
