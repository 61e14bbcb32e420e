"""Rollbacks and pins: durable before they count, and right after a kill anywhere."""

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from jaxft import records
from jaxft.checkpoint import decisions, layout, run_record


class Events(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for name, fields in self if name == kind]


def _make_steps(root, *steps, timeline=0):
    for step in steps:
        folder = root / str(step) / layout.RUN_ITEM
        folder.mkdir(parents=True)
        record = run_record.make_record(
            step, time_secs=1.0, state={"w": "int"}, timeline=timeline
        )
        (folder / run_record.RECORD_FILE).write_text(json.dumps(record))


def test_nothing_decided(tmp_path):
    assert decisions.read(tmp_path / "no") == decisions.Decisions()
    assert decisions.read(tmp_path).timeline == 0
    _make_steps(tmp_path, 1, 2)
    assert decisions.discover(tmp_path) == layout.discover(tmp_path)


def test_a_rollback_takes_out_what_is_above_and_renames_it(tmp_path):
    _make_steps(tmp_path, 10, 20, 30, 40)
    events = Events()
    made = decisions.roll_back(
        tmp_path, to=20, reason="loss spike", skip=(20, 25), emit=events
    )
    assert (made.timeline, made.origin, made.to) == (1, 40, 20)
    assert sorted(os.listdir(tmp_path)) == [
        "10",
        "20",
        "30.abandoned-t0",
        "40.abandoned-t0",
        "decisions",
    ]
    assert os.listdir(tmp_path / "decisions") == ["1.json"]
    assert [event["step"] for event in events.of("abandoned")] == [30, 40]
    decided = decisions.read(tmp_path)
    assert decided.rollbacks == (made,)
    assert decided.timeline == 1
    assert decided.skips_since(0) == [(20, 25)]
    assert decided.skips_since(1) == []
    assert len(layout.discover(tmp_path).set_aside) == 2


def test_a_name_alone_never_brings_an_old_timeline_back(tmp_path):
    _make_steps(tmp_path, 10, 20, 30)
    decisions.roll_back(tmp_path, to=10, reason="a")
    # Put back by hand, or not renamed yet: it is none of ours whatever its name.
    os.rename(tmp_path / "30.abandoned-t0", tmp_path / "30")
    _make_steps(tmp_path, 15, timeline=1)
    assert decisions.discover(tmp_path).steps == [10, 15]
    assert [info.step for info in decisions.discover(tmp_path).abandoned] == [30]
    decisions.finish(tmp_path)
    assert sorted(layout.discover(tmp_path).steps) == [10, 15]
    # The same label again, in the new timeline, and rolled back again.
    _make_steps(tmp_path, 20, 30, timeline=1)
    decisions.roll_back(tmp_path, to=15, reason="b")
    assert decisions.discover(tmp_path).steps == [10, 15]
    assert {"30.abandoned-t0", "30.abandoned-t1"} <= set(os.listdir(tmp_path))
    _make_steps(tmp_path, 20, timeline=2)
    decisions.roll_back(tmp_path, to=10, reason="c")
    assert decisions.discover(tmp_path).steps == [10]
    assert decisions.read(tmp_path).timeline == 3


def test_a_step_with_a_damaged_record_is_left_for_the_restore_to_judge(tmp_path):
    _make_steps(tmp_path, 10, 20, 30)
    (tmp_path / "30" / layout.RUN_ITEM / run_record.RECORD_FILE).write_text("{")
    decisions.roll_back(tmp_path, to=10, reason="a")
    assert decisions.discover(tmp_path).steps == [10, 30]


def test_only_a_step_that_is_there(tmp_path):
    _make_steps(tmp_path, 10, 20)
    for act in (
        lambda: decisions.roll_back(tmp_path, to=15, reason="a"),
        lambda: decisions.pin(tmp_path, 15, reason="a"),
    ):
        with pytest.raises(records.FaultError, match=r"step 15 .* there: 10, 20"):
            act()
    with pytest.raises(ValueError, match="window"):
        decisions.roll_back(tmp_path, to=10, reason="a", skip=(5, 5))
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_pins(tmp_path):
    _make_steps(tmp_path, 10, 20)
    decisions.pin(tmp_path, 10, reason="the paper")
    decisions.pin(tmp_path, 20, reason="the demo")
    assert decisions.read(tmp_path).pinned == {10, 20}
    assert decisions.read(tmp_path).timeline == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "newer", "kind", "list"])
