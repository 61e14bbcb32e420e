"""One run at a time in a workdir: a lock that names its owner.

World: host-only. Floor: recovery. Read `jaxft/records.py` before this file and
`jaxft/recovery/supervisor.py`, which hands the lock on to its worker, after it.

The lock is a `flock` on `<workdir>/lock`: the kernel frees it when the last process
that holds the descriptor is dead, so nothing stale is ever left behind. The text in
the file only says who it is. On a shared file system it is as good as that file
system's `flock`. The folder itself is locked as well, where its file system can do
that: the file may be removed by somebody who takes it for stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxft.records import Fault, FaultError, FaultKind

# After the owner's death its worker still has to die: it takes the kernel moments.
TAKEOVER_SECS = 10.0
# A new owner has the lock a moment before its name is in the file.
NAMING_SECS = 1.0
# A killed owner looks alive until the kernel comes to it.
DYING_SECS = 0.3
RETRY_SECS = 0.02
_PF_EXITING = 0x4  # In the flags of /proc/<pid>/stat, see proc(5).


class WorkdirLock:
    """The right to write into one workdir, held until `release` or death.

    Use `WorkdirLock.acquire`. Also a context manager that releases at its end.

    Attributes:
        workdir: its absolute path; the folder exists.
    """

    def __init__(self, workdir: pathlib.Path):
        self.workdir = workdir
        self._fd = -1
        self._folder_fd = -1
        self._made: list[pathlib.Path] = []
        self._text_before: bytes | None = None

    @classmethod
    def acquire(
        cls,
        workdir: str | os.PathLike[str],
        *,
        takeover_secs: float = TAKEOVER_SECS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> WorkdirLock:
        """Takes the lock; makes the workdir and its parents where they are missing.

        Args:
            workdir: a local folder; `~` and relative paths are fine.
            takeover_secs: how long to wait for what a dead owner left running.
            clock: any clock, in seconds.
            sleep: waits, in seconds.

        Raises:
            FaultError: of kind WORKDIR_IN_USE, naming the owner; or of kind CONFIG
                where the workdir is unusable. In both cases all is as it was.
        """
        lock = cls(absolute(workdir))
        lock._wait(takeover_secs=takeover_secs, clock=clock, sleep=sleep)
        return lock

    def _wait(
        self,
        *,
        takeover_secs: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        _held.add(self)
        try:
            start = clock()
            while not self._take():
                owner = self._owner()
                patience = _patience(owner, takeover_secs=takeover_secs)
                if clock() - start >= patience:
                    raise _in_use(self.workdir, owner)
                sleep(RETRY_SECS)
        except OSError as error:
            self.release(undo=True)
            raise _unusable(self.workdir, error.strerror or str(error)) from error
        except BaseException:
            self.release(undo=True)
            raise

    @property
    def path(self) -> pathlib.Path:
        """The lock file."""
        return self.workdir / "lock"

    def filenos(self) -> tuple[int, ...]:
        """Descriptors to hand to a worker; the lock lives while either has them."""
        return tuple(fd for fd in (self._fd, self._folder_fd) if fd >= 0)

    def problem(self) -> str:
        """Why the lock keeps nobody out any more, in one line; empty while it does."""
        names = [(self._fd, self.path), (self._folder_fd, self.workdir)]
        if not any(fd >= 0 and _leads_elsewhere(path, fd) for fd, path in names):
            return ""
        return (
            f"{self.path} was removed or replaced while the run went on, and another "
            "run may have begun there: stopped without a further save"
        )

    def release(self, *, undo: bool = False) -> None:
        """Gives the lock back; a worker that inherited it still keeps it.

        Args:
            undo: also remove what `acquire` made, as far as it is still empty: a
                start that was refused leaves the workdir as it found it.
        """
        if undo:
            self._undo()
        fds = self.filenos()
        self._fd = self._folder_fd = -1
        _close(*fds)
        self._made = []
        _held.discard(self)

    def __enter__(self) -> WorkdirLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Interrupted before anything was written, it leaves nothing behind.
        self.release(undo=kind is not None and issubclass(kind, KeyboardInterrupt))

    def _make_folders(self) -> None:
        missing = []
        folder = self.workdir
        while not folder.exists():
            if folder.is_symlink():
                raise _unusable(self.workdir, f"{folder} is a link to nothing")
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except FileExistsError:
                continue  # Another start was faster; it is not ours to remove.
            if folder not in self._made:
                self._made.append(folder)
        if not self.workdir.is_dir():
            raise _unusable(self.workdir, "it is not a folder")
        if not os.access(self.workdir, os.W_OK | os.X_OK):
            raise _unusable(self.workdir, "it is not writable")

    def _take(self) -> bool:
        """Takes the lock if it is free; signals wait until it is known what we made."""
        with _undisturbed():
            taken = self._try_lock()
            if taken:
                self._write_owner()
            return taken

    def _try_lock(self) -> bool:
        # Each time: a start that was refused may have removed what it had made.
        self._make_folders()
        flags = os.O_RDWR | os.O_CLOEXEC
        made = False
        try:
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            try:
                fd = os.open(self.path, flags | os.O_CREAT, 0o644)
            except FileNotFoundError:
                return False
            made = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # At once: a signal may come between any two lines where another thread
            # has taken it, and what is not known to be held is never given back.
            self._fd = fd
            self._folder_fd = lock_folder(self.workdir)
            # The file that was opened may have been removed by a start that was
            # refused; a lock on it would keep nobody out.
            if not _is_same_file(fd, self.path):
                self._let_go(fd)
                return False
        except OSError as error:
            self._let_go(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if made:  # A file system without locks: nobody else can hold it.
                self._made.append(self.path)
            raise
        if made:
            self._made.append(self.path)
        return True

    def _let_go(self, fd: int) -> None:
        folder_fd, self._fd, self._folder_fd = self._folder_fd, -1, -1
        _close(fd, folder_fd)

    def _write_owner(self) -> None:
        if self.path not in self._made:
            self._text_before = os.pread(self._fd, 1 << 16, 0)
        self._write(json.dumps(self._owner_fields()).encode() + b"\n")

    def _owner_fields(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": shlex.join(sys.orig_argv),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }

    def _write(self, text: bytes) -> None:
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    def _owner(self) -> dict[str, Any] | None:
        """Who has the lock; None while the file does not say so."""
        try:
            owner = json.loads(self.path.read_bytes())
            return owner if isinstance(owner.get("pid"), int) else None
        except (OSError, ValueError, AttributeError):
            return None

    def _undo(self) -> None:
        if self.problem():
            return  # What is there now is somebody else's.
        if self._fd >= 0 and self._text_before is not None:
            self._write(self._text_before)
        for path in reversed(self._made):
            try:
                # Only while the lock is held: else the file is somebody else's.
                if path == self.path:
                    path.unlink()
                else:
                    path.rmdir()
            except OSError:
                return  # Something else is in there by now: it stays.


# Those that may be held by this process.
_held: set[WorkdirLock] = set()


def give_back_all() -> None:
    """Undoes a start that a signal has ended before anybody was there to release."""
    for lock in list(_held):
        lock.release(undo=True)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _let_go_in_child() -> None:
    """A forked child that outlives its parent must not keep the workdir locked.

    Closing its copy frees nothing while the parent has its own.
    """
    for lock in list(_held):
        lock._made, lock._text_before = [], None
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def is_in_use(workdir: str | os.PathLike[str]) -> bool:
    """Whether a run has the workdir now; nothing is changed or made.

    Raises:
        OSError: that cannot be found out.
    """
    try:
        fd = os.open(pathlib.Path(workdir) / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # A start that comes at this very moment tries again.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EBADF:  # NFS: who does not write cannot ask for this.
            return _is_locked(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
        raise
    finally:
        os.close(fd)
    return False


def _is_locked(fd: int) -> bool:
    """Whether somebody has the lock for himself; one that is shared is not seen."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def absolute(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """The absolute path, without `~` and `..`.

    Raises:
        FaultError: of kind CONFIG: it cannot be a folder here.
    """
    text = os.fspath(workdir)
    if not text.strip():
        raise _unusable(text, "it is empty: name a folder")
    if "\0" in text:
        raise _unusable(text.replace("\0", "?"), "it contains a zero byte")
    if "://" in text:
        raise _unusable(text, "it must be a local folder, not a URL")
    try:
        path = pathlib.Path(text).expanduser().absolute()
        # By asking the disk: `..` behind a link is not the folder it looks like.
        return path.resolve() if ".." in path.parts else path
    except (OSError, RuntimeError) as error:
        raise _unusable(text, str(error)) from error


def _leads_elsewhere(path: pathlib.Path, fd: int) -> bool:
    try:
        return not _is_same_file(fd, path)
    except OSError:
        return False  # A file system that does not answer well says nothing.


def lock_folder(folder: pathlib.Path, how: int = fcntl.LOCK_EX) -> int:
    """A descriptor that holds the folder's own lock; -1 where there is no such thing.

    Args:
        folder: that is locked.
        how: alone, or together with others.

    Raises:
        OSError: somebody else holds it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EAGAIN:
            raise
        return -1  # NFS: what cannot be written to cannot be locked.
    return fd


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _is_same_file(fd: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _patience(owner: dict[str, Any] | None, *, takeover_secs: float) -> float:
    if owner is None:
        return NAMING_SECS
    return DYING_SECS if _is_running(owner) else takeover_secs


def _is_running(owner: dict[str, Any]) -> bool:
    """Whether the owner lives; another host's processes are taken to live."""
    if owner.get("host") != socket.gethostname():
        return True
    pid = owner["pid"]
    try:
        # A zombie is dead, one that frees its memory nearly; signal 0 cannot tell.
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _in_use(workdir: pathlib.Path, owner: dict[str, Any] | None) -> FaultError:
    if owner is None:
        who = "another process, which has not said who it is"
    else:
        who = (
            f"process {owner['pid']} on {owner.get('host')} since "
            f"{owner.get('since')} ({owner.get('command')})"
        )
        if not _is_running(owner):
            who = f"what the dead {who} left running"
    evidence = f"workdir {workdir} is in use by {who}: stop it or take another workdir"
    return FaultError(
        Fault(kind=FaultKind.WORKDIR_IN_USE, evidence=" ".join(evidence.split()))
    )


def _unusable(workdir: str | pathlib.Path, problem: str) -> FaultError:
    evidence = f"workdir {str(workdir)!r} cannot be used: {problem}"
    return FaultError(Fault(kind=FaultKind.CONFIG, evidence=evidence))
