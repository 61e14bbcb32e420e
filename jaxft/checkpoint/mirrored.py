"""A root with a second copy elsewhere: restores from there when it must.

World: device. Floor: above `restore`, below `manager`. Read
`jaxft/checkpoint/mirror.py` and
`jaxft/checkpoint/mirror_fetch.py` before.

A root without a good step is filled from the mirror, step by step from the newest on,
until one is restored. A mirror that does not answer then is an error: to begin anew
could throw away what lies there. Where an older step of the root is good, the damaged
ones after it come back from the mirror, if it has them; if not, that is told, and the
older one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax

from jaxft import config, records
from jaxft.checkpoint import layout, mirror_check, mirror_fetch, options, together
from jaxft.checkpoint.judge import Restored
from jaxft.checkpoint.mirror import Mirror, quarantined_steps
from jaxft.checkpoint.mirror_mark import MirrorError

# Terabytes through a slow line take their time.
_FETCH_SECS = 24 * 3600.0


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


def list_steps(address: str, *, root: str = "", own_only: bool = False) -> list[int]:
    """The steps on a mirror that may be resumed; none for no address.

    Args:
        address: the mirror.
        root: where to; what was decided about it counts, too.
        own_only: only those that this root wrote.

    Raises:
        ConfigError: it does not answer.
        FaultError: kind CONFIG: what was decided cannot be understood.
    """
    if not address:
        return []
    try:
        return mirror_fetch.list_steps(
            address, healthy_only=True, into=root, own_only=own_only
        )
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
    """Restores from the root, and from the mirror what the root has lost.

    Args:
        mirror: of the root; where a step is to be fetched, its copies end first.
        root: the checkpoint root.
        restore: restores from the root alone.
        emit: told of what is fetched.

    Raises:
        FaultError: see `restore.restore_newest`; neither place has a good step.
        ConfigError: the mirror does not answer, and the root has no good step.
    """
    tried: set[int] = set()
    while True:
        with together.same_end(f"look into {root}"):
            before = layout.discover(root).set_aside
        failure: records.FaultError | None = None
        restored: Restored | None = None  # The one before is not held any longer.
        try:
            restored = restore()
        except records.FaultError as error:
            if error.fault.kind is not records.FaultKind.NO_CHECKPOINT:
                raise
            failure = error
        step = -1
        what = f"fetch a step from {mirror.address}"
        with together.same_end(what, deadline_secs=_FETCH_SECS):
            if jax.process_index() != 0:
                pass  # The primary one fetches, and tells the others.
            elif restored is None:
                mirror.close()
                there = list_steps(mirror.address, root=root)
                step = _fetch(mirror.address, there, root=root, tried=tried, emit=emit)
            else:
                lost = _lost(root, after=restored.step, before=before) - tried
                step = _fetch_back(mirror, lost, root=root, tried=tried, emit=emit)
        step = together.from_primary(step)
        if step < 0:
            if failure is not None:
                raise failure
            return restored
        tried.add(step)


def _lost(root: str, *, after: int, before: Iterable[str]) -> set[int]:
    """Steps above `after` that were found damaged just now.

    Args:
        root: the checkpoint root.
        after: the good step that it has.
        before: what lay aside before it was restored.
    """
    found = layout.discover(root)
    aside = quarantined_steps(set(found.set_aside) - set(before))
    return {step for step in aside if step > after} - set(found.steps)


def _fetch_back(
    mirror: Mirror,
    lost: set[int],
    *,
    root: str,
    tried: set[int],
    emit: records.Emit,
) -> int:
    """Fetches the newest of the steps that were damaged; -1 for none.

    The root has a good one: a mirror that fails is told and ends nothing.
    """
    if not lost:
        return -1
    mirror.close()
    address = mirror.address
    try:
        there = list_steps(address, root=root, own_only=True)
        there = [step for step in there if step in lost]
        return _fetch(address, there, root=root, tried=tried, emit=emit)
    except (config.ConfigError, records.FaultError) as error:
        reason = records.first_line(error)
        emit("mirror_failed", step=max(lost), target=address, reason=reason)
        return -1


def _fetch(
    address: str,
    steps: Iterable[int],
    *,
    root: str,
    tried: set[int],
    emit: records.Emit,
) -> int:
    """Fetches the newest of `steps` that was not tried yet; -1 when there is none.

    Raises:
        ConfigError: the mirror does not answer.
    """
    for step in sorted(set(steps) - tried, reverse=True):
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
