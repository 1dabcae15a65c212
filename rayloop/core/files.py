"""Files that are written whole or not at all, files with checksums, and files that no other user
may have made or read.
"""

import errno
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from isal import isal_zlib  # zlib's CRC-32, several times faster

from rayloop.core.failures import (
    CheckpointError,
    CheckpointStorageFailed,
    ConfigError,
    Damaged,
    StorageFailed,
)

if sys.platform != "win32":
    import fcntl

ROOT = 0
PIECE = 2**22
"""Bytes that are read at once."""


def lock_file(file: IO[str], *, wait: bool = False) -> None:
    """Take the file's lock (flock).

    Raises BlockingIOError while another holds it, unless ``wait``; OSError (``ENOSYS``) where the
    system has no flock (Windows).
    """
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "no flock")
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True, slots=True)
class Checksum:
    """Of a file's bytes: how many they are (``size``), and their CRC-32."""

    size: int = 0
    crc32: int = 0

    def then(self, data: bytes | memoryview) -> "Checksum":
        """With ``data`` after them."""
        return Checksum(self.size + memoryview(data).nbytes, isal_zlib.crc32(data, self.crc32))


def summed(file: IO[bytes]) -> Checksum:
    """Of what is left to read in ``file``. Raises OSError."""
    total = Checksum()
    while piece := file.read(PIECE):
        total = total.then(piece)
    return total


def check_sum(name: str, file: IO[bytes], expected: Checksum) -> None:
    """Read all of ``file`` and return to its beginning.

    Raises Damaged, with its ``name``, unless it holds what was written.
    """
    found = summed(file)
    if found != expected:
        raise Damaged(
            name,
            f"{found.size:,} bytes with the CRC-32 {found.crc32:08x} are there, "
            f"{expected.size:,} with {expected.crc32:08x} were written",
        )
    file.seek(0)


def write_whole(path: Path, data: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Replace a file: a reader sees the old content or the new one, never a part.

    ``mode`` overrides the umask. ``durable``: it is on the disk under its name when this returns.
    Raises OSError, with the old content still there unless only the sync of the folder failed.
    """
    aside = _beside(path)
    try:
        _write_new(aside, data, mode, durable)
        # The rename is atomic within a file system, which
        # is why the new file is in the same folder.
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        # POSIX makes a rename durable only with a sync of its folder.
        sync(path.parent)


def _beside(path: Path) -> Path:
    """The name of a new file in the same folder.

    It is random, since two threads, or two containers whose processes have one number, may write
    the same file at once.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write_new(path: Path, data: bytes, mode: int | None, durable: bool) -> None:
    """Write a file that does not exist yet.

    ``mode`` and ``durable`` are those of ``write_whole``. Raises OSError.
    """
    with open(
        path, "xb", opener=lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode)
    ) as file:
        file.write(data)
        if mode is not None:
            # The umask cuts the mode of ``open``.
            os.fchmod(file.fileno(), mode)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def needed(path: Path) -> Iterator[None]:
    """For what a run cannot begin or go on without: raises StorageFailed, with the room that is
    left, instead of OSError.
    """
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            error.add_note(f", with {shutil.disk_usage(path.parent).free:,} bytes free")
        raise StorageFailed(
            f"{error.filename or path} cannot be used:"
            f" {error.strerror or error}{''.join(getattr(error, '__notes__', ()))}. Make room or"
            " repair the storage, and start again: the run goes on from its newest checkpoint"
        ) from error


def appears(path: Path, within: float) -> bool:
    """Whether the file is there, or comes within so many seconds: a network file system may keep
    what it knew of a folder.
    """
    deadline = time.monotonic() + within
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def linked(source: Path, target: Path) -> None:
    """Make the folder ``target`` whole at once, with the files of ``source``, as links where there
    are some. Raises OSError.
    """

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            # Some file systems have no hard links, and the source may be on another one.
            shutil.copyfile(file, to)

    aside = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside, copy_function=link)
    # The rename makes the folder visible with all of its files, or not at all.
    aside.rename(target)


