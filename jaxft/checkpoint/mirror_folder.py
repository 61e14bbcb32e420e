"""A mirror in a folder: on another disk, itself a root that can be trained from.

World: host-only. Floor: above `mirror_mark`, below `mirror`. Read
`jaxft/checkpoint/mirror_mark.py` before and `jaxft/checkpoint/mirror.py` after.

A step is copied under a name that says unfinished; each file is made durable, dropped
from the page cache and read back; the folder gets its name, and then its mark. So a
folder of an object store, where a rename copies file by file, has no half steps
either. Files that a step shares with a mirrored one by hard link in the root are
hard-linked here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Mapping

from jaxft import durable
from jaxft.checkpoint import decisions, layout, mirror_mark

# Followed by the identity of the root whose mirror is at work.
_COPYING = f"{layout.TMP_MARK}-mirror-"
_DOOMED = f"{layout.TMP_MARK}-mirror-deleted-"
# An empty folder, there until the step has its mark: one without it then is ours.
_MARKING = f"{layout.TMP_MARK}-mirror-marking-"


class FolderTarget:
    """Steps in a folder of this machine.

    Args:
        root: the folder; made when the first step is copied.
    """

    def __init__(self, root: str):
        self.where = os.path.abspath(os.path.expanduser(root))
        # A mark lists thousands of files: each is read once. Step -> (stat, mark).
        self._marks: dict[int, tuple[tuple[int, ...], mirror_mark.Mark | None]] = {}

    def marks(self) -> dict[int, mirror_mark.Mark | None]:
        """Step -> its mark; None where a step is there and nobody can tell whose.

        Raises:
            OSError: the folder cannot be read.
        """
        found = {}
        for step in layout.discover(self.where).steps:
            file = pathlib.Path(self._step_path(step), mirror_mark.MARK_FILE)
            stat = _stat(file)
            known = self._marks.get(step)
            if known is None or known[0] != stat:
                known = stat, _read_mark(file, step=step)
            found[step] = known
        self._marks = found
        return {step: mark for step, (_, mark) in found.items()}

    def decisions(self, owner: str) -> dict[str, bytes]:
        """What was decided about a root: file name -> content.

        Raises:
            FaultError: kind CONFIG: they cannot be read.
        """
        return decisions.texts(self._decided(owner))

    def add_decision(self, name: str, text: bytes, *, owner: str) -> None:
        """Keeps a decision, durably; also as one about the mirror, if that is free.

        So the mirror of one root is a root that knows what was rolled back.

        Args:
            name: of its file.
            text: what that holds.
            owner: identity of the root that it is about.

        Raises:
            OSError: it could not be written.
        """
        path = os.path.join(self._decided(owner), decisions.FOLDER, name)
        decisions.write_once(path, text)
        if any(mark is None or mark.source != owner for mark in self.marks().values()):
            return
        own = os.path.join(self.where, decisions.FOLDER)
        with contextlib.suppress(FileExistsError):
            durable.make_folders(own)
            os.link(path, os.path.join(own, name))
            durable.sync_folder(own)

    def _decided(self, owner: str) -> str:
        """Where the decisions about a root are kept."""
        return os.path.join(self.where, mirror_mark.DECIDED, owner)

    def add(
        self,
        source: mirror_mark.Source,
        *,
        owner: str,
        known: mirror_mark.Known,
        pace: mirror_mark.Pace,
    ) -> tuple[mirror_mark.Mark, int]:
        """Copies a step; see `mirror_objects.ObjectTarget.add`.

        A copy that fails gives its space back.
        """
        final = self._step_path(source.step)
        copy = f"{final}{_COPYING}{owner}"
        durable.make_folders(self.where)
        _remove(copy)
        try:
            os.mkdir(copy)
            files, num_sent_bytes = self._fill(copy, source, known=known, pace=pace)
            mark = source.mark(files, source=owner)
            self._commit(copy, final, mark)
        except BaseException:
            with contextlib.suppress(OSError):  # The next start finishes it.
                _remove(copy)
                self._undo(source.step, owner=owner)
            raise
        return mark, num_sent_bytes

    def _fill(
        self,
        copy: str,
        source: mirror_mark.Source,
        /,
        *,
        known: mirror_mark.Known,
        pace: mirror_mark.Pace,
    ) -> tuple[dict[str, mirror_mark.MirroredFile], int]:
        """Copies the files of a step; them, and the bytes that were not shared."""
        files: dict[str, mirror_mark.MirroredFile] = {}
        num_sent_bytes = 0
        for file in source.files:
            path = os.path.join(copy, file.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            held = known.find(file, step=source.step)
            if held and self._link(path, file.path, held=held):
                pace.spend(0)
                files[file.path] = held[1]
                continue
            origin = os.path.join(source.path, file.path)
            files[file.path] = file.sent(_copy(origin, path, pace=pace))
            num_sent_bytes += file.num_bytes
        return files, num_sent_bytes

    def _link(
        self, path: str, name: str, *, held: tuple[int, mirror_mark.MirroredFile]
    ) -> bool:
        """Links a file of a mirrored step; False where that does not work."""
        step, file = held
        donor = os.path.join(self._step_path(step), name)
        try:
            if os.lstat(donor).st_size != file.num_bytes:
                return False
            os.link(donor, path)
        except OSError:
            return False
        return True

    def _commit(self, copy: str, final: str, mark: mirror_mark.Mark) -> None:
        doomed = f"{final}{_DOOMED}{mark.source}"
        for folder, _, _ in os.walk(copy, topdown=False):
            durable.sync_folder(folder)
        marking = self._begin_marking(mark.step, owner=mark.source)
        if os.path.lexists(final):
            # The same label of a timeline that a rollback has ended.
            _remove(doomed)
            _unmark(final)
            os.rename(final, doomed)
        os.rename(copy, final)
        durable.sync_folder(self.where)
        file = pathlib.Path(final, mirror_mark.MARK_FILE)
        _write_mark(file, mark)
        os.rmdir(marking)
        self._marks[mark.step] = _stat(file), mark
        _remove(doomed)

    def _begin_marking(self, step: int, *, owner: str) -> str:
        """From now on the step is ours, also without a mark; the folder that says so.

        Whoever gives it its mark, or takes it away, removes that folder.
        """
        marking = f"{self._step_path(step)}{_MARKING}{owner}"
        os.makedirs(marking, exist_ok=True)
        durable.sync_folder(self.where)
        return marking

    def _undo(self, step: int, *, owner: str) -> None:
        """Takes away a step that did not come to its mark, if it is there."""
        final = self._step_path(step)
        marking = f"{final}{_MARKING}{owner}"
        if not os.path.isdir(marking):
            return
        file = pathlib.Path(final, mirror_mark.MARK_FILE)
        if os.path.isdir(final) and not os.path.lexists(file):
            doomed = f"{final}{_DOOMED}{owner}"
            _remove(doomed)
            os.rename(final, doomed)
            _remove(doomed)
        os.rmdir(marking)

    def remove(
        self, step: int, *, marks: Mapping[int, mirror_mark.Mark | None]
    ) -> None:
        """Deletes a step: its mark first, then its name."""
        mark = marks[step]
        assert mark is not None
        marking = self._begin_marking(step, owner=mark.source)
        # A file goes with its last link.
        doomed = f"{self._step_path(step)}{_DOOMED}{mark.source}"
        _remove(doomed)
        _unmark(self._step_path(step))
        os.rename(self._step_path(step), doomed)
        os.rmdir(marking)
        _remove(doomed)

    def sweep(
        self, owner: str, *, marks: Mapping[int, mirror_mark.Mark | None]
    ) -> None:
        """Deletes what an interrupted copy or deletion by the same root left."""
        del marks
        for path, step in layout.discover(self.where).unfinished:
            if path.endswith(f"{_MARKING}{owner}"):
                self._undo(step, owner=owner)
            elif path.endswith((f"{_COPYING}{owner}", f"{_DOOMED}{owner}")):
                _remove(path)

    def read(self, mark: mirror_mark.Mark) -> Iterator[tuple[str, bytes]]:
        """(path, piece) of all files of a step, each file's pieces in order.

        Raises:
            DamageError: a file is missing.
            OSError: a file cannot be read.
        """
        folder = self._step_path(mark.step)
        for path in mark.files:
            yield path, b""
            try:
                for piece in mirror_mark.read_pieces(os.path.join(folder, path)):
                    yield path, piece
            except FileNotFoundError as error:
                raise mirror_mark.DamageError(f"{path} is missing") from error

    def _step_path(self, step: int) -> str:
        return layout.step_path(self.where, step)


def _stat(file: pathlib.Path) -> tuple[int, ...]:
    """What changes with a file; empty for none."""
    with contextlib.suppress(FileNotFoundError):
        stat = file.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
    return ()


def _read_mark(file: pathlib.Path, *, step: int) -> mirror_mark.Mark | None:
    with contextlib.suppress(FileNotFoundError, mirror_mark.MirrorError):
        mark = mirror_mark.decode(file.read_bytes(), source=str(file))
        return mark if mark.step == step else None
    return None


def _unmark(step_path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(step_path, mirror_mark.MARK_FILE))


def _write_mark(path: pathlib.Path, mark: mirror_mark.Mark) -> None:
    """Makes it durable; it is there whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    with new.open("xb") as file:
        file.write(mirror_mark.encode(mark))
        file.flush()
        _make_durable(file.fileno())
    new.rename(path)
    durable.sync_folder(path.parent)


def _copy(origin: str, path: str, *, pace: mirror_mark.Pace) -> str:
    """Copies one file durably and reads it back; the sha256 of its bytes.

    Raises:
        MirrorError: the copy is not what was written.
        OSError: a file cannot be read or written.
    """
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for piece in mirror_mark.read_pieces(origin):
            pace.spend(len(piece))
            digest.update(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        _make_durable(file.fileno())
    again = hashlib.sha256()
    for piece in mirror_mark.read_pieces(path):
        pace.spend(0)
        again.update(piece)
    if again.digest() != digest.digest():
        raise mirror_mark.MirrorError(f"{path} does not read back as it was written")
    return digest.hexdigest()


def _make_durable(fd: int) -> None:
    """On the disk, read-only, and no longer in memory: who reads, reads the disk."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    os.fchmod(fd, mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    os.fsync(fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _remove(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def is_same_folder(target: FolderTarget, root: str) -> bool:
    """Whether the mirror is the root itself, whatever its name."""
    with contextlib.suppress(OSError):
        return os.path.samefile(target.where, root)
    return False
