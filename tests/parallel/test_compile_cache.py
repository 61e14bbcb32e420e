"""The compile cache serves, and where it cannot it is only a warning."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.events import read_events
from jaxft.parallel import compile_cache
from jaxft.parallel.compile_cache import CompileCache

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


def compile_once(
    workdir: pathlib.Path, mode: str = "keep", *options: str
) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", PROGRAM, str(workdir), mode],
        capture_output=True,
        text=True,
        check=True,
    )
    value, last = done.stdout.splitlines()
    assert float(value) == pytest.approx(6.731767, abs=1e-4)
    assert done.stderr == ""
    hits, _, problem = last.partition(" ")
    return int(hits), problem


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))


def compile_here(folder: pathlib.Path) -> tuple[int, Events]:
    """A program that this process has not compiled yet, with the cache in `folder`."""
    events = Events()
    cache = CompileCache(folder, mode="keep", emit=events)
    assert cache.enable(device=jax.devices()[0]) == ""
    jax.clear_caches()
    jax.jit(lambda x: jnp.cos(x) @ x)(np.ones((8, 8)))
    cache.close()
    return cache.num_hits, events


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*-cache") if path.is_file())


def test_the_second_process_is_served(tmp_path: pathlib.Path) -> None:
    assert compile_once(tmp_path) == (0, "")
    (name,) = os.listdir(tmp_path / "cache")
    assert name.startswith("cpu-")
    for package in ("jax", "jaxlib"):
        assert f"-{package}{importlib.metadata.version(package)}-" in name
    assert compile_once(tmp_path)[0] > 0
    assert compile_once(tmp_path, "off") == (0, "")
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "cache", moved / "cache")
    assert compile_once(moved)[0] > 0
    # A fresh folder: nothing is served, and the old one stays beside it.
    assert compile_once(tmp_path, "fresh")[0] == 0
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(
            pytest.param(("-W", how), marks=pytest.mark.slow)
            for how in ("error", "ignore")
        ),
    ],
)
def test_garbage_in_the_cache_costs_one_compilation(
    tmp_path: pathlib.Path, options: tuple[str, ...]
) -> None:
    """The next start compiles without a word to the user, the one after is served."""
    compile_once(tmp_path)
    num_served = compile_once(tmp_path)[0]
    broken = entries(tmp_path / "cache")
    assert broken
    assert num_served > 0
    for index, path in enumerate(broken):
        data = path.read_bytes()
        path.write_bytes([b"", b"garbage", data[: len(data) // 2]][index % 3])
    assert compile_once(tmp_path, "keep", *options)[0] == 0
    told = read_events(tmp_path / "events")
    assert {event["kind"] for event in told} == {"cache_unusable"}
    assert all("\n" not in event["reason"] for event in told)
    assert compile_once(tmp_path)[0] == num_served
    assert len(read_events(tmp_path / "events")) == len(told)


def test_each_of_two_runs_in_a_process_has_its_own_folder(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("one", "two"):
        assert compile_here(tmp_path / name)[0] == 0
    for name in ("one", "two"):
        (entry,) = entries(tmp_path / name)
        assert entry.name.startswith("jit_")
        # A hit counts once, whatever number of caches there was before.
        assert compile_here(tmp_path / name)[0] == 1


def test_the_process_gets_its_settings_and_warnings_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *args: shown.append(str(message))
    )
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    names = [name for name in jax.config.values if "cache" in name]
    assert len(names) > 4

    def settings() -> list[object]:
        values = [getattr(jax.config, name) for name in names]
        return [*values, warnings.showwarning, *warnings.filters]

    before = settings()
    for mode in ("keep", "off", "fresh"):
        cache = CompileCache(tmp_path, mode=mode, emit=Events())
        cache.enable(device=jax.devices()[0])
        during = settings()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning("of others", UserWarning, "file", 1)
        # Another one takes over; what was there before both comes back.
        other = CompileCache(tmp_path, mode="off", emit=Events())
        other.enable(device=jax.devices()[0])
        cache.close()
        other.close()
        other.close()
        assert during != before, mode
        assert settings() == before, mode
    assert shown == ["of others"] * 3


def test_an_entry_that_cannot_be_written_is_an_event(tmp_path: pathlib.Path) -> None:
    events = Events()
    cache = CompileCache(tmp_path / "cache", mode="keep", emit=events)
    cache.enable(device=jax.devices()[0])
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("gone")
    jax.clear_caches()
    assert jax.jit(lambda x: x + 40)(2) == 42
    cache.close()
    assert {kind for kind, _ in events} == {"cache_unusable"}


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
    here = compile_cache.cache_name(jax.devices()[0])
    monkeypatch.setattr(compile_cache, "cpu_features", lambda: "other")
    assert compile_cache.cache_name(jax.devices()[0]) != here
