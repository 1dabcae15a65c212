"""The lock of a run folder.

``run.lock`` names the holder, rewritten under ``flock`` or a file that only one can create. A
holder that this process can see is looked up; another's heartbeat (the file's time) stops. Writers
compare the number in ``run.fence`` first.
"""

import collections.abc
import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Self

import psutil

from rayloop.core.failures import ConfigError, RunNameInUse, RunTaken
from rayloop.core.files import lock_file, mount_of, write_whole

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 15.0
"""Seconds between two signs of life."""
HOLDER_LOST_AFTER_S = 120.0
"""Seconds without a sign of life after which a holder that cannot be seen from here counts as
ended.
"""
JUDGE_TIMEOUT_S = 30.0
"""Seconds that others may take to judge and rewrite the file; one that was created instead of a
flock is left over after them.
"""
JUDGE_POLL_INTERVAL_S = 0.1
"""Seconds between two tries to judge the file."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at a holder that cannot be seen."""
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Holder:
    """A process, such that no other process is ever equal to it.

    ``started`` is its creation time in Unix seconds; ``pids`` names its PID namespace ("" in a lock
    that an earlier version wrote): containers of one host may share all else, even the pid.
    """

    pid: int
    host: str
    boot_id: str
    started: float
    pids: str = ""

    @classmethod
    def this_process(cls) -> Self:
        """The process that calls."""
        return cls(
            os.getpid(),
            socket.gethostname(),
            _boot_id(),
            psutil.Process().create_time(),
            _pid_namespace(),
        )

    def lives(self) -> bool | None:
        """Whether the process runs; None when that cannot be seen from here.

        It then belongs to another host, container or boot (two hosts may have one name), or /proc
        hides it.
        """
        if (
            self.host != socket.gethostname()
            or self.boot_id != _boot_id()
            or self.pids != _pid_namespace()
        ):
            return None
        try:
            process = psutil.Process(self.pid)
            # A creation time follows from the boot time, which
            # moves with the clock: a second of tolerance.
            return bool(
                process.status() != psutil.STATUS_ZOMBIE
                and abs(process.create_time() - self.started) <= 1
            )
        except psutil.NoSuchProcess:
            return None if _hidden(self.pid) else False

    def is_dead(self, silence: float) -> bool:
        """Whether the process has ended, as seen from this machine.

        ``silence``: seconds since its last heartbeat.
        """
        lives = self.lives()
        return silence > HOLDER_LOST_AFTER_S if lives is None else not lives

    def __str__(self) -> str:
        apart = self.host == socket.gethostname() and self.pids not in ("", _pid_namespace())
        return f"process {self.pid} on {self.host}{', in another container' if apart else ''}"


@dataclass(frozen=True)
class Fence:
    """Keeps a holder that was replaced from writing.

    It compares the holder's number with that of the newest. ``home``: device and inode of the run's
    folder at the start, which was on the storage that was mounted at ``mount``.
    """

    path: Path
    number: int
    home: tuple[int, int] = (0, 0)
    mount: str = ""

    def here(self) -> Self:
        """The same with the run's folder as this process sees it now. Raises OSError."""
        return replace(self, home=_place(self.path.parent), mount=str(mount_of(self.path.parent)))

    def check(self) -> None:
        """Raises RunTaken when another process has taken the run since.

        Raises OSError when the file cannot be read, and FileNotFoundError when the run's folder is
        another one than at the start, or is missing.
        """
        if not self.number:
            return
        newest = _newest(self.path)
        # Numbers only grow. A mount that came back may have another device, and a file system in
        # user space another inode.
        if newest < self.number or (self.mount and _differ(_place(self.path.parent), self.home)):
            why = (
                "the run's folder is not there, or not the one that it was at the start: is its"
                f" storage mounted at {self.mount}?"
            )
            raise FileNotFoundError(errno.ENOENT, why, str(self.path.parent))
        if newest != self.number:
            raise RunTaken(
                f"{self.path.parent} was taken over by another process (start {newest}, this one is"
                f" {self.number}), while this one gave no sign of life. Nothing was written since;"
                " the other one continues from the newest checkpoint"
            )


OPEN = Fence(Path(), 0)
"""The fence of a folder that nobody else can take: its check passes."""


