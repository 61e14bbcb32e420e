"""The live line on a terminal, plain lines elsewhere, silence on request."""

import contextlib
import fcntl
import io
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from jaxft.config import Progress
from jaxft.metrics.writers import ProgressLine, say


def shown(mode: Progress, *, num_updates: int = 5, secs: float = 1.0) -> str:
    stream = io.StringIO()
    now = 0.0
    line = ProgressLine(
        num_steps=100,
        unit="tokens",
        restarts=2,
        mode=mode,
        stream=stream,
        clock=lambda: now,
    )
    for step in range(1, num_updates + 1):
        now += secs
        line.update(step, loss=1.25, rate=1234.5, checkpoint=None)
    line.note("a note")
    line.close()
    return stream.getvalue()


def test_without_a_terminal_a_line_in_ten_seconds() -> None:
    text = shown(Progress.AUTO, num_updates=25)
    assert text.splitlines()[:2] == [
        "step 1/100  loss 1.2500  1,234 tokens/s  checkpoint none yet  restarts 2",
        "step 11/100  loss 1.2500  1,234 tokens/s  checkpoint none yet  restarts 2",
    ]
    assert len(text.splitlines()) == 4
    assert "\x1b" not in text


def test_the_last_step_is_always_shown() -> None:
    assert "step 100/100" in shown(Progress.AUTO, num_updates=100, secs=0.01)


def test_never_means_silence() -> None:
    assert shown(Progress.NEVER) == ""


class Terminal:
    """A pseudo terminal: what was written to it, and what it would show."""

    def __init__(self, num_columns: int = 0):
        self.reader, writer = pty.openpty()
        attributes = termios.tcgetattr(writer)
        attributes[1] &= ~termios.OPOST  # As written.
        termios.tcsetattr(writer, termios.TCSANOW, attributes)
        fcntl.ioctl(
            writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0)
        )
        self.stream = os.fdopen(writer, "w")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stream.close()
        os.close(self.reader)

    def written(self) -> str:
        data = b""
        # The kernel hands it on in its own time.
        while select.select([self.reader], [], [], 0.05)[0]:
            data += os.read(self.reader, 1 << 16)
        return data.decode()

    def rows(self) -> list[str]:
        rows = [row.split("\r")[-1] for row in self.written().split("\n")]
        return [row.removeprefix("\x1b[K") for row in rows]


@pytest.fixture(autouse=True)
def _a_usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def update(line: ProgressLine, step: int) -> None:
    line.update(step, loss=2.0, rate=10.0, checkpoint=0)


def test_on_a_terminal_one_line_is_redrawn() -> None:
    now = 0.0
    with Terminal() as terminal:
        line = ProgressLine(
            num_steps=99, unit="rows", stream=terminal.stream, clock=lambda: now
        )
        assert terminal.written() == "", "nothing is drawn before the first update"
        for step in range(1, 4):
            now += 1.0
            update(line, step)
        assert terminal.rows() == [
            "step 3/99  loss 2.0000  10 rows/s  checkpoint step 0  restarts 0"
        ]
        line.note("a note")
        assert terminal.rows() == ["a note", ""]
        now += 1.0
        update(line, 4)
        line.close()
        assert terminal.rows() == [""]


def test_the_state_of_the_terminal_is_never_changed() -> None:
    """A killed process puts nothing back: only clearing a line is allowed."""
    with Terminal() as terminal:
        line = ProgressLine(num_steps=9, unit="rows", stream=terminal.stream)
        update(line, 1)
        line.note("a note")
        update(line, 9)
        line.close()
        controls = re.findall(r"\x1b.[^A-Za-z]*[A-Za-z]?", terminal.written())
        assert set(controls) == {"\x1b[K"}


@pytest.mark.parametrize("num_columns", [1, 20, 40, 200])
def test_a_narrow_terminal_shows_one_row(num_columns: int) -> None:
    with Terminal(num_columns) as terminal:
        line = ProgressLine(num_steps=9, unit="rows", stream=terminal.stream)
        update(line, 1)
        (row,) = terminal.rows()
        assert row == row[: num_columns - 1]
        assert num_columns < 20 or row.startswith("step 1/9")


@pytest.mark.parametrize("term", ["dumb", "", None])
def test_a_dumb_terminal_gets_plain_lines(
    term: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if term is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", term)
    with Terminal() as terminal:
        line = ProgressLine(num_steps=9, unit="rows", stream=terminal.stream)
        update(line, 1)
        say("a word", stream=terminal.stream)
        line.close()
        text = terminal.written()
        assert "\x1b" not in text
        assert "\r" not in text
        assert len(text.splitlines()) == 2


def test_never_means_silence_on_a_terminal_too() -> None:
    with Terminal() as terminal:
        line = ProgressLine(
            num_steps=9, unit="rows", stream=terminal.stream, mode=Progress.NEVER
        )
        update(line, 9)
        line.note("a note")
        line.close()
        assert terminal.written() == ""


PRINTS = """
import logging, sys, warnings
from jaxft.metrics.writers import ProgressLine, say, tolerate_lost_output
tolerate_lost_output()
for stream in (sys.stdout, sys.stderr):
    say("said", stream=stream)
    print("printed " * 5000, file=stream, flush=True)
    print("not flushed", file=stream)
logging.warning("logged")
warnings.warn("warned")
ProgressLine(num_steps=1, unit="rows").update(1, loss=0.0, rate=1.0, checkpoint=None)
"""


@pytest.mark.parametrize(
    "where",
    [
        *("| true", "2>&1 | true", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"),
        *(">&-", "2>&-", "<&- >&- 2>&-"),
    ],
)
def test_output_that_nobody_can_take_raises_nothing(where: str) -> None:
    script = f'set -o pipefail; "$0" -S -c "$1" {where}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, PRINTS],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_output_that_is_taken_is_whole(tmp_path: pathlib.Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    with out.open("a") as out_file, err.open("w") as err_file:
        subprocess.run(
            [sys.executable, "-S", "-c", PRINTS],
            stdout=out_file,
            stderr=err_file,
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    printed = "printed " * 5000
    assert out.read_text() == f"before\nsaid\n{printed}\nnot flushed\n"
    assert err.read_text().startswith(f"said\n{printed}\nnot flushed\n")
    assert "step 1/1" in err.read_text()


def test_a_stream_that_is_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    line = ProgressLine(num_steps=9, unit="rows")
    update(line, 1)
    line.note("a note")
    line.close()
    say("said", stream=None)


def test_a_stream_that_nobody_reads_ends_no_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    line = ProgressLine(num_steps=9, unit="rows", stream=stream)
    update(line, 1)
    line.note("a note")
    line.close()
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    line.note("and closed")
    say("closed", stream=stream)
