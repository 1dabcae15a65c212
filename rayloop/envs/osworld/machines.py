"""OSWorld's machines on this node: each has a process in OSWorld's Python, a lock against sharing, and rest after a failure."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rayloop.config.settings import local_path
from rayloop.core.failures import InfrastructureFailure
from rayloop.envs.frames import Channel, Gone, Header, Late, Refused
from rayloop.envs.osworld.settings import OSWorldSettings

START = "import sys; sys.path.append(sys.argv[2]); from rayloop.envs.osworld.server import main; main()"
CLOSING = 30.0
"""Seconds in which OSWorld stops a machine before its process is killed."""


class MachineLost(InfrastructureFailure):
    """A machine, or OSWorld's process, raised, ended or did not answer: never a result, and never a reward."""


class Machine:
    """One machine with its process, which boots it. Raises MachineLost."""

    def __init__(self, settings: OSWorldSettings, number: int, lock: IO[str]) -> None:
        self.number, self.lock = number, lock
        folder = local_path(settings.cache) / f"machine-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        program = [str(local_path(settings.python)), "-c", START, str(theirs.fileno()), str(Path(__file__).parents[3])]
        try:
            with theirs, open(folder / "log.txt", "ab") as log:
                self._process = subprocess.Popen(
                    program, pass_fds=(theirs.fileno(),), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise MachineLost(f"OSWorld's Python does not start: {error}") from error
        self.log = folder / "log.txt"
        options = {
            "provider_name": settings.provider,
            "action_space": "pyautogui",
            "screen_size": [settings.width, settings.height],
            "cache_dir": str(folder / "cache"),  # the members of a group would write to one folder otherwise
            "require_a11y_tree": False,
            **settings.options,
            **(settings.each[number % len(settings.each)] if settings.each else {}),
        }
        try:
            self.ask("make", settings.boot_timeout, options=options)
        except BaseException:
            self.kill()
            raise

    def ask(self, op: str, seconds: float, **arguments: Any) -> tuple[Header, bytes]:
        """One call of the server (``server.py``). Raises MachineLost."""
        try:
            return self._channel.ask(op, seconds, **arguments)
        except (Refused, Gone, Late) as error:
            raise MachineLost(f"machine {self.number}: {op}: {error} (its log: {self.log})") from error

    def close(self) -> None:
        with suppress(MachineLost):
            self.ask("close", CLOSING)
        self.kill()

    def kill(self) -> None:
        self._channel.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Machines:
    """Those of this process that are up and idle, and the claims on those of the node. For many threads."""

    def __init__(self, settings: OSWorldSettings) -> None:
        self._settings = settings
        self._idle: list[Machine] = []
        self._guard = threading.Lock()
        self._folder = local_path(settings.cache)
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, until: float, avoid: frozenset[int] = frozenset()) -> Machine:
        """One that is up, or a new one, not of those to ``avoid`` unless all others are taken. Raises MachineLost at ``until``."""
        while True:
            for avoided in (avoid, frozenset[int]()):
                with self._guard:
                    for machine in self._idle:
                        if machine.number not in avoided:
                            self._idle.remove(machine)
                            return machine
                for number in range(self._settings.machines):
                    if number not in avoided and (lock := self._claim(number)) is not None:
                        return self._boot(number, lock)
            if time.monotonic() > until:
                raise MachineLost(f"none of the {self._settings.machines} machines became free in time")
            time.sleep(0.05)

    def give(self, machine: Machine) -> None:
        with self._guard:
            self._idle.append(machine)

    def discard(self, machine: Machine, rest: float) -> None:
        """Kill it; nobody takes its number for ``rest`` seconds."""
        machine.kill()
        self._rest(machine.lock, rest)

    def end(self) -> None:
        while self._idle:
            machine = self._idle.pop()
            machine.close()
            machine.lock.close()

    def _boot(self, number: int, lock: IO[str]) -> Machine:
        try:
            return Machine(self._settings, number, lock)
        except BaseException:
            self._rest(lock, self._settings.back_off)
            raise

    def _claim(self, number: int) -> IO[str] | None:
        """The claim ends with this process, however that ends."""
        lock = open(self._folder / f"machine-{number}.lock", "a+", encoding="utf-8")  # noqa: SIM115
        with suppress(OSError, ValueError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.seek(0)
            if time.time() >= json.loads(lock.read() or "0"):
                return lock
        lock.close()
        return None

    def _rest(self, lock: IO[str], seconds: float) -> None:
        lock.truncate(0)
        lock.write(json.dumps(time.time() + seconds))
        lock.close()


_all: dict[str, Machines] = {}
_made = threading.Lock()


def machines_of(settings: OSWorldSettings) -> Machines:
    """Those of this process, shared by all episodes with equal settings."""
    with _made:
        return _all.setdefault(settings.model_dump_json(), Machines(settings))
