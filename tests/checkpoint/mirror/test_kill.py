"""A mirror or a fetch killed at the k-th rename, link, deletion or fsync.

strace counts in each thread apart; k runs until the program survives.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxft.checkpoint import layout, mirror, mirror_fetch, verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

A = np.arange(100, dtype=np.float32)
COPY = """
import sys
from jaxft.checkpoint import mirror, mirror_fetch
copier = mirror.Mirror(sys.argv[1])
copier.offer(sys.argv[2])
assert copier.close(60)
"""
FETCH = """
import sys
from jaxft.checkpoint import mirror, mirror_fetch
mirror_fetch.fetch(sys.argv[1], into=sys.argv[2])
"""


def _run(program, *args, call="", when=0):
    """Whether it survived."""
    names = {"rename": "rename,renameat2", "unlink": "unlink,unlinkat,rmdir"}
    calls = names.get(call, call)
    trace = ["strace", "-f", "-qq", "-e", f"trace={calls}"]
    trace += ["-e", f"inject={calls}:signal=SIGKILL:when={when}", "-o", os.devnull]
    done = subprocess.run(
        [*(trace if call else []), sys.executable, "-c", program, *map(str, args)],
        env=os.environ
        | {
            "PYTHONPATH": str(pathlib.Path(mirror.__file__).parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    return done.returncode == 0


def _prepare(root, target):
    """A mirror with one step to replace, one to delete and one to link from."""
    root.add(1, frozen=A, moving=A)
    root.add(2, frozen=A, moving=A + 1)
    root.add(3, frozen=A, moving=A + 2)
    assert _run(COPY, target, root.path / "3")
    shutil.rmtree(root.path / "1")
    layout.abandon(str(root.path / "3"), timeline=0)
    root.add(3, frozen=A + 9, moving=A, timeline=1)
    root.add(4, links={"frozen": 2}, moving=A + 3, timeline=1)


@pytest.mark.parametrize("call", ["rename", "link", "unlink", "fsync"])
def test_every_step_on_the_mirror_is_whole_after_each_kill(root, tmp_path, call):
    before = tmp_path / "before"
    _prepare(root, before)
    num_kills = 0
    stride = {"fsync": 7, "unlink": 5}.get(call, 1)
    for when in range(1, 200, stride):
        target = tmp_path / f"mirror-{when}"
        shutil.copytree(before, target)
        survived = _run(COPY, target, root.path / "4", call=call, when=when)
        num_kills += not survived
        for step in mirror_fetch.list_steps(str(target)):
            assert not verify.verify_step(target / str(step)), (call, when)
        assert _run(COPY, target, root.path / "4")
        assert sorted(os.listdir(target)) == ["2", "3", "4"]
        for step in (2, 3, 4):
            assert not verify.verify_step(target / str(step)), (call, when)
        shutil.rmtree(target)
        if survived:
            break
    assert num_kills >= 2


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_killed_fetch_leaves_nothing_that_looks_like_a_step(
    root, tmp_path, call, same_files
):
    target = tmp_path / "mirror"
    step = root.add(4, frozen=A, moving=A)
    assert _run(COPY, target, step)
    num_kills = 0
    for when in range(1, 200, 1 if call != "fsync" else 5):
        new = tmp_path / f"new-{when}"
        survived = _run(FETCH, target, new, call=call, when=when)
        num_kills += not survived
        if not survived:
            if layout.discover(new).steps:  # The rename was the last that it did.
                assert same_files(new / "4", step)
                continue
            assert _run(FETCH, target, new)
        assert same_files(new / "4", step)
        assert sorted(os.listdir(new)) == ["4", "mirror-id"]
        if survived:
            break
    assert num_kills >= 2
