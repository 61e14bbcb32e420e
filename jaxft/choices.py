"""The choices that settings have: each a closed set of words.

World: host-only. Floor: the lowest, beside `settings`. Read `jaxft/config.py`, which
uses them and whose names they are, too, after this file.
"""

from __future__ import annotations

import enum


class Schedule(enum.Enum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Corpus(enum.Enum):
    """Where the built-in data factory takes its tokens from."""

    STDLIB = "stdlib"
    TEXT = "text"
    NPY = "npy"
    SYNTHETIC = "synthetic"


class ResumeMode(enum.Enum):
    """What a start does with the checkpoints it finds."""

    AUTO = "auto"
    REQUIRED = "required"
    NEVER = "never"


class ArrayLayout(enum.Enum):
    """How the arrays of a checkpoint lie on disk."""

    AUTO = "auto"
    FILES = "files"
    OCDBT = "ocdbt"


class Codec(enum.Enum):
    """How the chunks of a checkpoint's arrays are compressed."""

    RAW = "raw"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Verify(enum.Enum):
    """How much of a checkpoint is proven when it is restored."""

    FULL = "full"
    SAMPLE = "sample"
    OFF = "off"


class Spare(enum.Enum):
    """When the supervisor keeps a worker in waiting."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Progress(enum.Enum):
    """When the live progress line is drawn."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