def test_a_decision_that_cannot_be_understood_stops_everything(tmp_path, damage):
    """To pass over it could bring back what was rolled back."""
    _make_steps(tmp_path, 10, 20)
    decisions.roll_back(tmp_path, to=10, reason="a")
    path = tmp_path / "decisions" / "1.json"
    text = path.read_text()
    if damage == "kind":
        body = json.loads(text) | {"kind": "other"}
        body["sha256"] = decisions._digest({k: body[k] for k in body if k != "sha256"})
        text = json.dumps(body)
    text = {
        "flip": text.replace('"to": 10', '"to": 11'),
        "cut": text[:-20],
        "empty": "",
        "newer": text.replace('"version": 1', '"version": 2'),
        "kind": text,
        "list": "[]",
    }[damage]
    path.write_text(text)
    with pytest.raises(records.FaultError) as error:
        decisions.discover(tmp_path)
    assert error.value.fault.kind is records.FaultKind.CONFIG
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


ROLL_BACK = """
import sys
from jaxft.checkpoint import decisions
decisions.roll_back(sys.argv[1], to=10, reason="drill")
"""
_CALLS = "fsync,link,rename"


def _roll_back(root, *trace):
    command = ["strace", "-f", "-qq", *trace, sys.executable, "-c", ROLL_BACK]
    return subprocess.run(
        [*command, str(root)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_killed_between_any_two_acts_of_a_rollback(tmp_path):
    """Either nothing has changed, or the next start sees the whole rollback."""
    base = tmp_path / "base"
    _make_steps(base, 10, 20, 30)
    shutil.copytree(base, tmp_path / "count")
    log = tmp_path / "log"
    done = _roll_back(tmp_path / "count", "-o", str(log), "-e", f"trace={_CALLS}")
    if done.returncode:
        pytest.skip(f"strace does not work here: {done.stderr[-200:]}")
    calls = collections.Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.M))
    assert (calls["link"], calls["rename"]) == (1, 2)
    assert calls["fsync"] >= 4
    seen = []
    for call, number in calls.items():
        for k in range(1, number + 1):
            root = tmp_path / f"{call}-{k}"
            shutil.copytree(base, root)
            inject = f"inject={call}:signal=SIGKILL:when={k}"
            done = _roll_back(root, "-e", f"trace={call}", "-e", inject)
            assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
            is_decided = bool(decisions.read(root).rollbacks)
            seen.append(is_decided)
            want = [10] if is_decided else [10, 20, 30]
            assert decisions.discover(root).steps == want
            decisions.finish(root)
            assert layout.discover(root).steps == want
            # And once more: it goes through, whatever lies about.
            decisions.roll_back(root, to=10, reason="again")
            assert layout.discover(root).steps == [10]
    assert {True, False} == set(seen)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("call", ["link", "rename"])
def test_a_rollback_that_fails_says_what_it_left(tmp_path, call):
    """A link makes it count, a rename takes the step out."""
    _make_steps(tmp_path, 10, 20)
    inject = f"inject={call}:error=ENOSPC:when=1"
    done = _roll_back(tmp_path, "-e", f"trace={call}", "-e", inject)
    if done.returncode != 1:
        pytest.skip(f"strace does not work here: {done.stderr[-200:]}")
    line = done.stderr.splitlines()[-1]
    assert "No space left on device" in line
    if call == "link":
        assert "; nothing was changed" in line
        assert str(tmp_path / "decisions") in line
        assert os.listdir(tmp_path / "decisions") == []
        assert decisions.discover(tmp_path).steps == [10, 20]
        return
    assert "; it is rolled back; the next start renames what is left" in line
    assert str(tmp_path / "20") in line
    assert decisions.discover(tmp_path).steps == [10]
    decisions.finish(tmp_path)
    assert layout.discover(tmp_path).steps == [10]
