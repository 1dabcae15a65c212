"""OSWorld's machines on this node.

Each has a process in OSWorld's Python, a lock against sharing, and rests after a failure.
"""

import fcntl
import functools
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from rayloop.config.settings import local_path
from rayloop.core.failures import InfrastructureFailure
from rayloop.envs.grammar.screens import Pointing, ScreenSettings
from rayloop.sandbox.frames import Channel, Header, Refused

START = (
    "import sys; sys.path.append(sys.argv[2]); from rayloop.envs.osworld.server import main; main()"
)
CLOSE_TIMEOUT_S = 30.0
"""Seconds in which OSWorld stops a machine before its process is killed."""


class OSWorldSettings(ScreenSettings):
    """Which machines there are, how OSWorld is started, and how long things may take."""

    python: str
    """The Python of an environment with ``desktop-env``.

    The packages that it pins do not fit rayloop's.
    """
    tasks: str = ""
    """OSWorld's folder ``evaluation_examples/examples``, where a row names a task as domain/id.

    Empty when rows hold tasks.
    """
    provider: str = "docker"
    """What runs the machines: docker, vmware, virtualbox, aws or another provider of OSWorld."""
    machines: int = Field(1, ge=1)
    """Machines of this node at once.

    Raise it with the node's memory: a docker machine takes 4 GB and 4 cores.
    """
    each: tuple[dict[str, Any], ...] = ()
    """Arguments of DesktopEnv for each machine, such as ``path_to_vm``, where they differ.

    There are as many entries as machines.
    """
    options: dict[str, Any] = {}
    """Further arguments of DesktopEnv for all machines: ``region``, ``headless``, ``os_type``..."""
    cache: str = "/tmp/rayloop-osworld"
    """A folder of this node for OSWorld's downloads and logs, with a folder for each machine."""
    results: str = ""
    """A folder that all nodes see, for the results of evaluations; empty for none.

    It gets each task's ``DOMAIN/ID/result.txt`` and ``traj.jsonl`` as OSWorld's scripts write them;
    its show_result.py reads ``RESULTS/pyautogui/screenshot/MODEL``.
    """
    width: int = Field(1920, ge=640)
    """Pixels of the machines' screen from left to right; OSWorld's tasks were made for 1920."""
    height: int = Field(1080, ge=480)
    """Pixels of the machines' screen from top to bottom; OSWorld's tasks were made for 1080."""
    pointing: Pointing = Pointing(min_pixels=3136, max_pixels=2_116_800)
    """Unit of the model's coordinates, and how its processor resizes a screenshot.

    The default is ARPO's.
    """
    pause: float = Field(0.5, ge=0)
    """Seconds that OSWorld waits after each action before the screenshot.

    It is 0.5 in ARPO, 2 in OSWorld's runs.
    """
    attempts: int = Field(4, ge=1)
    """Resets of an episode before it counts as failed, each on another machine if one is free."""
    back_off: float = Field(5.0, ge=0)
    """Seconds before the second attempt, doubled for each later one.

    A machine that failed rests as long.
    """
    boot_timeout: float = Field(600.0, gt=0)
    """Seconds in which a machine must boot. Raise it without /dev/kvm, where machines are slow."""
    reset_timeout: float = Field(300.0, gt=0)
    """Seconds for one reset of a machine.

    All attempts and boots together must fit into ``episode.step_timeout``.
    """
    step_timeout: float = Field(90.0, gt=0)
    """Seconds for one action, its screenshot included.

    Keep the turn's sum below ``episode.step_timeout``.
    """
    evaluate_timeout: float = Field(300.0, gt=0)
    """Seconds for OSWorld's check of the result. Keep it below ``episode.step_timeout``."""


class MachineLost(InfrastructureFailure):
    """A machine, or OSWorld's process, raised, ended or did not answer.

    It is never a result, and never a reward.
    """


class OSWorldMissing(MachineLost):
    """The Python that should have OSWorld does not exist, or does not have it.

    No attempt and no machine of this node helps.
    """

    exit_code = 2


