"""Atomic writes, files with checksums, and files that no other user may have made or read."""

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
from typing import IO, Any

import yaml
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

ROOT_USER_ID = 0
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads plain data. The one in C is missing where PyYAML was built without libyaml."""
_CHUNK_BYTES = 2**22
"""Bytes that are read at once."""


def yaml_data(path: Path) -> Any:
    """The plain data of a YAML file. Raises OSError, UnicodeDecodeError, yaml.YAMLError."""
    return yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER)


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
    """The number of a file's bytes (``size``), and their CRC-32."""

    size: int = 0
    crc32: int = 0

    def then(self, data: bytes | memoryview) -> "Checksum":
        """The checksum of the same bytes followed by ``data``."""
        return Checksum(self.size + memoryview(data).nbytes, isal_zlib.crc32(data, self.crc32))


def summed(file: IO[bytes]) -> Checksum:
    """The checksum of the bytes from the file's position on. Raises OSError."""
    total = Checksum()
    for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
        total = total.then(chunk)
    return total


def check_sum(name: str, file: IO[bytes], expected: Checksum) -> None:
    """Read all of ``file`` and return to its beginning.

    Raises Damaged, with its ``name``, unless it holds what was written.
    """
    actual = summed(file)
    if actual != expected:
        raise Damaged(
            name,
            f"{actual.size:,} bytes with the CRC-32 {actual.crc32:08x} were found, "
            f"{expected.size:,} with {expected.crc32:08x} were written",
        )
    file.seek(0)


def write_whole(path: Path, data: bytes, *, mode: int | None = None, durable: bool = True) -> None:
    """Replace a file: a reader sees the old content or the new one, never a part.

    ``mode`` overrides the umask. ``durable``: it is on the disk under its name when this returns.
    Raises OSError, with the old content still there unless only the sync of the folder failed.
    """
    new_file = _temporary_name(path)
    try:
        _write_new(new_file, data, mode, durable)
        # The rename is atomic within a file system, which
        # is why the new file is in the same folder.
        os.replace(new_file, path)
    except BaseException:
        new_file.unlink(missing_ok=True)
        raise
    if durable:
        # POSIX makes a rename durable only with a sync of its folder.
        sync(path.parent)


