"""Curves: read back as TensorBoard reads them; broken disks cost only points."""

from __future__ import annotations

import builtins
import math
import os
import pathlib
from typing import Any

import pytest
from tensorboardX import record_writer

from jaxft.config import ConfigError
from jaxft.metrics.tensorboard import TensorBoard, folder_of
from jaxft.records import ignore_event


def step(board: TensorBoard, last: int, *, first: int | None = None) -> None:
    board(
        "step",
        step=last,
        first_step=last if first is None else first,
        secs=2.0,
        data_secs=0.5,
        num_skipped=1,
        metrics={"loss": 10.0 - last},
    )


def test_steps_and_evaluations_are_drawn(
    tmp_path: pathlib.Path, read_curves: Any
) -> None:
    seen: list[str] = []
    board = TensorBoard(
        tmp_path / "deep" / "er", emit=lambda kind, **_: seen.append(kind)
    )
    board("phase", name="train")
    assert list(tmp_path.iterdir()) == []
    step(board, 1)
    step(board, 5, first=2)
    board("evaluation", step=6, metrics={"loss": math.inf}, secs=1.0)
    step(board, 6)
    board.close(30.0)
    assert seen == ["phase", "step", "step", "evaluation", "step"]
    assert read_curves(tmp_path / "deep" / "er") == {
        "train/loss": [(1, 9.0), (5, 5.0), (6, 4.0)],
        "train/num_skipped": [(1, 1.0), (5, 1.0), (6, 1.0)],
        "speed/steps_per_sec": [(1, 0.5), (5, 2.0), (6, 0.5)],
        "speed/input_share": [(1, 0.25), (5, 0.25), (6, 0.25)],
        "eval/loss": [(6, math.inf)],
    }
    assert board.num_lost == 0


@pytest.mark.parametrize("later", [50.0, 0.0, -3600.0])
def test_a_step_that_is_done_again_shows_once(
    tmp_path: pathlib.Path, read_curves: Any, later: float
) -> None:
    """Whatever the clock says after the restart."""
    for restored, clock in ((-1, 1000.0), (4, 1000.0 + later), (4, 1000.0 + later)):
        board = TensorBoard(
            tmp_path,
            emit=ignore_event,
            first_step=restored + 1,
            clock=lambda clock=clock: clock,
        )
        for number in range(max(restored, 0) + 1, 8):
            step(board, number)
        board.close(30.0)
    assert len(list(tmp_path.iterdir())) == 3
    assert [p[0] for p in read_curves(tmp_path)["train/loss"]] == list(range(1, 8))


def test_a_rollback_in_place_takes_points_back(
    tmp_path: pathlib.Path, read_curves: Any
) -> None:
    board = TensorBoard(tmp_path, emit=ignore_event)
    for number in (1, 2, 3, 4, 2, 3):
        step(board, number)
    board.close(30.0)
    assert [p[0] for p in read_curves(tmp_path)["train/loss"]] == [1, 2, 3]


def test_a_full_disk_costs_points_and_nothing_else(
    tmp_path: pathlib.Path, read_curves: Any, mount_disk: Any
) -> None:
    disk = mount_disk(tmp_path / "disk", "64k")
    blocker = disk / "blocker"
    blocker.write_bytes(b"x" * 60_000)
    told: list[str] = []
    board = TensorBoard(disk, emit=ignore_event, warn=told.append)
    for number in range(1, 60):
        step(board, number)
    board.close(30.0)
    assert board.num_lost > 0
    (text,) = told
    assert text.startswith(f"points for TensorBoard are lost in {disk}: ")
    # What is mended is used again.
    blocker.unlink()
    step(board, 60)
    board.close(30.0)
    newest = read_curves(max(disk.iterdir()))
    assert newest["train/loss"] == [(60, -50.0)]


def test_a_folder_that_cannot_be_costs_points(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    board = TensorBoard(tmp_path / "file", emit=ignore_event, warn=told.append)
    step(board, 1)
    step(board, 2)
    board.close(30.0)
    assert (board.num_lost, len(told)) == (2, 1)


class Fifo:
    """A kind of storage, as tensorboardX has them: opening it waits for a reader."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        os.mkfifo(path)

    def open(self, _: str) -> Any:
        return self.path.open("wb")


def test_a_disk_that_never_answers_holds_nobody_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = Fifo(tmp_path / "fifo")
    monkeypatch.setitem(record_writer.REGISTERED_FACTORIES, "slow", fifo)
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    board = TensorBoard("slow:curves", emit=ignore_event, warn=told.append)
    for number in range(1, 6000):
        step(board, number)
    board.close(0.1)
    assert board.num_lost >= 6000 - 1 - 4096 - 2
    (text,) = told
    assert text.endswith("are lost in slow:curves: the disk takes them too slowly")
    fifo.path.read_bytes()  # The thread can end.


def test_what_the_setting_means(tmp_path: pathlib.Path) -> None:
    assert folder_of("", workdir=tmp_path) is None
    assert folder_of("false", workdir=tmp_path) is None
    assert folder_of(" True", workdir=tmp_path) == tmp_path / "tensorboard"
    assert folder_of("~/tb", workdir=tmp_path) == pathlib.Path.home() / "tb"
    with pytest.raises(ConfigError, match=r"log\.tensorboard: must be a local folder"):
        folder_of("gs://bucket", workdir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_such(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tensorboardX"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_such)
    with pytest.raises(ConfigError, match=r"pip install 'jaxft\[tensorboard\]'"):
        folder_of("true", workdir=tmp_path)
    assert folder_of("", workdir=tmp_path) is None
