"""The workdir's lock where the members of one job share it.

World: host-only. Floor: recovery. Read `jaxft/recovery/workdir.py`, the lock of a run
alone, before this file and `jaxft/recovery/job_supervisor.py` after it.

All members hold the same `flock`, shared; whoever comes first writes into the file
which job they are of, and who is of another one is refused. A member has a lock of its
own besides, so that it is there once, and what a dead one left running is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

from jaxft.records import FaultKind, fault_error
from jaxft.recovery.generations import FOLDER as GENERATIONS
from jaxft.recovery.members import FOLDER
from jaxft.recovery.workdir import (
    RETRY_SECS,
    TAKEOVER_SECS,
    WorkdirLock,
    absolute,
    lock_folder,
)

_OF_MEMBERS = re.compile(r"process-\d+\.(json|lock)|\.process-\d+\..*")
_OF_GENERATIONS = re.compile(r"\d+(\..*)?\.json")


class JobLock(WorkdirLock):
    """One member's right to write into the workdir of its job.

    Use `JobLock.join`. Released as the lock of a run alone.

    Args:
        workdir: of the job.
        job: what tells the job from every other one, the same for its members.
        member: the name of this one.
    """

    def __init__(self, workdir: pathlib.Path, *, job: str, member: str):
        super().__init__(workdir)
        self._job = job
        self._member = member
        self._member_fd = -1

    @classmethod
    def join(
        cls,
        workdir: str | os.PathLike[str],
        *,
        job: str,
        member: str,
        takeover_secs: float = TAKEOVER_SECS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> JobLock:
        """Takes the lock together with the other members of the job.

        Args:
            workdir: as for `WorkdirLock.acquire`, like the three at the end.
            job: what tells the job from every other one, the same for its members.
            member: the name of this one.
            takeover_secs: how long to wait for what a dead owner left running.
            clock: any clock, in seconds.
            sleep: waits, in seconds.

        Raises:
            FaultError: of kind WORKDIR_IN_USE: by a run that is not of this job, or
                by this very member; or of kind CONFIG where the workdir is unusable.
        """
        lock = cls(absolute(workdir), job=job, member=member)
        lock._wait(takeover_secs=takeover_secs, clock=clock, sleep=sleep)
        start = clock()
        while not lock._take_member():
            if clock() - start >= takeover_secs:
                lock.release()
                text = f"workdir {lock.workdir}: {member} of this job is there already"
                raise fault_error(FaultKind.WORKDIR_IN_USE, text)
            sleep(RETRY_SECS)
        return lock

    def filenos(self) -> tuple[int, ...]:
        """Descriptors to hand to a worker; the lock lives while either has them."""
        mine = (self._member_fd,) if self._member_fd >= 0 else ()
        return (*super().filenos(), *mine)

    def release(self, *, undo: bool = False) -> None:
        """Gives the lock back; what `undo` removes stays where others share it."""
        super().release(undo=undo)
        self._member_fd = -1  # It was among those that are closed by now.

    def _try_lock(self) -> bool:
        return super()._try_lock() or self._share()

    def _share(self) -> bool:
        """Joins those that have it; False where they are of another job."""
        folder_fd = -1
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            folder_fd = lock_folder(self.workdir, fcntl.LOCK_SH)
            is_ours = (self._owner() or {}).get("job") == self._job
        except OSError:
            is_ours = False
        if not is_ours:
            for held in (fd, folder_fd):
                if held >= 0:
                    os.close(held)
            return False
        self._fd, self._folder_fd = fd, folder_fd
        return True

    def _write_owner(self) -> None:
        if (self._owner() or {}).get("job") != self._job:
            super()._write_owner()
        for held in (self._fd, self._folder_fd):
            if held >= 0:
                # From here on the others can join.
                fcntl.flock(held, fcntl.LOCK_SH)

    def _owner_fields(self) -> dict[str, Any]:
        made = [str(path) for path in self._made]
        return {**super()._owner_fields(), "job": self._job, "made": made}

    def _take_member(self) -> bool:
        folder = self.workdir / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"{self._member}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._member_fd = fd
        return True

    def _undo(self) -> None:
        try:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # Others of the job are there.
        owner = self._owner() or {}
        if owner.get("job") == self._job and not self._was_entered():
            # The last one leaves for all: also what whoever came first has made.
            self._made = [pathlib.Path(path) for path in owner.get("made", [])]
            if self.path in self._made:
                self._remove_talk()
        super()._undo()

    def _was_entered(self) -> bool:
        return (self.workdir / "config.json").exists()

    def _remove_talk(self) -> None:
        """What the members of a job that never began have told each other."""
        for folder, names in ((FOLDER, _OF_MEMBERS), (GENERATIONS, _OF_GENERATIONS)):
            with contextlib.suppress(OSError):
                for path in list((self.workdir / folder).iterdir()):
                    if names.fullmatch(path.name):
                        path.unlink()
                # Where anything else is in it, it stays.
                (self.workdir / folder).rmdir()
