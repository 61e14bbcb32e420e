"""Requests to stop: signals, the time limit, a call; and how long there is to obey.

World: host-only. Floor: faults. Read `PreemptionConfig` in `jaxft/config.py` before
this file and `jaxft/loop.py`, which polls at every step border, after it.

Signal handlers only set flags. A thread does what cannot wait for a step border: it
hears of signals through a pipe that the C handler writes to, so that it works while
the main thread sits in a compilation.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn

from jaxft.config import ConfigError, PreemptionConfig
from jaxft.records import Emit, ignore_event

# The same signal again within this time is an echo: a bounced key, or a signal to the
# whole process group that the supervisor also passes on. Later it means: now.
REPEAT_SECS = 3.0
# The worker's part of the grace time ends this much earlier than the whole, so that it
# leaves by itself, with its reason, before the supervisor or the scheduler kills it.
MARGIN_SECS = 2.0
MARGIN_SHARE = 0.1
# Somebody said it again, or the grace time is over, and the main thread has not looked
# for so long: it hangs in something, and what is committed stands without it.
DEAF_SECS = 5.0
# Nobody may catch these, or they tell of a crash or of a child, not of a wish.
_NOT_REQUESTS = frozenset(
    {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "SIGSEGV", "SIGBUS", "SIGFPE"}
    | {"SIGILL", "SIGABRT", "SIGIOT", "SIGTRAP", "SIGPIPE", "SIGSYS"}
)
# The wall clock may be set while the thread sleeps: look again at times.
_MAX_SLEEP_SECS = 60.0


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """`"SIGTERM, SIGUSR1"` as signals; the `SIG` may be left out; empty is none.

    Raises:
        ConfigError: for `preemption.signals`: a name is unknown or unusable.
    """
    numbers: list[signal.Signals] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name = word.upper() if word.upper().startswith("SIG") else f"SIG{word.upper()}"
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals) or name in _NOT_REQUESTS:
            raise ConfigError(
                "preemption.signals",
                f"{word!r} is not a signal that can ask a run to stop; choose from "
                "SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP, SIGXCPU",
            )
        if number not in numbers:
            numbers.append(number)
    return tuple(numbers)


def interrupt(number: int, frame: Any) -> NoReturn:
    """A signal handler for where no `StopRequests` listens: these take its place.

    Raises:
        KeyboardInterrupt: always, with the signal's name.
    """
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)


class StopRequests:
    """Hears that the run shall stop, while it is entered as a context manager.

    In a thread that is not the main one there are no handlers: then only the time
    limit and `request` ask. A forked child hears nothing: its signals mean what they
    meant before. Signals of the list that the supervisor blocked are unblocked; those
    that were ignored before stay ignored.

    Args:
        config: the list of signals, the grace time, the time limit.
        emit: told of the request, once, as `stop_request`.
        clock: seconds since the epoch, for the time limit and the job's end.
        timer: monotonic seconds, for how long something takes.
        start_secs: when the command started, in seconds since the epoch; now by
            default. A restarted worker passes the supervisor's.
        leave: ends the process: see `may_leave`, and where a second request, or the
            end of the grace time, is not followed within `DEAF_SECS`. It is called
            with the reason, from any thread. None where the process is not ours (a
            notebook).
        environ: where `SLURM_JOB_END_TIME` is looked up.

    Raises:
        ConfigError: `config.signals` cannot be used.
    """

    def __init__(
        self,
        config: PreemptionConfig,
        *,
        emit: Emit = ignore_event,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        start_secs: float | None = None,
        leave: Callable[[str], NoReturn] | None = None,
        environ: Mapping[str, str] = os.environ,
    ):
        self._signals = parse_signals(config.signals)
        margin_secs = min(MARGIN_SECS, MARGIN_SHARE * config.grace_secs)
        self._grace_secs = config.grace_secs
        self._work_secs = config.grace_secs - margin_secs
        self._emit = emit
        self._clock = clock
        self._timer = timer
        self._leave = leave
        self._stop_at = _stop_time(
            config,
            now_secs=clock(),
            start_secs=clock() if start_secs is None else start_secs,
            environ=environ,
        )
        self._reason: str | None = None
        self._since = math.inf
        self._urgent_since = math.inf
        self._announced = False
        self._first_seen: dict[int, float] = {}
        # Guards `_announced`, `_num_inside`, `_entered`; never taken in a handler.
        self._lock = threading.RLock()
        self._num_inside = 0
        self._earlier: dict[int, Any] = {}
        self._earlier_fd = -1
        self._mask: set[signal.Signals] = set()
        self._entered = False

    def poll(self) -> str | None:
        """Why the run shall stop: a signal's name or another reason; None: go on."""
        if self._reason is None and self._clock() >= self._stop_at:
            self._set("time limit")
        if self._reason is not None and not self._announced:
            self._announce()
        return self._reason

    def request(self, reason: str = "requested") -> None:
        """Asks the run to stop, from any thread; the first reason stays."""
        self._set(reason)
        with self._lock:
            if self._entered:
                self._wake()

    @property
    def urgent(self) -> bool:
        """Somebody asked again: leave now, on the last committed step."""
        return self._urgent_since < math.inf

    def deadline_secs(self) -> float | None:
        """Seconds left for work, at least 0; None without a request.

        They end before the grace time does, by `MARGIN_SECS` or less.
        """
        if self.poll() is None:
            return None
        return max(0.0, self._since + self._work_secs - self._timer())

    @contextlib.contextmanager
    def may_leave(self) -> Generator[None, None, None]:
        """A phase without a state worth saving: a request ends the process at once.

        A request from before ends it on entering. Without `leave` nothing happens,
        `poll` answers afterwards.
        """
        with self._lock:
            self._num_inside += 1
        try:
            self.poll()
            self._leave_if_asked()
            yield
        finally:
            with self._lock:
                self._num_inside -= 1

    def __enter__(self) -> StopRequests:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._entered = True
        _entered.append(self)
        self._thread = threading.Thread(
            target=self._watch, name="stop-requests", daemon=True
        )
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            self._install()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            # First the mask: a late signal must not meet the default in between.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._mask)
            self._uninstall()
        _entered.remove(self)
        with self._lock:
            self._entered = False
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _install(self) -> None:
        self._earlier_fd = signal.set_wakeup_fd(
            self._write_fd, warn_on_full_buffer=False
        )
        for number in self._signals:
            earlier = signal.getsignal(number)
            # As nohup and jobs in the background have it: it asks for nothing.
            if earlier is not signal.SIG_IGN:
                self._earlier[number] = earlier
                signal.signal(number, self._on_signal)
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        self._mask = {n for n in self._signals if n in before}

    def _uninstall(self) -> None:
        for number, earlier in self._earlier.items():
            # Somebody may have put a handler over ours: it is theirs to remove. A
            # handler that was not set from Python reads as None and cannot be set.
            if signal.getsignal(number) == self._on_signal and earlier is not None:
                signal.signal(number, earlier)
        self._earlier = {}
        current = signal.set_wakeup_fd(-1)
        if current == self._write_fd:
            current = self._earlier_fd
        if current >= 0:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Full: it will wake anyway.
            os.write(self._write_fd, b"\0")

    def _on_signal(self, number: int, frame: Any) -> None:
        """Sets flags, and passes on to the handler from before."""
        self._set(signal.Signals(number).name)
        earlier = self._earlier.get(number)
        if callable(earlier) and earlier not in (signal.default_int_handler, interrupt):
            earlier(number, frame)

    def _set(self, reason: str) -> None:
        # Two threads may both get here: either reason and time is true.
        if self._reason is None:
            self._since = self._timer()
            self._reason = reason

    def _watch(self) -> None:
        """The thread: hears of signals at once, and of the time limit."""
        waiter = select.poll()
        waiter.register(self._read_fd, select.POLLIN)
        while self._entered:
            if self._reason is None:
                sleep_secs = self._stop_at - self._clock()
            else:
                sleep_secs = self._deaf_at() - self._timer()
            sleep_secs = min(max(0.0, sleep_secs), _MAX_SLEEP_SECS)
            if waiter.poll(math.ceil(sleep_secs * 1000)):
                self._take(os.read(self._read_fd, 4096))
            self.poll()
            self._leave_if_asked()

    def _take(self, numbers: bytes) -> None:
        """Notes signals at the time they came; handlers may run much later."""
        for number in numbers:
            if number in self._signals:
                now = self._timer()
                first = self._first_seen.setdefault(number, now)
                if now - first > REPEAT_SECS:
                    self._urgent_since = min(now, self._urgent_since)
                self._set(signal.Signals(number).name)
        if self._earlier_fd >= 0 and (theirs := numbers.replace(b"\0", b"")):
            with contextlib.suppress(OSError):
                os.write(self._earlier_fd, theirs)

    def _announce(self) -> None:
        with self._lock:
            if not self._announced:
                self._announced = True
                self._emit("stop_request", reason=self._reason)

    def _leave_if_asked(self) -> None:
        # With the lock held, so that the phase cannot end under the decision.
        with self._lock:
            if self._reason is None or self._leave is None:
                return
            if self._num_inside:
                self._leave(self._reason)
            elif self._entered and self._timer() >= self._deaf_at():
                self._leave(f"{self._reason} while the main thread was deaf to it")

    def _deaf_at(self) -> float:
        """When a main thread that still goes on is not waited for any more."""
        return min(self._urgent_since, self._since + self._grace_secs) + DEAF_SECS


def _stop_time(
    config: PreemptionConfig,
    *,
    now_secs: float,
    start_secs: float,
    environ: Mapping[str, str],
) -> float:
    """When the time is up, in seconds since the epoch; infinity for never."""
    stop_at = math.inf
    if config.time_limit_secs > 0:
        stop_at = start_secs + config.time_limit_secs
    with contextlib.suppress(ValueError):
        job_end = float(environ.get("SLURM_JOB_END_TIME", ""))
        # One that is over was inherited from another job's shell.
        if job_end > now_secs:
            stop_at = min(stop_at, job_end - config.grace_secs)
    return stop_at


# Those that are entered, outermost first.
_entered: list[StopRequests] = []


def _restore_in_child() -> None:
    """Else `Process.terminate` would not end a forked child: its signals wake us."""
    for requests in reversed(_entered):
        numbers = list(requests._earlier)
        requests._uninstall()
        for number in numbers:
            # To raise would not end a child that catches what its work raises.
            if signal.getsignal(number) is interrupt:
                signal.signal(number, signal.SIG_DFL)
        requests._entered = False
        os.close(requests._read_fd)
        os.close(requests._write_fd)
    _entered.clear()


os.register_at_fork(after_in_child=_restore_in_child)
