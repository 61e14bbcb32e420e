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
    assert (parsed.role, parsed.workdir) == ("work", "/tmp/x")


def test_who_this_is_may_be_said() -> None:
    parsed = parse(command())
    given = (parsed.num_processes, parsed.process_index, parsed.coordinator)
    assert given == (None, None, "")
    words = ("--num_processes=4", "--process_index=0", "--coordinator=n1:8476")
    parsed = parse(command(*words))
    given = (parsed.num_processes, parsed.process_index, parsed.coordinator)
    assert given == (4, 0, "n1:8476")


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
        (["--config.model.width=abc"], "width: must be a whole number, is 'abc'"),
        (["--config.model.width", "abc"], "width: must be a whole number, is 'abc'"),
        (["--config.model.width=1.5"], "width: must be a whole number, is '1.5'"),
        (["--config.model.width=1\n2"], "width: must be a whole number, is '1.n2'"),
        (["--config.optimizer.b1=x: y"], "b1: must be a number, is 'x: y'"),
        (["--config.optimizer.schedule=linear"], "schedule: .*constant, cosine, is"),
        (["--config.model.tied_head=maybe"], "tied_head: .*true or false"),
        (["--config.model=3"], "config.model: this is a section"),
        (["--config.model=build"], "config.model: this is a section"),
        (["--config.model.options={}"], "config.model.options: this is a section"),
        (["--config.model.width"], "config.model.width: a value is missing"),
        (["--config.model.width.x=1"], "config.model.width.x: this is not a section"),
        (["--config.=1"], "there is no '' here"),
        (["--", "--config.model.wdth=3"], "did you mean 'width'"),
        (["--wokdir=/tmp/y"], "[Uu]nknown command line flag 'wokdir'.*workdir"),
        (["--role=boss"], "role.*supervise.work"),
        (["--num_processes=two"], "num_processes.*two"),
        (["stray"], "unexpected arguments: stray"),
        (["--", "stray"], "unexpected arguments: stray"),
        (["--config=other.py"], "--config is given twice: .*tiny_lm.py and other.py"),
        (["--config", "other.py"], "--config is given twice"),
        (["--workdir=/tmp/y"], "--workdir=/tmp/y: already defined as /tmp/x"),
    ],
)
def test_misuse_is_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        parse(command(*words))
    assert "\n" not in str(error.value)


GOOD = ["--config.model.width=64", "--config.train.seed=1"]


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ("--config.model.width=abc", "model.width"),
        ("--config.model.widt=64", "model.widt"),
        ("--config.model=3", "model"),
        ("--config.train.seed=y", "train.seed"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_wrong_word_is_blamed_wherever_it_stands(
    bad: str, path: str, place: int
) -> None:
    words = [*GOOD[:place], bad, *GOOD[place:]]
    with pytest.raises(ConfigError) as error:
        parse(command(*words))
    assert error.value.path == path


def test_of_two_good_values_the_last_one_counts() -> None:
    words = ["--config.model.width=64", "--config.model.width=65"]
    assert parse(command(*words)).config.model.width == 65


def test_the_order_of_flags_does_not_matter() -> None:
    words = ["main", "--config.model.width=64", "--workdir=/tmp/x", "--config", TINY]
    parsed = parse(words)
    assert parsed.config.model.width == 64
    assert parsed.argv == tuple(words)


IMPORT = "from jaxft.config import Config\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def get_config(:\n", r"own.py:1: SyntaxError: "),
        ("x = 1\0\n", r"own.py(:1)?: (SyntaxError|ValueError): source code"),
        ("import broken\n", r"own.py:1: SyntaxError: .*broken.py, line 2"),
        ("import no_such_module\n", r"own.py:1: ModuleNotFoundError"),
        ("open('/no/such/file')\n", r"own.py:1: FileNotFoundError"),
        ("x = 1\n", "does not define get_config"),
        ("get_config = 3\n", "does not define get_config"),
        ("def get_config():\n  return 1 / 0\n", r"own.py:2: ZeroDivisionError"),
        ("def get_config():\n  open('/no/file')\n", r"own.py:2: FileNotFoundError"),
        ("def get_config():\n  raise OSError\n", r"own.py:2: OSError$"),
        ("def get_config():\n  raise TypeError('a\\nb')\n", r"2: TypeError: a b$"),
        ("import sys\nsys.exit(4)\n", r"own.py:2: SystemExit: 4"),
        ("def get_config():\n  raise SystemExit\n", r"own.py:2: SystemExit$"),
        ("def get_config():\n  return {'a': 1}\n", "returned dict, not a jaxft.Config"),
        ("def get_config():\n  pass\n", "returned NoneType, not a jaxft.Config"),
        ("def get_config(x):\n  return 1\n", "'x'.*--config=FILE:ARGUMENT one string"),
        (
            f"{IMPORT}def get_config():\n  c = Config()\n  c.model.wdth = 3\n",
            "own.py:4: AttributeError: .*'wdth'",
        ),
        (
            f"{IMPORT}def get_config():\n  c = Config()\n  c.data = None\n  return c\n",
            "config.data: must be a DataConfig, is None",
        ),
        (
            f"{IMPORT}def get_config():\n  c = Config()\n  c.model.width = 'wide'\n"
            "  return c\n",
            "config.model.width: must be a whole number, is 'wide'",
        ),
    ],
)
def test_a_broken_config_file_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    file = tmp_path / "own.py"
    file.write_text(text)
    for words in ([], ["--config.data.seq_len=8", "--config.model.width=64"]):
        with pytest.raises(ConfigError, match=expected) as error:
            parse(command(*words, config=str(file)))
        assert "\n" not in str(error.value)
        assert "Traceback" not in str(error.value)


