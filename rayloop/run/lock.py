"""The lock of a run folder: one live process per run name, recovered by itself when that process is gone.

``run.lock`` names its holder; an empty file means nobody. It is judged and rewritten under ``flock``, so two processes
that start at the same moment cannot both win. A holder on this host is looked up exactly (pid, start time and boot id);
one on another host counts as gone when its heartbeat (the file's modification time) has stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from rayloop.core.failures import RunNameInUse

HEARTBEAT = 15.0
"""Seconds between two signs of life."""
SILENCE = 120.0
"""Seconds without a sign of life after which a holder on another host counts as gone."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, such that no other process is ever equal to it. ``started`` is its creation time in Unix seconds."""

    pid: int
    host: str
    boot_id: str
    started: float

    @classmethod
    def this_process(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), _boot_id(), psutil.Process().create_time())

    def gone(self, silence: float) -> bool:
        """Whether the process has ended, as far as can be told here. ``silence``: seconds since its last heartbeat."""
        if self.host != socket.gethostname():
            return silence > SILENCE
        if self.boot_id != _boot_id():
            return True
        try:
            process = psutil.Process(self.pid)
            return bool(process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.started) > 1)
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Held from ``acquire`` to ``release``, with a heartbeat in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stopped = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self) -> Holder | None:
        """Take the lock; its parent folder exists. Returns the dead holder it was recovered from, if any.

        Raises RunNameInUse while another process holds it.
        """
        me = Holder.this_process()
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            silence = _now(self.path.parent) - os.fstat(file.fileno()).st_mtime
            former = _read(file)
            if former is not None and former != me and not former.gone(silence):
                raise RunNameInUse(
                    f"{self.path.parent} belongs to a live run ({former}). Choose another name, or end that run first."
                    + ("" if former.host == me.host else f" If it is gone, wait {SILENCE:.0f} s and start again.")
                )
            _write(file, json.dumps(asdict(me)))
        self._stopped.clear()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._heart.start()
        return former

    def release(self) -> None:
        """Leave the lock empty, if this process holds it; also when ``acquire`` was interrupted."""
        self._stopped.set()
        if self._heart is not None and self._heart.is_alive():
            self._heart.join()
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _read(file) == Holder.this_process():
                _write(file, "")

    def holder(self) -> Holder | None:
        """Who holds it and lives, as far as can be told here; None when nobody does. Takes nothing, and waits for nobody."""
        try:
            with self.path.open() as file:
                holder, beat = _read(file), os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        return None if holder is None or holder.gone(time.time() - beat) else holder

    def heartbeat(self) -> float | None:
        """When its holder last gave a sign of life, in Unix seconds of the file's clock; None when nobody holds it."""
        try:
            beat = self.path.stat()
        except OSError:
            return None
        return beat.st_mtime if beat.st_size else None

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            with suppress(OSError):  # a file server that restarts: the next beat may come through
                os.utime(self.path)


def _read(file: IO[str]) -> Holder | None:
    """The holder in the file; None when it is empty or was torn while being written."""
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (json.JSONDecodeError, TypeError):
        return None


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _now(folder: Path) -> float:
    """The file system's time: hosts that share it may disagree about the clock."""
    probe = folder / f".clock-{socket.gethostname()}-{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