NO_CONTENT = (errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.EAGAIN)
"""What ``content`` and the system say of a device, a pipe, a socket and what is too large."""


@contextmanager
def regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A regular file that somebody else may have named: a device or a pipe would have no end, and
    may do something when it is opened. Raises OSError, with EINVAL for what is no regular file.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        # The open descriptor is asked: the path could be another file by then.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def content(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a ``regular`` file. Raises OSError, with EFBIG for more than ``most`` bytes."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more than allowed is read, since a file may grow after its size was asked.
        data = b"" if size > most else file.read(most + 1)
        if size > most or len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes")
        return data


def size_of(file: Path) -> int | None:
    """Its bytes; None when that is unknown."""
    with suppress(OSError):
        return file.stat().st_size
    return None


def size_below(folder: Path) -> int:
    """The bytes of all files in it; 0 when that is unknown."""
    with suppress(OSError):
        return sum(size_of(file) or 0 for file in folder.rglob("*") if file.is_file())
    return 0


def unused(path: Path) -> Path:
    """``path``, or the first of path-1, path-2, ... that is not there. Raises OSError."""
    named = (path.with_name(f"{path.name}{'-' * (n > 0)}{n or ''}") for n in count())
    return next(one for one in named if not one.exists())


def kind_of(*errors: BaseException, saving: bool = False) -> type[CheckpointError]:
    """CheckpointStorageFailed when the storage refused, else CheckpointError (a file is missing or
    holds something else). Where one is ``saving``, what is missing is a folder that was there: its
    storage is not mounted.
    """
    return (
        CheckpointStorageFailed
        if any(refused(error, saving) for error in errors)
        else CheckpointError
    )


RETRY = 5.0
"""Seconds until storage that refused is asked again."""


def refused(error: BaseException, saving: bool = False) -> bool:
    """Whether the storage did not answer, which says nothing about what is there."""
    if isinstance(error, OSError | CheckpointStorageFailed):
        return saving or not isinstance(error, FileNotFoundError)
    below = (
        error.__cause__ or error.__context__
    )  # torch raises errors of its own while it handles the system's
    return below is not None and refused(below, saving)


def mount_of(path: Path) -> Path:
    """Where the file system is mounted that ``path`` is on, or would be on."""
    return next(
        folder for folder in (path.absolute(), *path.absolute().parents) if os.path.ismount(folder)
    )


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # With EINVAL a file system says that it has no sync of folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def trusted(path: Path, what: str, others: int = 0o022) -> None:
    """Raises ConfigError when a file or folder is another user's (root's are everybody's), or when
    its mode allows others one of ``others``: 0o022 to write it, 0o077 to read it as well. OSError
    when it is not there.
    """
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), ROOT):
        raise ConfigError(
            f"{what} {path} belongs to user {found.st_uid}, and only your own is believed (you are"
            f" {os.geteuid()})"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & others:
        verb, right = ("read", "go-rwx") if others & 0o044 else ("write", "go-w")
        raise ConfigError(
            f"{what} {path} has mode {mode:o}; others must not {verb} it: chmod {right} {path}"
        )


def new_secret(path: Path, what: str) -> Path:
    """Write a secret readable by its owner only, unless one that is ``trusted`` is there.

    The file appears with its content, and of several processes that call this at once, the first
    one decides the secret. Raises ConfigError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _beside(path)
    try:
        with suppress(FileNotFoundError):
            trusted(path, what, 0o077)
            if path.stat().st_size:
                return path
            # An empty file holds no secret. Another process may have put one in its
            # place by now: the file that this rename takes is looked at once more.
            path.rename(aside)
            if not aside.stat().st_size:
                aside.unlink()
        if not aside.exists():
            _write_new(aside, secrets.token_urlsafe(32).encode(), 0o600, durable=True)
        try:
            # Unlike a rename, a link never replaces the secret of another process.
            os.link(aside, path)
        except FileExistsError:
            trusted(path, what, 0o077)
        except OSError:
            # Some file systems have no hard links.
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def utf8(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, as in a text that
    was cut in the middle of an emoji: it has no form in UTF-8, so no file, socket or terminal takes
    it. Two halves become their character.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
