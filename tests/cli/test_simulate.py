"""`simulate` as a command: what it knows, what it asks for, what it says."""

import json
import pathlib

import pytest

from jaxft import events
from jaxft.cli import __main__ as cli

_GIVEN = (
    *("--mtbf-hours", "2", "--step-secs", "1", "--blocking-secs", "2"),
    *("--write-secs", "10", "--slowdown", "0.1", "--restart-secs", "60"),
    *("--num-seeds", "20"),
)


@pytest.fixture
def run(capsys):
    def call(*words):
        capsys.readouterr()
        code = cli.main(["simulate", *map(str, words)])
        said = capsys.readouterr()
        assert said.err.count("\n") <= 1, said.err
        return code, said.out, said.err

    return call


def _json(run, *words):
    code, out, _ = run(*words, "--json")
    assert code == 0
    return json.loads(out)


def test_each_policy_has_a_row_and_all_of_the_time(run):
    saves = ("auto", "secs(20)", "steps(5000)", "auto | steps(100)")
    found = _json(run, *_GIVEN, "--save", *saves)
    rows = {row["save"]: row for row in found["policies"]}
    assert tuple(rows) == saves
    for row in rows.values():
        parts = row["goodput"] + row["lost"] + row["saving"] + row["restarting"]
        assert parts == pytest.approx(1.0)
        low, middle, high = row["goodput_quantiles"].values()
        assert low <= middle <= high
        assert low <= row["goodput"] <= high
        assert row["num_failures"] == pytest.approx(200, rel=0.1)
    assert rows["auto"]["goodput"] > rows["secs(20)"]["goodput"]
    assert rows["auto"]["goodput"] > rows["steps(5000)"]["goodput"]
    assert rows["auto | steps(100)"]["every_secs"] == 100.0
    # The same histories for all, and the same ones again.
    assert len({row["num_failures"] for row in rows.values()}) == 1
    assert _json(run, *_GIVEN, "--save", *saves) == found


def test_hosts_share_the_time_between_failures(run):
    many = _json(run, *_GIVEN, "--hosts", 4, "--days", 1, "--save", "auto")
    assert many["job_mtbf_secs"] == 1800.0
    assert many["policies"][0]["num_failures"] == pytest.approx(48, rel=0.15)
    old = _json(run, *_GIVEN, "--hosts", 4, "--days", 0.1, "--weibull-shape", 0.5)
    young = _json(run, *_GIVEN, "--hosts", 4, "--days", 0.1)
    shaped = old["policies"][0]["num_failures"]
    assert shaped > 1.3 * young["policies"][0]["num_failures"]


def test_the_table_is_for_people(run):
    code, out, _ = run(*_GIVEN)
    assert code == 0
    assert "a failure every 7200 s" in out
    assert [line.split()[0] for line in out.splitlines()[2:]] == [
        *("save", "auto", "secs(60)", "secs(600)", "secs(3600)"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give --mtbf-hours, --step-secs, --blocking-secs, --restart-secs"),
        (("--mtbf-hours", "x"), "'x' is no positive number"),
        (("--hosts", "0"), "'0' is no whole number of at least 1"),
        ((*_GIVEN, "--save", "often"), "--save: 'often' is no policy"),
        ((*_GIVEN, "--days", "1e9"), "too many to draw"),
    ],
)
def test_what_is_wrong_is_one_line(run, words, says):
    code, out, err = run(*words)
    assert code == 78
    assert says in err
    assert not out


def test_a_history_gives_what_is_not_given(run, tmp_path: pathlib.Path):
    now = [1e9]
    log = events.EventLog(tmp_path / "events", role="work", clock=lambda: now[0])
    log.open()
    fields = {"data_secs": 0.0, "metrics": {}, "num_skipped": 0, "num_linked": 0}
    for first in range(1, 101, 10):
        now[0] += 2.0
        log("step", step=first + 9, first_step=first, secs=2.0, **fields)
    log("interval", **dict.fromkeys(events.KINDS["interval"], 0.5))
    code, _, err = run("--workdir", tmp_path)
    assert code == 78
    assert "give --restart-secs: the history in" in err
    found = _json(run, "--workdir", tmp_path, "--restart-secs", 9, "--write-secs", 3)
    assert found["step_secs"] == pytest.approx(0.2)
    assert found["blocking_secs"] == 0.5
    assert found["write_secs"] == 3.0
    assert found["job_mtbf_secs"] == pytest.approx(86_400, rel=0.01)
    code, _, err = run("--workdir", tmp_path / "none")
    assert code == 66
    assert "no such folder" in err
