"""The compile cache serves, and where it cannot it is only a warning."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jaxft.events import read_events

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

PROGRAM = """
import sys, jax, jax.numpy as jnp
from jaxft.events import EventLog
from jaxft.parallel.compile_cache import CompileCache
log = EventLog(sys.argv[1] + "/events", role="work")
log.open()
cache = CompileCache(sys.argv[1] + "/cache", mode=sys.argv[2], emit=log)
problem = cache.enable(device=jax.devices()[0])
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))[0, 0])
print(cache.num_hits, problem)
"""


def compile_once(workdir: pathlib.Path, mode: str = "keep") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(workdir), mode],
        capture_output=True,
        text=True,
        check=True,
    )
    value, last = done.stdout.splitlines()
    assert value == "6.7317677"
    hits, _, problem = last.partition(" ")
    return int(hits), problem


def test_the_second_process_is_served(tmp_path: pathlib.Path) -> None:
    assert compile_once(tmp_path) == (0, "")
    (name,) = os.listdir(tmp_path / "cache")
    assert name.startswith("cpu-")
    assert "jaxlib" in name
    assert compile_once(tmp_path)[0] > 0
    assert compile_once(tmp_path, "off") == (0, "")
    # A fresh folder: nothing is served, and the old one stays beside it.
    assert compile_once(tmp_path, "fresh")[0] == 0
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_garbage_in_the_cache_costs_a_compilation(tmp_path: pathlib.Path) -> None:
    compile_once(tmp_path)
    entries = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert entries
    for index, path in enumerate(entries):
        data = path.read_bytes()
        path.write_bytes([b"", b"garbage", data[: len(data) // 2]][index % 3])
    compile_once(tmp_path)


def test_a_folder_that_cannot_be_had_is_an_event(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    hits, problem = compile_once(tmp_path)
    assert hits == 0
    assert "cache" in problem
    (event,) = read_events(tmp_path / "events")
    assert event["kind"] == "cache_unusable"


def test_a_read_only_folder_is_an_event(tmp_path: pathlib.Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "Permission" in compile_once(tmp_path)[1]


def test_another_machine_has_another_folder(monkeypatch: Any) -> None:
    import jax

    from jaxft.parallel import compile_cache

    here = compile_cache.cache_name(jax.devices()[0])
    monkeypatch.setattr(compile_cache, "cpu_features", lambda: "other")
    assert compile_cache.cache_name(jax.devices()[0]) != here