@functools.cache
def installed(python: str) -> None:
    """Raises OSWorldMissing unless that Python starts and has ``desktop-env``."""
    program = "import importlib.util as u; raise SystemExit(u.find_spec('desktop_env') is None)"
    try:
        process = subprocess.run(
            [python, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
        reason = "has no desktop_env" if process.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"does not start ({getattr(error, 'strerror', None) or error})"
    if reason:
        raise OSWorldMissing(
            f"{python} {reason}. `python -m venv DIR && DIR/bin/pip install desktop-env`, then set "
            "environment.episode.environment.with.python=DIR/bin/python (docs/environments.md)"
        )


class Machine:
    """One machine with its process, which boots it.

    ``lock``: the claim of this process on its number. Raises MachineLost.
    """

    def __init__(self, settings: OSWorldSettings, number: int, lock: IO[str]) -> None:
        self._number = number
        self.lock = lock
        folder = local_path(settings.cache) / f"machine-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        host_end, server_end = socket.socketpair()
        self._channel = Channel(host_end)
        self._log = folder / "log.txt"
        program = [
            str(local_path(settings.python)),
            "-c",
            START,
            str(server_end.fileno()),
            str(Path(__file__).parents[3]),
        ]
        try:
            with server_end, open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    program,
                    pass_fds=(server_end.fileno(),),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            host_end.close()
            raise MachineLost(f"OSWorld's Python does not start: {error}") from error
        options = {
            "provider_name": settings.provider,
            "action_space": "pyautogui",
            "screen_size": [settings.width, settings.height],
            # The members of a group would write to one folder otherwise.
            "cache_dir": str(folder / "cache"),
            "require_a11y_tree": False,
            **settings.options,
        }
        if settings.each:
            options |= settings.each[number % len(settings.each)]
        try:
            self.ask("make", settings.boot_timeout, options=options)
        except BaseException:
            self.kill()
            raise

    def ask(self, op: str, seconds: float, **arguments: Any) -> tuple[Header, bytes]:
        """Call the server (``server.py``); returns its answer, and the screenshot if any.

        Raises MachineLost.
        """
        try:
            header, blobs = self._channel.ask(op, seconds, **arguments)
        except (Refused, OSError) as error:
            raise MachineLost(
                f"machine {self._number}: {op}: {error} (its log: {self._log})"
            ) from error
        return header, b"".join(blobs)

    def close(self) -> None:
        """Let OSWorld stop the machine, then end its process."""
        with suppress(MachineLost):
            self.ask("close", CLOSE_TIMEOUT_S)
        self.kill()
        self.lock.close()

    def kill(self) -> None:
        """End the process with all that it started."""
        self._channel.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Machines:
    """The idle machines of this process, and its claims on the node's numbers. For many threads."""

    def __init__(self, settings: OSWorldSettings) -> None:
        self._settings = settings
        self._idle: list[Machine] = []
        self._folder = local_path(settings.cache)
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, until: float) -> Machine:
        """Return a machine that is up, or a new one; machines that failed come last.

        Raises MachineLost at ``until`` (on the monotonic clock).
        """
        files = [
            self._folder / f"machine-{number}.lock" for number in range(self._settings.machines)
        ]
        while True:
            with suppress(IndexError):
                return self._idle.pop()
            for file in sorted(files, key=_last_failure):
                lock = _claimed(file)
                if lock is None:
                    continue
                try:
                    return Machine(self._settings, files.index(file), lock)
                except BaseException:
                    _rest(lock, self._settings.back_off)
                    raise
            if time.monotonic() > until:
                raise MachineLost(
                    f"none of the {self._settings.machines} machines became free in time"
                )
            time.sleep(0.05)

    def give(self, machine: Machine) -> None:
        """Keep a machine for the next episode."""
        self._idle.append(machine)

    def discard(self, machine: Machine, seconds: float) -> None:
        """Kill a machine; its number is not taken again for ``seconds``."""
        machine.kill()
        _rest(machine.lock, seconds)

    def end(self) -> None:
        """Stop all idle machines."""
        while self._idle:
            self._idle.pop().close()


def _last_failure(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _claimed(file: Path) -> IO[str] | None:
    """Return the lock of a machine that is free and does not rest, else None."""
    lock = open(file, "a", encoding="utf-8")  # noqa: SIM115
    with suppress(OSError):
        # The kernel gives the lock back when this process ends, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A machine that failed rests: the time of its file is then in the future (``_rest``).
        if time.time() >= os.fstat(lock.fileno()).st_mtime:
            return lock
    lock.close()
    return None


def _rest(lock: IO[str], seconds: float) -> None:
    rests_until = time.time() + seconds
    os.utime(lock.fileno(), (rests_until, rests_until))
    lock.close()


_machines: dict[str, Machines] = {}
_machines_lock = threading.Lock()


def machines_of(settings: OSWorldSettings) -> Machines:
    """Return the machines of this process, shared by all episodes with equal settings."""
    with _machines_lock:
        return _machines.setdefault(settings.model_dump_json(), Machines(settings))