def _temporary_name(path: Path) -> Path:
    """The name of a new file in the same folder.

    It is random, since two threads, or two containers whose processes have one number, may write
    the same file at once.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write_new(path: Path, data: bytes, mode: int | None, durable: bool) -> None:
    """Write a file that does not exist yet.

    ``mode`` and ``durable`` mean what they mean in ``write_whole``. Raises OSError.
    """
    creation_mode = 0o666 if mode is None else mode
    with open(path, "xb", opener=lambda path, flags: os.open(path, flags, creation_mode)) as file:
        file.write(data)
        if mode is not None:
            # The umask cuts the mode of ``open``.
            os.fchmod(file.fileno(), mode)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def needed(path: Path) -> Iterator[None]:
    """A context for a file that the run needs: StorageFailed replaces OSError.

    The message has the free bytes of the storage.
    """
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            error.add_note(f", with {shutil.disk_usage(path.parent).free:,} bytes free")
        notes = "".join(getattr(error, "__notes__", ()))
        raise StorageFailed(
            f"{error.filename or path} cannot be used: {error.strerror or error}{notes}. Make room"
            " or repair the storage, and start again: the run continues from its newest checkpoint"
        ) from error


def appears(path: Path, within: float) -> bool:
    """Whether the file exists, or appears ``within`` seconds.

    A network file system may show an old listing of a folder.
    """
    deadline = time.monotonic() + within
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def linked(source: Path, target: Path) -> None:
    """Make the folder ``target`` at once, with all files of ``source``. Raises OSError.

    The files are hard links where the file system has them.
    """

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            # Some file systems have no hard links, and the source may be on another one.
            shutil.copyfile(file, to)

    new_folder = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(new_folder, ignore_errors=True)
    shutil.copytree(source, new_folder, copy_function=link)
    # The rename makes the folder visible with all of its files, or not at all.
    new_folder.rename(target)


NO_CONTENT = (errno.EINVAL, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.EAGAIN)
"""The error numbers of a device, a pipe, a socket and a file that is too large."""


@contextmanager
def regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A regular file that somebody else may have named.

    A device or a pipe would have no end, and may do something when it is opened. Raises OSError,
    with EINVAL for anything but a regular file.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer that may never come.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        # The open descriptor is examined: the path could be another file by then.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        yield file


def content(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a ``regular`` file. Raises OSError, with EFBIG for more than ``most`` bytes."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more than allowed is read, since a file may grow after its size was read.
        data = b"" if size > most else file.read(most + 1)
        if size > most or len(data) > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes")
        return data


def size_of(file: Path) -> int | None:
    """The bytes of a file; None when unknown."""
    with suppress(OSError):
        return file.stat().st_size
    return None


def size_below(folder: Path) -> int:
    """The bytes of all files in a folder; 0 when unknown."""
    with suppress(OSError):
        return sum(size_of(file) or 0 for file in folder.rglob("*") if file.is_file())
    return 0


def unused(path: Path) -> Path:
    """``path``, or the first of path-1, path-2, ... that does not exist. Raises OSError."""
    return first_unused(path, "-") if path.exists() else path


def first_unused(path: Path, suffix: str) -> Path:
    """``path`` with the suffix and the first number from 1 that no file has. Raises OSError."""
    candidates = (path.with_name(f"{path.name}{suffix}{number}") for number in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def kind_of(*errors: BaseException, saving: bool = False) -> type[CheckpointError]:
    """CheckpointStorageFailed when the storage refused, else CheckpointError.

    With CheckpointError a file is missing or holds something else. During ``saving`` a missing
    folder is one that existed: its storage is not mounted.
    """
    if any(refused(error, saving) for error in errors):
        return CheckpointStorageFailed
    return CheckpointError


STORAGE_RETRY_AFTER_S = 5.0
"""Seconds until storage that refused is tried again."""


def refused(error: BaseException, saving: bool = False) -> bool:
    """Whether the storage did not answer, which says nothing about its files."""
    if isinstance(error, OSError | CheckpointStorageFailed):
        return saving or not isinstance(error, FileNotFoundError)
    # torch raises its own errors while it handles the system's.
    cause = error.__cause__ or error.__context__
    return cause is not None and refused(cause, saving)


def mount_of(path: Path) -> Path:
    """The mount point of the file system that ``path`` is on, or would be on."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if os.path.ismount(folder))


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
    """Raises ConfigError when other users own a file or folder, or may write or read it.

    Root's files are everybody's. ``others`` are the forbidden bits of the mode: 0o022 to write it,
    0o077 to read it as well. Raises OSError when it is missing.
    """
    status = os.stat(path)
    if status.st_uid not in (os.geteuid(), ROOT_USER_ID):
        raise ConfigError(
            f"{what} {path} belongs to user {status.st_uid}, and only your own is believed (you are"
            f" {os.geteuid()})"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & others:
        verb, right = ("read", "go-rwx") if others & 0o044 else ("write", "go-w")
        raise ConfigError(
            f"{what} {path} has mode {mode:o}; others must not {verb} it: chmod {right} {path}"
        )


def new_secret(path: Path, what: str) -> Path:
    """Write a secret readable by its owner only, unless one that is ``trusted`` exists.

    The file appears with its content, and of several processes that call this at once, the first
    one decides the secret. Raises ConfigError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new_file = _temporary_name(path)
    try:
        with suppress(FileNotFoundError):
            trusted(path, what, 0o077)
            if path.stat().st_size:
                return path
            # An empty file holds no secret. Another process may have put one in its
            # place by now: the file that this rename takes is examined once more.
            path.rename(new_file)
            if not new_file.stat().st_size:
                new_file.unlink()
        if not new_file.exists():
            _write_new(new_file, secrets.token_urlsafe(32).encode(), 0o600, durable=True)
        try:
            # Unlike a rename, a link never replaces the secret of another process.
            os.link(new_file, path)
        except FileExistsError:
            trusted(path, what, 0o077)
        except OSError:
            # Some file systems have no hard links.
            os.replace(new_file, path)
    finally:
        new_file.unlink(missing_ok=True)
    return path


def utf8(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that has no other half.

    A text that was cut in the middle of an emoji has such a half. UTF-8 cannot encode it, so that
    no file, socket or terminal accepts it. Two halves become their character.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
