"""The same run on fewer processes: what its config must say there.

World: host-only. Floor: recovery. Read `jaxft/config.py` before and `jaxft/main.py`,
which hands the result to a worker, after this file.

The global batch stays as it is. A process that has more of it than it was meant to
computes it in more parts, so that no device has to hold more at a time.
"""

from __future__ import annotations

import copy

from jaxft.config import Config, ConfigError

# What differs between the shapes of one elastic run; nothing else may.
_MAY_DIFFER = (
    "num_processes",
    "mesh.shape",
    "mesh.num_devices",
    "train.num_microbatches",
)


def adapt(config: Config, *, num_processes: int, num_configured: int) -> Config:
    """The config of a worker that is one of `num_processes`.

    Args:
        config: resolved; it is not changed.
        num_processes: those that are there.
        num_configured: those that `config` is meant for.

    Raises:
        ConfigError: there is no way to split the global batch over so few.
    """
    if not config.elastic.min_processes:
        return config
    adapted = copy.deepcopy(config)
    allowed = [config.resume.allow] if config.resume.allow.strip() else []
    # It is locked: what differs here differs on purpose.
    object.__setattr__(adapted.resume, "allow", ",".join([*allowed, *_MAY_DIFFER]))
    object.__setattr__(
        adapted.train,
        "num_microbatches",
        plan_microbatches(
            config.train.num_microbatches,
            global_batch=config.data.global_batch,
            num_processes=num_processes,
            num_configured=num_configured,
        ),
    )
    return adapted


def shape(config: Config, num_processes: int, *, of: int) -> dict[str, int]:
    """The fields of the event `elastic`."""
    return {
        "num_processes": num_processes,
        "num_configured": of,
        "num_microbatches": config.train.num_microbatches,
    }


def plan_microbatches(
    num_microbatches: int,
    *,
    global_batch: int,
    num_processes: int,
    num_configured: int,
) -> int:
    """The fewest parts of a batch with which no process holds more rows at a time.

    Args:
        num_microbatches: with all processes.
        global_batch: rows.
        num_processes: those that are there.
        num_configured: all processes.

    Raises:
        ConfigError: no number of parts divides the batch.
    """
    least = -(-num_microbatches * num_configured // num_processes)
    for number in range(least, global_batch // num_processes + 1):
        if global_batch % (number * num_processes) == 0:
            return number
    raise ConfigError(
        "elastic.min_processes",
        f"data.global_batch={global_batch} cannot be split over {num_processes} "
        f"processes in {least} parts or more each",
    )