def test_an_argument_for_get_config(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        f"{IMPORT}def get_config(size):\n"
        "  c = Config()\n"
        "  c.model.width = int(size)\n"
        "  return c\n"
    )
    assert parse(command(config=f"{file}:64")).config.model.width == 64
    with pytest.raises(ConfigError, match=r"own.py:4: ValueError"):
        parse(command(config=f"{file}:"))
    with pytest.raises(ConfigError, match=r"too many positional arguments; .*ARGUMENT"):
        parse(command(config=f"{TINY}:64"))


def test_an_interrupt_in_the_config_file_stays_one(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n  raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        parse(command(config=str(file)))


def test_a_config_file_may_define_classes_and_postpone_annotations(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        f"import dataclasses\n{IMPORT}"
        "@dataclasses.dataclass\n"
        "class Size:\n"
        "  width: int = 64\n"
        "assert Size.__annotations__ == {'width': int}\n"
        "def get_config():\n"
        "  c = Config()\n"
        "  c.model.width = Size().width\n"
        "  return c\n"
    )
    assert parse(command(config=str(file))).config.model.width == 64
    file.write_text(
        f"from __future__ import annotations\n{file.read_text()}".replace(
            "{'width': int}", "{'width': 'int'}"
        )
    )
    assert parse(command(config=str(file))).config.model.width == 64


def test_options_of_every_kind_and_those_only_a_file_can_set(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        f"{IMPORT}def get_config():\n"
        "  c = Config()\n"
        "  c.model.options = {'k': 3, 'f': 1.5, 's': 'a', 'b': True, 't': (1, 2),\n"
        "    'n': None, 'l': [1], 'deep': {'x': 1}}\n"
        "  return c\n"
    )
    at = "--config.model.options"
    words = [f"{at}.k=4", f"{at}.f=2", f"{at}.s=b", f"{at}.b=false", f"{at}.t=(3,)"]
    options = parse(command(*words, f"{at}.deep.x=5", config=str(file))).config.model
    assert options.options.to_dict() == {
        "k": 4,
        "f": 2.0,
        "s": "b",
        "b": False,
        "t": (3,),
        "n": None,
        "l": [1],
        "deep": {"x": 5},
    }
    for word, expected in [
        (f"{at}.k=1.5", r"options\.k: must be a whole number, is '1.5'"),
        (f"{at}.l=[2]", r"options\.l: a list can only be set in the config file"),
        (f"{at}.n=2", r"options\.n: a NoneType can only be set in the config file"),
        (f"{at}.deep=2", r"options\.deep: this is a section"),
        (f"{at}.dep.x=2", r"does not declare this option; did you mean 'deep'"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            parse(command(word, config=str(file)))


@pytest.mark.parametrize("workdir", ["/", "//", "/tmp/..", "/."])
def test_a_file_system_is_no_workdir(workdir: str) -> None:
    with pytest.raises(ConfigError, match="a whole file system is no workdir"):
        parse(["main", f"--config={TINY}", f"--workdir={workdir}"])


def test_a_workdir_of_nobody() -> None:
    with pytest.raises(ConfigError, match="there is no such user"):
        parse(["main", f"--config={TINY}", "--workdir=~no-such-user/x"])


def test_parsing_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["other", "--config.model.wdth=3"])
    assert parse(command("--config.model.width=8")).config.model.width == 8
    assert sys.argv == ["other", "--config.model.wdth=3"]


def test_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        parse(command(config="/no/such/file.py"))
    with pytest.raises(ConfigError, match="--config=FILE is missing"):
        parse(["main", "--workdir=/tmp/x"])
    with pytest.raises(ConfigError, match="--workdir=FOLDER is missing"):
        parse(["main", f"--config={TINY}"])
