"""Curves for TensorBoard: what `step` and `evaluation` events say, as they happen.

World: host-only. Floor: a peer of `data` and `checkpoint`. Read
`jaxft/metrics/meters.py` before and `jaxft/worker.py`, its user, after it. An extra:
`pip install 'jaxft[tensorboard]'`.

Whoever looks at curves must never stop what they are of. Points are handed to a thread
of our own and written there; where the disk is full, slow or gone, they are lost, and
that is told once. A file is only appended to; after an error a new one is begun. (The
writer that the package itself offers waits for ever once its thread has seen an error.)

A step that is done again after a restart or a rollback must not show twice: each file
begins by taking back all points of earlier files from its first step on. For that the
files of a folder are read in the order of their names, which begin with a time; it is
made later than that of all others, whatever the clock says.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from jaxft.events import Clock
from jaxft.metrics.meters import steps_per_sec
from jaxft.records import Emit, first_line
from jaxft.settings import ConfigError

_FIELD = "log.tensorboard"
_MAX_WAITING = 4096
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def folder_of(text: str, *, workdir: pathlib.Path) -> pathlib.Path | None:
    """What `log.tensorboard` means; None for no curves.

    Raises:
        ConfigError: that is no place for curves, or tensorboardX is missing.
    """
    if (word := text.strip()).lower() in ("", "false"):
        return None
    if "://" in word:
        raise ConfigError(_FIELD, f"must be a local folder, is {word}")
    try:
        import tensorboardX.record_writer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            _FIELD, f"{first_line(error)}: pip install 'jaxft[tensorboard]'"
        ) from error
    except Exception as error:
        raise ConfigError(
            _FIELD, f"tensorboardX cannot be used: {first_line(error)}"
        ) from error
    if word.lower() == "true":
        return workdir / "tensorboard"
    return pathlib.Path(word).expanduser()


class TensorBoard:
    """An `Emit` that also draws; close it at the end.

    Args:
        folder: where the files go; made when there is a first point.
        emit: is given every event as it is, before anything is drawn.
        first_step: points of earlier files from here on are taken back.
        warn: told once, in a line, when points are lost.
        clock: seconds since the epoch.

    Attributes:
        num_lost: points that are in no file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        emit: Emit,
        first_step: int = 0,
        warn: Callable[[str], None] = logging.warning,
        clock: Clock = time.time,
    ):
        self.num_lost = 0
        self._folder = pathlib.Path(folder)
        self._emit = emit
        self._warn = warn
        self._clock = clock
        self._has_warned = False
        self._waiting: queue.Queue[_Point | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        # Of the thread alone, from here on.
        self._next_step = first_step
        self._writer: Any = None
        self._num_unwritten = 0

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Hands the event on, and draws what can be drawn of it."""
        self._emit(kind, **fields)
        draw = _DRAWN.get(kind)
        if draw is None:
            return
        values = draw(fields)
        point = _Point(self._clock(), fields["step"], fields.get("first_step"), values)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="jaxft-tensorboard", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait(point)
        except queue.Full:
            self._lose("the disk takes them too slowly")

    def close(self, timeout_secs: float = 2.0) -> None:
        """Lets what waits be written, for at most so long."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_secs)
        self._thread = None

    def _write_all(self) -> None:
        while (point := self._waiting.get()) is not None:
            self._num_unwritten += 1
            try:
                self._write(point)
                if self._waiting.empty():
                    self._flush()
            except Exception as error:
                self._give_up(error)
        try:
            self._close_file()
        except Exception as error:
            self._give_up(error)

    def _write(self, point: _Point) -> None:
        events, summaries = _proto("event"), _proto("summary")
        first = point.step if point.first_step is None else point.first_step
        # The output of the step before an evaluation is read after that.
        goes_back = first < self._next_step - 1
        if self._writer is None or goes_back:
            self._close_file()
            begin = first if goes_back else self._next_step
            self._begin_file(begin, secs=point.secs)
        values = [
            summaries.Summary.Value(tag=tag, simple_value=value)
            for tag, value in point.values.items()
        ]
        self._append(
            events.Event(
                wall_time=point.secs,
                step=point.step,
                summary=summaries.Summary(value=values),
            )
        )
        self._next_step = point.step + 1

    def _begin_file(self, first_step: int, *, secs: float) -> None:
        from tensorboardX.record_writer import RecordWriter

        events = _proto("event")
        self._folder.mkdir(parents=True, exist_ok=True)
        found = map(_NAME.match, os.listdir(self._folder))
        newest = max((int(match[1]) for match in found if match), default=-1)
        number = max(int(secs), newest + 1)
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(str(self._folder / name))
        self._append(events.Event(wall_time=secs, file_version="brain.Event:2"))
        begin = events.SessionLog(status=events.SessionLog.START)
        self._append(events.Event(wall_time=secs, step=first_step, session_log=begin))

    def _append(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _flush(self) -> None:
        self._writer.flush()
        self._num_unwritten = 0

    def _close_file(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    def _give_up(self, error: Exception) -> None:
        """A file that ends in the middle of a point is not gone on with."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):
            writer.close()
        num_lost, self._num_unwritten = self._num_unwritten, 0
        self._lose(first_line(error), num_lost)

    def _lose(self, reason: str, num_lost: int = 1) -> None:
        self.num_lost += num_lost
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"points for TensorBoard are lost in {self._folder}: {reason}")


class _Point:
    """Values at one step."""

    def __init__(
        self, secs: float, step: int, first_step: int | None, values: dict[str, float]
    ):
        self.secs, self.step, self.first_step = secs, step, first_step
        self.values = values


def _proto(name: str) -> Any:
    """Generated code, in which no type checker finds anything."""
    return importlib.import_module(f"tensorboardX.proto.{name}_pb2")


def _of_step(fields: Mapping[str, Any]) -> dict[str, float]:
    secs = fields["secs"]
    values = {f"train/{name}": value for name, value in fields["metrics"].items()}
    values["train/num_skipped"] = fields["num_skipped"]
    values["speed/steps_per_sec"] = steps_per_sec(fields)
    values["speed/input_share"] = fields["data_secs"] / secs if secs > 0 else 0.0
    return values


def _of_evaluation(fields: Mapping[str, Any]) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in fields["metrics"].items()}


_DRAWN = {"step": _of_step, "evaluation": _of_evaluation}
