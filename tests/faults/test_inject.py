"""Faults happen once over all restarts, marked before they do."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxft.config import ConfigError
from jaxft.faults.inject import InjectedError, Injector
from jaxft.faults.plan import parse_plan


def make(tmp_path, text, *, told=None, committed=(), **more):
    def emit(kind, /, **fields):
        if told is not None:
            told.append((kind, fields))

    return Injector(
        parse_plan(text, num_steps=100),
        workdir=tmp_path,
        root=str(tmp_path / "checkpoints"),
        committed=lambda: committed,
        acts=more.pop("acts", {}),
        emit=emit,
        **more,
    )


def test_once_over_all_starts(tmp_path):
    told = []
    first = make(tmp_path, "raise@5", told=told)
    assert first.at_border(4, "state") == "state"
    assert not (tmp_path / "faults").exists()
    with pytest.raises(InjectedError, match="raise@5"):
        first.at_border(5, "state")
    assert first.at_border(6, "state") == "state"
    marker = json.loads((tmp_path / "faults" / "1.json").read_text())
    assert (marker["fault"], marker["step"]) == ("raise@5", 5)
    ((kind, fields),) = told
    assert kind == "injected"
    assert (fields["fault"], fields["number"], fields["step"]) == ("raise", 1, 5)
    again = make(tmp_path, "raise@5", told=told)
    for step in range(10):
        again.at_border(step, "state")
    assert len(told) == 1


def test_bad_data_is_told_by_the_first_process_alone(tmp_path):
    told = []
    for process in (1, 0, 1):
        make(tmp_path, "nan_grad@3", told=told, process=process).at_draw(4, 3)
    ((kind, fields),) = told
    assert (kind, fields["process"], fields["batch"]) == ("injected", 0, 3)
    assert os.listdir(tmp_path / "faults") == ["1.json"]


def test_times(tmp_path):
    for _ in range(2):
        with pytest.raises(InjectedError):
            make(tmp_path, "raise@5 times=2").at_border(5, None)
    assert make(tmp_path, "raise@5 times=2").at_border(5, None) is None
    assert sorted(os.listdir(tmp_path / "faults")) == ["1-2.json", "1.json"]


def test_a_border_that_was_passed_is_made_up_for(tmp_path):
    with pytest.raises(InjectedError):
        make(tmp_path, "raise@5").at_border(50, None)


def test_another_process_is_not_harmed(tmp_path):
    assert make(tmp_path, "raise@5 process=1").at_border(5, None) is None
    with pytest.raises(InjectedError):
        make(tmp_path, "raise@5 process=1", process=1).at_border(5, None)


def test_another_plan_in_the_same_workdir_is_refused(tmp_path):
    with pytest.raises(InjectedError):
        make(tmp_path, "raise@5").at_border(5, None)
    with pytest.raises(ConfigError, match=r"fault 1 was 'raise@5', now it is kill@5"):
        make(tmp_path, "kill@5")
    make(tmp_path, "raise@5; kill@8")


def test_a_damaged_marker_is_refused(tmp_path):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "1.json").write_text("{")
    with pytest.raises(ConfigError, match=r"1\.json cannot be read"):
        make(tmp_path, "raise@5")


def test_bad_data_is_told_whenever_it_is_drawn(tmp_path):
    told = []
    for _ in range(2):
        injector = make(tmp_path, "nan_grad@3-4", told=told)
        for batch in range(6):
            injector.at_border(batch, None)
            injector.at_draw(batch + 1, batch)
    assert [fields["batch"] for _, fields in told] == [3, 4, 3, 4]
    assert os.listdir(tmp_path / "faults") == ["1.json"]


def test_what_a_full_disk_does_not_take_is_told_later(tmp_path, mount_disk):
    told = []
    disk = mount_disk(tmp_path / "run", "2m")
    injector = make(disk, "enospc@5; nan_grad@6-7", told=told)
    injector.at_border(5, None)
    injector.at_draw(6, 6)
    injector.at_draw(7, 7)
    injector.tell_late()
    assert [fields["fault"] for _, fields in told] == ["enospc"]
    injector.hear("save_failed")
    injector.tell_late()
    injector.tell_late()
    assert [fields.get("batch") for _, fields in told] == [None, 6, 7]
    assert sorted(os.listdir(disk / "faults")) == ["1.json", "2.json"]


def test_what_needs_a_device_is_done_by_it(tmp_path):
    calls = []

    def flip_bit(state, **given):
        calls.append(given)
        return state + 1, "bit 3 of w[0]"

    def exhaust_memory():
        raise MemoryError("none left")

    told = []
    acts = {"flip_bit": flip_bit, "exhaust_memory": exhaust_memory}
    injector = make(tmp_path, "bitflip@2 leaf=w; oom@3", told=told, acts=acts)
    assert injector.at_border(2, 7) == 8
    assert calls == [{"leaf": "w", "seed": "1 2"}]
    assert told[0][1]["where"] == "bit 3 of w[0]"
    with pytest.raises(MemoryError):
        injector.at_border(3, 8)
    assert len(told) == 2


def test_slow_saves(tmp_path):
    injector = make(tmp_path, "slow_disk@5-6:2MBps; slow_disk@8-9:1MBps")
    assert [injector.write_rate(step) for step in (4, 5, 6, 7)] == [0, 2e6, 2e6, 0]
    # No save between 8 and 9: the next one.
    assert [injector.write_rate(step) for step in (20, 30)] == [1e6, 0]
    assert sorted(os.listdir(tmp_path / "faults")) == ["1.json", "2.json"]


def test_only_a_small_scratch_disk_is_filled(tmp_path):
    with pytest.raises(ConfigError, match=r"enospc fills the file system .* is on "):
        make(tmp_path, "enospc@5")
    assert os.listdir(tmp_path) == []


def test_a_scratch_disk_is_full_until_a_save_has_failed(tmp_path, mount_disk):
    disk = mount_disk(tmp_path / "run", "2m")
    injector = make(disk, "enospc@5; enospc@7; raise@6")
    injector.at_border(5, None)
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(5000))
    # No other fault could be marked now.
    assert injector.at_border(6, "state") == "state"
    injector.hear("step")
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(5000))
    injector.hear("save_failed")
    (disk / "more").write_bytes(bytes(5000))
    with pytest.raises(InjectedError):
        injector.at_border(6, None)
    injector.at_border(7, None)
    with pytest.raises(OSError, match="No space left"):
        (disk / "other").write_bytes(bytes(5000))
    make(disk, "enospc@5; enospc@7; raise@6")  # A new start finds the room again.
    (disk / "other").write_bytes(bytes(5000))


ALONE = """
import sys
from tests.faults.test_inject import make
import pathlib
path, text, step = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
injector = make(path, text, committed=[10, 20])
injector.before_save(step)
injector.in_save()
injector.at_border(step, None)
print("alive", flush=True)
"""


def alone(tmp_path, text, step):
    repo = pathlib.Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path), text, str(step)],
        env=os.environ | {"PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_kill_is_marked_before_it_happens(tmp_path):
    assert alone(tmp_path, "kill@5", 5).returncode == -signal.SIGKILL
    assert (tmp_path / "faults" / "1.json").exists()
    done = alone(tmp_path, "kill@5", 5)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_kill_in_a_save(tmp_path):
    assert alone(tmp_path, "kill_in_save@5", 4).returncode == 0
    assert alone(tmp_path, "kill_in_save@5", 5).returncode == -signal.SIGKILL
    assert alone(tmp_path, "kill_in_save@5", 6).returncode == 0


def test_sigterm_is_a_real_signal(tmp_path):
    assert alone(tmp_path, "sigterm@5", 5).returncode == -signal.SIGTERM


def test_the_newest_step_is_damaged_in_one_byte(tmp_path):
    for step in ("10", "20"):
        folder = tmp_path / "checkpoints" / step / "state" / "w"
        folder.mkdir(parents=True)
        (folder / "0").write_bytes(bytes(100))
        (folder / "0").chmod(0o444)
    done = alone(tmp_path, "corrupt_newest@5", 5)
    assert done.returncode == -signal.SIGKILL, done.stderr
    root = tmp_path / "checkpoints"
    assert (root / "10/state/w/0").read_bytes() == bytes(100)
    damaged = (root / "20/state/w/0").read_bytes()
    assert sorted(damaged) == [0] * 99 + [255]
    assert (root / "20/state/w/0").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("committed", [[], [20]])
def test_the_only_step_stays_whole(tmp_path, committed):
    injector = make(tmp_path, "corrupt_newest@5", committed=committed)
    assert injector.at_border(5, "state") == "state"
    assert not (tmp_path / "faults").exists()
