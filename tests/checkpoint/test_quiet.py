"""What a failure leaves on standard error: nothing of ours, all of others."""

import asyncio
import gc
import logging
import subprocess
import sys

import pytest

from jaxft.checkpoint import quiet

pytestmark = [pytest.mark.device, pytest.mark.timeout(120)]

START = """
import errno, gc, os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jaxft import records
from jaxft.checkpoint import orbax_io
from jaxft.checkpoint.manager import CheckpointManager
root, how = sys.argv[1:]

def state(step):
    noise = np.random.default_rng(step).normal(size=(256, 256))
    small = [jnp.full((50, 50), i, "float32") for i in range(60)]
    return {"step": step, "w": jnp.asarray(noise), "many": small, "text": "x", "n": 3,
            "key": jax.random.key(step)}
"""

FALL_BACK = """
with CheckpointManager(root, keep="last(9)") as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), force=True)
for step in (2, 3):
    for folder, _, files in os.walk(f"{root}/{step}/state"):
        if how.startswith("data") and "/c/" not in f"{folder}/":
            continue
        for file in files:
            path = os.path.join(folder, file)
            os.chmod(path, 0o600)
            data = bytearray(open(path, "rb").read())
            for i in range(0, len(data), 101):
                data[i] ^= 255
            os.unlink(path)
            if "gone" not in how:
                open(path, "wb").write(data if "flip" in how else data[:len(data) // 2])
assert CheckpointManager(root).restore(state(0)).step == 1
"""

FAILED_SAVE = """
number = int(how)
checkpoints = CheckpointManager(root, save="steps(1)")
checkpoints.save(1, state(1))
checkpoints.wait()
if number == errno.EFBIG:  # a real one, at the first large write of any thread
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
else:
    def fail(*args):
        raise OSError(number, os.strerror(number))
    orbax_io._commit = fail
assert checkpoints.save(2, state(2))
while (error := checkpoints.error()) is None:
    time.sleep(0.01)
print(error, flush=True)
"""

END = """
gc.collect()
time.sleep(0.3)
"""


def _run(tmp_path, program, how):
    done = subprocess.run(
        [sys.executable, "-c", START + program + END, str(tmp_path / "root"), str(how)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "how",
    [
        *("gone", "flip", "data cut"),
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("cut", "data gone", "data flip")
        ),
    ],
)
def test_a_fall_back_is_quiet(tmp_path, how):
    """What nobody listens to is logged, one line each, and nothing else is said."""
    out, err = _run(tmp_path, FALL_BACK, how)
    lines = [line.split(": ") for line in err.splitlines()]
    assert all(line[0] == "WARNING:absl:jaxft" for line in lines), err
    assert [line[1] for line in lines] == ["corrupt", "quarantine"] * 2
    assert out == ""


@pytest.mark.parametrize(
    ("number", "cause", "remedy"),
    [
        (28, "disk full", "free space under {root}"),
        (122, "quota exceeded", "free space under {root} or raise the quota"),
        (5, "I/O error", "check the disk of {root}"),
        (30, "read-only file system", "mount {root} writable"),
        (27, "file too large", "raise the limit on file sizes, see ulimit -f"),
    ],
)
def test_a_failed_save_is_one_line_that_says_what_to_do(
    tmp_path, number, cause, remedy
):
    out, err = _run(tmp_path, FAILED_SAVE, number)
    (line,) = out.splitlines()
    assert err == ""
    root = tmp_path / "root"
    assert line.startswith(f"save of step 2 to {root}/2 failed: {cause}")
    remedy = remedy.format(root=root)
    assert f"; {remedy}; the same command goes on from step 1 (" in line


def test_what_others_say_is_still_heard(caplog, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: told.append("uncaught"))

    def unraisable(what):
        if str(what.exc_value) == "mine":  # Not what an earlier test has left.
            told.append("unraisable")

    monkeypatch.setattr(sys, "unraisablehook", unraisable)
    before = sys.excepthook, sys.unraisablehook

    class Broken:
        def __del__(self):
            raise RuntimeError("mine")

    async def lost():
        asyncio.get_running_loop().create_future().set_exception(KeyError("mine"))

    with quiet.quiet_orbax():
        with quiet.quiet_orbax():
            pass
        try:
            raise RuntimeError("Event loop is closed")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
        Broken()
        asyncio.run(lost())
        gc.collect()
        logging.getLogger("absl").error("of others", exc_info=KeyError("mine"))
    assert told == ["uncaught", "unraisable"]
    texts = [record.getMessage() for record in caplog.records]
    assert sum("never retrieved" in text for text in texts) == 1
    assert texts[-1] == "of others"
    assert (sys.excepthook, sys.unraisablehook) == before
    for name in ("absl", "asyncio"):
        assert quiet._is_news not in logging.getLogger(name).filters


def test_coroutines_of_others_still_warn():
    async def forgotten():
        """Never awaited, in the hands of whoever drops it."""

    with quiet.quiet_orbax():
        quiet.drain()
        coroutine = forgotten()
        with pytest.warns(RuntimeWarning, match="never awaited"):
            del coroutine
