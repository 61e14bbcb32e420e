"""The live line on a terminal, plain lines elsewhere, silence on request."""

import io
import os
import pty

import pytest

from jaxft.config import Progress
from jaxft.metrics.writers import ProgressLine


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


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        line = ProgressLine(num_steps=9, unit="rows", stream=stream)
        line.update(1, loss=2.0, rate=10.0, checkpoint=0)
        line.close()
        stream.flush()
        text = os.read(reader, 65536).decode()
    os.close(reader)
    assert "step 1/9  loss 2.0000" in text
    assert "checkpoint step 0" in text
    assert "\x1b[" in text
