"""A root with a second copy elsewhere: restores from there when it must.

World: device. Floor: above `restore`, below `manager`. Read
`jaxft/checkpoint/mirror.py` and
`jaxft/checkpoint/mirror_fetch.py` before.

A root without a good step is filled from the mirror, step by step from the newest on,
until one is restored. A mirror that does not answer then is an error: to begin anew
could throw away what lies there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxft import config, records
from jaxft.checkpoint import mirror_check, mirror_fetch, options, together
from jaxft.checkpoint.judge import Restored
from jaxft.checkpoint.mirror import Mirror
from jaxft.checkpoint.mirror_mark import MirrorError


def make_mirror(
    address: str,
    *,
    root: str,
    rate: str,
    keep: records.KeepPolicy,
    emit: records.Emit,
) -> Mirror | None:
    """The mirror of a manager; None for no address.

    Raises:
        ConfigError: the address or the rate cannot be used, or the one would lie in
            the other's place.
    """
    if not address:
        return None
    mirror_check.check_apart(address, root=root)
    num_bytes = 0
    if rate:
        num_bytes = options.parse_bytes(rate, path="checkpoint.mirror_rate")
    try:
        return Mirror(address, bytes_per_sec=num_bytes, keep=keep, emit=emit)
    except ValueError as error:
        raise config.ConfigError("checkpoint.mirror", str(error)) from error


def list_steps(address: str, *, root: str = "") -> list[int]:
    """The steps on a mirror that may be resumed; none for no address.

    Args:
        address: the mirror.
        root: where to; what was decided about it counts, too.

    Raises:
        ConfigError: it does not answer.
        FaultError: kind CONFIG: what was decided cannot be understood.
    """
    if not address:
        return []
    try:
        return mirror_fetch.list_steps(address, healthy_only=True, into=root)
    except (MirrorError, OSError) as error:
        problem = f"{address} does not say what it holds: {records.first_line(error)}"
        raise config.ConfigError("checkpoint.mirror", problem) from error


def restore_through(
    mirror: Mirror,
    root: str,
    *,
    restore: Callable[[], Restored | None],
    emit: records.Emit,
) -> Restored | None:
    """Restores from the root, and where that has nothing good, from the mirror.

    Args:
        mirror: of the root; where a step is to be fetched, its copies end first.
        root: the checkpoint root.
        restore: restores from the root alone.
        emit: told of what is fetched.

    Raises:
        FaultError: see `restore.restore_newest`; neither place has a good step.
        ConfigError: the mirror does not answer.
    """
    failure: records.FaultError | None = None
    tried: set[int] = set()
    while True:
        try:
            restored = restore()
        except records.FaultError as error:
            if error.fault.kind is not records.FaultKind.NO_CHECKPOINT:
                raise
            failure, restored = error, None
        if restored is not None:
            return restored
        step = _fetch_next(mirror, root, tried=tried, emit=emit)
        if step < 0:
            if failure is not None:
                raise failure
            return None
        tried.add(step)


def _fetch_next(
    mirror: Mirror, root: str, *, tried: set[int], emit: records.Emit
) -> int:
    """Fetches the newest step that was not tried yet; -1 when there is none.

    The primary process does so, and tells the others, also that it could not.
    """
    step = -1
    with together.same_end(f"fetch a step from {mirror.address}"):
        if jax.process_index() == 0:
            step = _fetch(mirror, root, tried=tried, emit=emit)
    return together.from_primary(step)


def _fetch(mirror: Mirror, root: str, *, tried: set[int], emit: records.Emit) -> int:
    mirror.close()
    address = mirror.address
    for step in reversed(list_steps(address, root=root)):
        if step in tried:
            continue
        try:
            mirror_fetch.fetch(address, step, into=root, emit=emit)
        except records.FaultError as error:
            if error.fault.kind is not records.FaultKind.NO_CHECKPOINT:
                raise
            tried.add(step)  # It does not come back whole; its event says why.
            continue
        except (MirrorError, OSError) as error:
            reason = records.first_line(error)
            problem = f"step {step} cannot be fetched from {address}: {reason}"
            raise config.ConfigError("checkpoint.mirror", problem) from error
        return step
    return -1
