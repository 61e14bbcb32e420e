"""What memory there is: the least of the host's and of every group's."""

import pytest

from jaxft import config
from jaxft.checkpoint import host_memory, options

GIB = 2**30
HOST = {"proc/meminfo": f"MemTotal: 999 kB\nMemAvailable: {64 * GIB // 1024} kB\n"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def _group(folder, limit, usage, *, cached=0):
    is_v1 = folder.startswith(V1)
    names = ("limit_in_bytes", "usage_in_bytes") if is_v1 else ("max", "current")
    stat = f"{'total_' if is_v1 else ''}inactive_file {cached}\n"
    return {
        f"{folder}/memory.{names[0]}": f"{limit}\n",
        f"{folder}/memory.{names[1]}": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 1\n{stat}workingset 2\n",
    }


CASES = {
    "nothing is known": ({}, None),
    "no group": (HOST, 64 * GIB),
    "v2 at the top of a container": (
        HOST | {"proc/self/cgroup": "0::/\n"} | _group(V2, 4 * GIB, GIB),
        3 * GIB,
    ),
    "v2 without limit": (
        HOST | {"proc/self/cgroup": "0::/a\n"} | _group(f"{V2}/a", "max", GIB),
        64 * GIB,
    ),
    "v2 with a tighter group above": (
        HOST
        | {"proc/self/cgroup": "0::/a/b.slice\n"}
        | _group(f"{V2}/a/b.slice", 8 * GIB, GIB)
        | _group(f"{V2}/a", 5 * GIB, 3 * GIB),
        2 * GIB,
    ),
    "file cache of no recent use is free": (
        HOST
        | {"proc/self/cgroup": "0::/\n"}
        | _group(V2, 4 * GIB, 4 * GIB, cached=GIB),
        GIB,
    ),
    "a group above its limit": (
        HOST | {"proc/self/cgroup": "0::/\n"} | _group(V2, GIB, 2 * GIB),
        0,
    ),
    "v1": (
        HOST
        | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job\n0::/\n"}
        | _group(f"{V1}/job", 6 * GIB, 2 * GIB, cached=GIB),
        5 * GIB,
    ),
    "v1 without limit": (
        HOST | {"proc/self/cgroup": "4:memory:/\n"} | _group(V1, 2**63 - 4096, GIB),
        64 * GIB,
    ),
    "v1 in a container, by the host's name": (
        HOST
        | {"proc/self/cgroup": "4:memory:/docker/0123\n"}
        | _group(V1, 2 * GIB, GIB),
        GIB,
    ),
    "the host has less": (
        {"proc/meminfo": f"MemAvailable: {GIB // 1024} kB\n"}
        | {"proc/self/cgroup": "0::/../other\n"}
        | _group(V2, 4 * GIB, GIB),
        GIB,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_counts(tmp_path, case):
    files, want = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory.available_bytes(tmp_path) == want


@pytest.mark.parametrize(
    ("available", "budget"),
    [(None, GIB), (64 * GIB, 32 * GIB), (GIB, GIB // 2), (0, 2**26)],
)
def test_auto_is_half_of_it(monkeypatch, available, budget):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    made = options.make_options(
        array_layout="auto",
        codec="raw",
        full_every=10,
        verify="full",
        health="**",
        memory_budget="auto",
    )
    assert made.memory_bytes == budget
    assert made.verify is config.Verify.FULL


def test_this_machine_says_something():
    assert host_memory.available_bytes() > 2**20
