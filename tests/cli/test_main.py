"""The toolbox as a command: usage, exit codes, one line for every error."""

import os
import pathlib
import pty
import subprocess
import sys

import pytest

COMMANDS = ("ls", "show", "verify", "diff", "export", "prune", "rollback", "pin")
ROOT = pathlib.Path(__file__).parents[2]


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "jaxft.cli", "ckpt", *map(str, words)]


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND"),
        (("bogus",), "invalid choice: 'bogus'"),
        (("ls",), "required: ROOT"),
        (("ls", "s3://bucket/run"), "is not a local folder"),
        (("ls", ""), "is not a local folder"),
        (("ls", __file__), "is not a folder"),
        (("ls", "/", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("rollback", "/", "--to", "x", "--reason", "y"), "'x' is no step"),
        (("rollback", "/", "--to", "1"), "required: --reason"),
        (("rollback", "/", "--to", "1", "--skip", "5:5"), "'5:5' is no window"),
        (("rollback", "/", "--to", "1", "--skip", "7"), "'7' is no window"),
        (("rollback", "/", "--to", "1", "--skip", "-1:7"), "expected one argument"),
        (("pin", "/", "x", "--reason", "y"), "'x' is no step"),
        (("pin", "/", "1"), "required: --reason"),
        (("prune", "/"), "name what may go"),
    ],
)
def test_wrong_usage_is_one_line_and_78(ckpt, words, message):
    code, out, err = ckpt(*words)
    assert (code, out) == (78, "")
    assert err.startswith("jaxft: ")
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "{}"),
        ("show", "{}"),
        ("verify", "{}"),
        ("diff", "{}", "{}"),
        ("export", "{}", "out.npz"),
        ("prune", "{}", "--unfinished"),
        ("rollback", "{}", "--to", "1", "--reason", "why"),
        ("pin", "{}", "1", "--reason", "why"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_not_there_is_66(ckpt, tmp_path, words):
    nowhere = tmp_path / "nowhere"
    code, out, err = ckpt(*(word.format(nowhere) for word in words))
    assert (code, out) == (66, "")
    assert err == f"jaxft: {nowhere}: there is no such folder\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_helps(ckpt, capsys, name):
    with pytest.raises(SystemExit) as caught:
        ckpt(name, "--help")
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_place_is_a_step_a_root_or_a_workdir(ckpt, root):
    by_step = ckpt("show", root / "30")
    assert by_step[0] == 0
    assert ckpt("show", root) == by_step
    assert ckpt("show", root.parent) == by_step
    code, _, err = ckpt("ls", root / "30")
    assert code == 78
    assert "is a step: give the root that holds it" in err


def test_it_loads_no_jax(root):
    code = (
        "import sys; from jaxft.cli.__main__ import main; "
        f"assert main(['ckpt', 'verify', {str(root)!r}]) == 0; "
        f"assert main(['ckpt', 'show', {str(root)!r}]) == 0; "
        "sys.exit(any(name in sys.modules for name in "
        "('jax', 'flax', 'optax', 'orbax', 'grain')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=_env(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_a_reader_who_has_seen_enough_is_no_error(root):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        _command("ls", root), env=_env(), stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (0, b"")


def test_progress_is_for_terminals_and_goes_away(root):
    quiet = subprocess.run(_command("verify", root), env=_env(), capture_output=True)
    assert (quiet.returncode, quiet.stderr) == (0, b"")
    parent, child = pty.openpty()
    loud = subprocess.run(
        _command("verify", root), env=_env(), stdout=subprocess.DEVNULL, stderr=child
    )
    os.close(child)
    said = os.read(parent, 10_000).decode()
    os.close(parent)
    assert loud.returncode == 0
    assert f"verifying {root / '10'}: " in said
    assert said.endswith("\r\x1b[K")


def test_names_that_a_terminal_does_not_know_are_printed(tmp_path, handmade):
    import numpy as np

    name = "m\u00fc"
    handmade.make_step(tmp_path, 1, {name: np.zeros(2, np.float32)})
    result = subprocess.run(
        _command("show", tmp_path),
        env=_env() | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"m\\xfc" in result.stdout
