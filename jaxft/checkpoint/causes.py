"""Why a save or a read failed, in two words, and what to do about it.

World: host-only. Floor: the lowest of `checkpoint`. Read
`jaxft/checkpoint/orbax_io.py` and `jaxft/checkpoint/saves.py` next, which ask.
"""

from __future__ import annotations

import errno
import os

from jaxft import records

_CAUSES = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "quota exceeded",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "read-only file system",
    errno.EIO: "I/O error",
    errno.EFBIG: "file too large",
}
# What stands behind it says more, where anything does.
_VAGUE_CAUSES = {
    errno.ENOENT: "something is gone",
    errno.ENOTDIR: "a file where a folder should be",
    errno.ENOMEM: "out of memory",
}
_REMEDIES = {
    "disk full": "free space under {root}",
    "quota exceeded": "free space under {root} or raise the quota",
    "no permission": "make {root} writable",
    "read-only file system": "mount {root} writable",
    "I/O error": "check the disk of {root}",
    "file too large": "raise the limit on file sizes, see ulimit -f",
    "something is gone": "let nothing else delete under {root}",
    "a file where a folder should be": "move it out of {root}",
    "out of memory": "lower checkpoint.memory_budget",
    "time-out": "the storage of {root} is slow, raise checkpoint.timeout_secs",
}


class PeerError(Exception):
    """What is done together has failed in another process.

    Attributes:
        process: its index.
        cause: of its failure, in its own words.
    """

    def __init__(self, process: int, cause: str):
        super().__init__(cause)
        self.process = process
        self.cause = cause


def cause(error: BaseException) -> str:
    """The kind of a failure, in two words; also out of the text of C++ errors.

    For a fault it is the fault's own first line, for what is unknown the type.
    """
    if (peer := of_peer(error)) is not None:
        return peer.cause
    found = chain(error)
    for names in (_CAUSES, _VAGUE_CAUSES):
        for link in found:
            if isinstance(link, TimeoutError):
                return "time-out"
            if isinstance(link, OSError) and link.errno in names:
                return names[link.errno]
            for number, name in names.items():
                if os.strerror(number) in str(link):
                    return name
    if any(isinstance(e, MemoryError) or "RESOURCE_EXHAUSTED" in str(e) for e in found):
        return "out of memory"
    if isinstance(error, records.FaultError):
        return records.first_line(error)
    return type(error).__name__


def of_peer(error: BaseException) -> PeerError | None:
    """The failure of another process that is behind this one."""
    return next((e for e in chain(error) if isinstance(e, PeerError)), None)


def remedy(error: BaseException, *, root: str) -> str:
    """What to do about a failed save, in a few words."""
    return _REMEDIES.get(cause(error), "check {root}").format(root=root)


def is_process_failure(error: BaseException) -> bool:
    """Whether this process, not the store, lacks something: memory, files, rights."""
    own = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR)
    if isinstance(error, OSError) and error.errno in own:
        return True
    return isinstance(error, MemoryError) or cause(error) == "no permission"


def chain(error: BaseException) -> list[BaseException]:
    """The error and those that it came from."""
    found: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in found:
        found.append(link)
        link = link.__cause__ or link.__context__
    return found
