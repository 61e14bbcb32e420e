"""Every misuse of the command line is one line that names what is wrong."""

import pathlib
import sys

import pytest

from jaxft.command import parse
from jaxft.config import ConfigError, Corpus

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny_lm.py")


def command(*words: str, config: str = TINY) -> list[str]:
    return ["main", f"--config={config}", "--workdir=/tmp/x", *words]


def test_overrides_of_every_type() -> None:
    parsed = parse(
        command(
            "--config.model.width=64",
            "--config.optimizer.learning_rate=1",
            "--config.model.tied_head=false",
            "--config.data.corpus=synthetic",
            "--config.checkpoint.save=steps(5) | secs(10)",
            "--role=work",
        )
    )
    config = parsed.config
    assert (config.model.width, config.model.tied_head) == (64, False)
    assert config.optimizer.learning_rate == 1.0
    assert config.data.corpus is Corpus.SYNTHETIC
    assert config.checkpoint.save == "steps(5) | secs(10)"
    assert (parsed.role, parsed.attempt, parsed.workdir) == ("work", 0, "/tmp/x")


def test_options_of_ones_own_are_declared_in_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from jaxft.config import Config\n"
        "def get_config():\n"
        "  config = Config()\n"
        "  config.model.options.hidden = 3\n"
        "  return config\n"
    )
    parsed = parse(command("--config.model.options.hidden=7", config=str(file)))
    assert parsed.config.model.options.hidden == 7
    with pytest.raises(ConfigError, match="does not declare this option"):
        parse(command("--config.model.options.depth=7", config=str(file)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--config.model.wdth=3"], "config.model.wdth: .*did you mean 'width'"),
        (["--config.modl.width=3"], "config.modl.width: .*did you mean 'model'"),
        (["--config.model.width=abc"], "config.model.width: cannot be 'abc'"),
        (["--config.model.width=1.5"], "config.model.width: cannot be '1.5'"),
        (["--config.optimizer.schedule=linear"], "schedule: .*constant.cosine"),
        (["--config.model.tied_head=maybe"], "tied_head: .*true or false"),
        (["--config.model=3"], "config.model: this is a section"),
        (["--config.model.width"], "config.model.width: .*"),
        (["--config.model.width.x=1"], "config.model.width.x: this is not a section"),
        (["--wokdir=/tmp/y"], "[Uu]nknown command line flag 'wokdir'.*workdir"),
        (["--role=boss"], "role.*supervise.work"),
        (["stray"], "unexpected arguments: stray"),
        (["--attempt=x"], "attempt"),
    ],
)
def test_misuse_is_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        parse(command(*words))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def get_config(:\n", r"own.py:1: SyntaxError"),
        ("import no_such_module\n", r"own.py:1: ModuleNotFoundError"),
        ("x = 1\n", "does not define get_config"),
        ("def get_config():\n  return 1 / 0\n", r"own.py:2: ZeroDivisionError"),
        ("def get_config():\n  return {'a': 1}\n", "returned dict, not a jaxft.Config"),
        ("def get_config(x):\n  return 1\n", "TypeError"),
    ],
)
def test_a_broken_config_file_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    # A command parses once; here an earlier test's module must not shine through.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected) as error:
        parse(command(config=str(file)))
    assert "\n" not in str(error.value)


def test_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        parse(command(config="/no/such/file.py"))
    with pytest.raises(ConfigError, match="--config=FILE is missing"):
        parse(["main", "--workdir=/tmp/x"])
    with pytest.raises(ConfigError, match="--workdir=FOLDER is missing"):
        parse(["main", f"--config={TINY}"])
