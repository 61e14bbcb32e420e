"""Which events a person is told of at once: lines that stay above the live line.

World: host-only. Floor: a peer of `data` and `checkpoint`, above `events`. Read
`jaxft/metrics/writers.py` before, and `jaxft/worker.py`, which hands it every event.

What is rare and asks for a look: a step that was moved aside or not saved, a mirror
that fails, a setting that does nothing. The rest is in the history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_SHOWN = 3


class Notes:
    """Makes lines of events.

    Args:
        say: prints one.
        failed_saves: whether they are told; not where the first one ends the run, and
            is told then.
        stop_secs: what a stop leaves for a save.

    Attributes:
        fetched: steps that came from the mirror.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        failed_saves: bool = False,
        stop_secs: float = math.inf,
    ):
        self.fetched: set[int] = set()
        self._say = say
        self._failed_saves = failed_saves
        self._stop_secs = stop_secs
        self._mirror_problem = ""
        self._num_failed = 0

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tells an event that is worth it; safe to be called from any thread."""
        teller = getattr(self, f"_tell_{kind}", None)
        if teller is not None and (text := teller(fields)):
            self._say(" ".join(text.split()))

    def _tell_hang(self, fields: Mapping[str, Any]) -> str:
        secs, phase, file = fields["silent_secs"], fields["phase"], fields["file"]
        where = f"; what all threads do is in {file}" if file else ""
        return f"no progress for {secs:.0f} s in phase {phase}{where}"

    def _tell_quarantine(self, fields: Mapping[str, Any]) -> str:
        step, path, reason = fields["step"], fields["path"], fields["reason"]
        return f"step {step} was moved aside: {reason}; kept as {path}"

    def _tell_quarantine_failed(self, fields: Mapping[str, Any]) -> str:
        step, path, reason = fields["step"], fields["path"], fields["reason"]
        return f"step {step} is passed over: {reason}: {path}"

    def _tell_unhealthy(self, fields: Mapping[str, Any]) -> str:
        return f"step {fields['step']} is passed over: {_not_finite(fields['leaves'])}"

    def _tell_rollback(self, fields: Mapping[str, Any]) -> str:
        return f"rolled back from step {fields['origin']}: {fields['reason']}"

    def _tell_save_unhealthy(self, fields: Mapping[str, Any]) -> str:
        return f"step {fields['step']} was not saved: {_not_finite(fields['leaves'])}"

    def _tell_save_failed(self, fields: Mapping[str, Any]) -> str:
        self._num_failed += 1
        # A row of failures is told by its first one and by its end.
        is_news = self._failed_saves and self._num_failed == 1
        return fields["reason"] if is_news else ""

    def _tell_save_commit(self, fields: Mapping[str, Any]) -> str:
        num_failed, self._num_failed = self._num_failed, 0
        if not (self._failed_saves and num_failed):
            return self._too_slow_to_stop(fields["secs"])
        saves = "save" if num_failed == 1 else "saves"
        return f"step {fields['step']} is saved, after {num_failed} failed {saves}"

    def _too_slow_to_stop(self, secs: float) -> str:
        left_secs = self._stop_secs
        if secs <= left_secs:
            return ""
        self._stop_secs = math.inf  # Once is enough.
        return (
            f"warning: a save takes {secs:.1f} s, a stop leaves {left_secs:.1f} s: it "
            "would go back to the last committed step; raise preemption.grace_secs "
            "and the scheduler's own grace time, or save more often"
        )

    def _tell_mirror_fetch(self, fields: Mapping[str, Any]) -> str:
        self.fetched.add(fields["step"])
        return ""

    def _tell_mirror_failed(self, fields: Mapping[str, Any]) -> str:
        step, target, reason = fields["step"], fields["target"], fields["reason"]
        is_news = self._mirror_problem != reason
        self._mirror_problem = reason
        # At every commit anew it would hide everything else.
        what = f"step {step}" if step >= 0 else target
        return f"mirror: {what} failed: {reason}" if is_news else ""

    def _tell_mirror_commit(self, fields: Mapping[str, Any]) -> str:
        was_failing, self._mirror_problem = self._mirror_problem, ""
        return f"mirror: step {fields['step']} is there" if was_failing else ""

    def _tell_interval_costly(self, fields: Mapping[str, Any]) -> str:
        return (
            f"saves every {fields['secs']:.3g} s take {fields['overhead']:.1%} of the "
            f"time: {fields['reason']}"
        )

    def _tell_metric_missing(self, fields: Mapping[str, Any]) -> str:
        known = ", ".join(fields["known"])
        return (
            f"checkpoint.keep goes by {fields['metric']}, which step {fields['step']} "
            f"does not have; it has {known}"
        )


def _not_finite(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_MAX_SHOWN])
    if (rest := len(paths) - _MAX_SHOWN) > 0:
        shown = f"{shown} and {rest} more"
    return f"{shown} {'is' if len(paths) == 1 else 'are'} not finite"