class RunLock:
    """Held from ``acquire`` to ``release``, with a heartbeat in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fence = Fence(path.absolute().with_suffix(".fence"), 0)
        """The holder's fence, once ``acquire`` has returned.

        It is absolute, since the driver, which has it too, works in another folder.
        """
        self.taken = threading.Event()
        """Set when the heartbeat has found another holder; this one must end."""
        self._renewing = threading.Lock()
        self._stopped = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self) -> Holder | None:
        """Take the lock; its parent folder exists.

        Returns the dead holder if there was one; waits up to ``HOLDER_LOST_AFTER_S`` for a holder
        that cannot be seen from here. Raises RunNameInUse, and ConfigError when the file system
        does not answer.
        """
        me = Holder.this_process()
        last_beat = 0.0  # the heartbeat at the last look at a holder that cannot be seen
        while True:
            with _alone(self.path) as file:
                beat = os.fstat(file.fileno()).st_mtime
                former = _read(file)
                if former is None or former == me or former.is_dead(_now(self.path.parent) - beat):
                    # The fence before the holder: a crash between them only skips a number.
                    self._raise_fence()
                    _write(file, json.dumps(asdict(me)))
                    break

            beats = last_beat not in (0.0, beat)
            if former.lives() or beats:
                raise RunNameInUse(
                    f"{self.path.parent} belongs to a live run ({former}). Choose another name, or"
                    " end that run first."
                )

            if not last_beat:
                logger.warning(
                    "%s: waiting, %g s at most, for a sign of life of %s",
                    self.path,
                    HOLDER_LOST_AFTER_S,
                    former,
                )
            last_beat = beat
            # Outside of ``_alone``, so that others can judge the file in the meantime.
            time.sleep(LOOK_INTERVAL_S)

        self._stopped.clear()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._heart.start()
        return former

    def renew(self) -> None:
        """Refuse the former driver of this holder before another one writes.

        The former driver may only be suspended.
        """
        if not self.path.exists():
            return
        # With ``_renewing`` the heartbeat does not compare the old number with the new file.
        with suppress(OSError), _alone(self.path) as file, self._renewing:
            if _read(file) == Holder.this_process():
                self._raise_fence()

    def _raise_fence(self) -> None:
        """Give this holder a number that none has had."""
        try:
            number = _newest(self.fence.path) + 1
        except (
            ValueError
            # a power loss took the file's content: no count of holders comes near the seconds since
            # 1970
        ):
            number = int(time.time())
        write_whole(self.fence.path, str(number).encode())
        self.fence = Fence(self.fence.path, number).here()

    def check(self) -> None:
        """Raises RunTaken when the heartbeat has found another holder."""
        if self.taken.is_set():
            with suppress(OSError):
                self.fence.check()

    def release(self) -> None:
        """Leave the lock empty, if this process holds it; also when ``acquire`` was interrupted."""
        self._stopped.set()
        if self._heart is not None and self._heart.is_alive():
            # A beat after the release would pass for a sign of life of the next holder.
            self._heart.join()
        if (
            not self.path.exists()
        ):  # the storage is not mounted: nothing is written below an empty mount point
            return

        with _alone(self.path) as file:
            if _read(file) == Holder.this_process():
                _write(file, "")

    def holder(self) -> Holder | None:
        """The live holder, as seen from this machine; None when nobody holds it.

        Takes nothing, and waits for nobody.
        """
        try:
            with self.path.open(encoding="utf-8") as file:
                holder = _read(file)
                beat = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        return None if holder is None or holder.is_dead(time.time() - beat) else holder

    def heartbeat(self) -> float | None:
        """When its holder last gave a sign of life, in Unix seconds of the file's clock.

        None when nobody holds it.
        """
        try:
            beat = self.path.stat()
        except OSError:
            return None
        return beat.st_mtime if beat.st_size else None

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_INTERVAL_S):
            try:
                with self._renewing:
                    self.fence.check()
                os.utime(self.path)
            except OSError:  # a file server that restarts: the next beat may come through
                continue
            except RunTaken:
                self.taken.set()
                return


@contextlib.contextmanager
def _alone(path: Path) -> collections.abc.Iterator[IO[str]]:
    """The file, while nobody else has it. Raises ConfigError after twice ``JUDGE_TIMEOUT_S``."""
    deadline = time.monotonic() + 2 * JUDGE_TIMEOUT_S
    with path.open("a+", encoding="utf-8") as file:
        instead: Path | None = None
        while True:
            try:
                if instead is None:
                    lock_file(file)
                else:
                    os.close(os.open(instead, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                break
            except (BlockingIOError, FileExistsError):
                if instead is not None:
                    _remove_left_over(instead)
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{path} is held by a process that judges it, for more than"
                        f" {2 * JUDGE_TIMEOUT_S:g} s: the file system or a host hangs. Look at who"
                        f" has it open{'' if instead is None else f', or remove {instead}'}"
                    ) from None
                time.sleep(JUDGE_POLL_INTERVAL_S)
            except OSError as error:
                if error.errno not in NO_FLOCK or instead is not None:
                    raise
                instead = path.with_suffix(".judging")
        try:
            yield file
        finally:
            if instead is not None:
                instead.unlink(missing_ok=True)


def _remove_left_over(instead: Path) -> None:
    """Remove the file of a process that died while it judged.

    Renaming it first makes sure that only one process removes it.
    """
    mine = instead.with_name(f"{instead.name}.{socket.gethostname()}-{os.getpid()}")

    def old(file: Path) -> bool:
        return _now(file.parent) - file.stat().st_mtime > JUDGE_TIMEOUT_S

    with suppress(OSError):
        if old(instead):
            os.rename(instead, mine)
            if not old(mine):  # another one was quicker, and this is its own
                os.link(mine, instead)
            mine.unlink()


def _place(folder: Path) -> tuple[int, int]:
    """Its device and inode. Raises OSError."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _differ(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return all(a != b for a, b in zip(one, other, strict=True))


def _newest(path: Path) -> int:
    """The number of holders so far; 0 without a file.

    Raises OSError, and ValueError for a file that holds none.
    """
    try:
        return int(path.read_text(encoding="utf-8") or 0)
    except FileNotFoundError:
        return 0


def _read(file: IO[str]) -> Holder | None:
    """The holder in the file; None when it is empty or was torn while being written."""
    file.seek(0)
    try:
        content = json.loads(file.read())
        return Holder(
            **{field.name: content[field.name] for field in fields(Holder) if field.name in content}
        )
    except (ValueError, TypeError):
        return None


def _write(file: IO[str], text: str) -> None:
    # The file is open for appending, so the text begins at 0 after this.
    file.truncate(0)
    file.write(text)
    file.flush()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _pid_namespace() -> str:
    """The PID namespace of this process, such as ``pid:[4026531836]``.

    "" where the kernel does not say.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _hidden(pid: int) -> bool:
    """Whether a process that /proc does not show exists.

    With ``hidepid`` /proc shows none of other users.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _now(folder: Path) -> float:
    """The file system's time: hosts that share it may disagree about the clock."""
    probe = folder / f".clock-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
