"""The host's side of one desktop: starts it in its sandbox, asks its driver, and ends it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import InfrastructureFailure
from rayloop.data.images import png
from rayloop.envs.browser import processes
from rayloop.sandbox import bubblewrap, seccomp
from rayloop.sandbox.frames import Channel, Header, Refused

HOME = "/home/user"
PROGRAMS = {
    "Xvfb": "xvfb",
    "openbox": "openbox",
    "xterm": "xterm",
    "mousepad": "mousepad",
    "pcmanfm": "pcmanfm",
}
"""What a desktop runs -> the Debian package that has it."""
MIB = 1 << 20
PACKAGE = Path(__file__).parents[2]
"""The folder of rayloop."""
EXIT_TIMEOUT_S = 10.0
"""Seconds in which a killed desktop has ended."""
_RC = {
    # Equal states then have equal pixels, and an idle desktop takes no CPU.
    ".config/gtk-3.0/settings.ini": (
        "[Settings]\ngtk-cursor-blink=false\ngtk-enable-animations=false\n"
    ),
    ".gtkrc-2.0": "gtk-cursor-blink = 0\n",
    ".Xdefaults": "XTerm*faceName: DejaVu Sans Mono\nXTerm*faceSize: 12\nXTerm*geometry: 90x28\n",
}
_ENVIRONMENT = {
    "HOME": HOME,
    "USER": "user",
    "SHELL": "/bin/bash",
    "XDG_RUNTIME_DIR": "/run/user",
    "GSETTINGS_BACKEND": "memory",
    "DBUS_SESSION_BUS_ADDRESS": "disabled:",
    "NO_AT_BRIDGE": "1",
    "GTK_A11Y": "none",
    "GDK_BACKEND": "x11",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_SYSTEM = (
    "/etc/xdg",
    "/etc/X11",
    "/etc/gtk-2.0",
    "/etc/gtk-3.0",
    "/etc/mime.types",
    "/var/cache/fontconfig",
)


class DesktopLimits(SettingsModel):
    """How large a desktop is, and how much of the machine it may take."""

    width: int = Field(1280, ge=320, le=4096)
    """Pixels of the screen from left to right.

    Lower it to spend fewer image tokens on each screenshot.
    """
    height: int = Field(800, ge=240, le=4096)
    """Pixels of the screen from top to bottom.

    Lower it to spend fewer image tokens on each screenshot.
    """
    processes: int = Field(128, ge=32)
    """Processes and threads of one desktop, its own dozen included.

    Raise it for tasks whose programs start many.
    """
    memory_mb: int = Field(2048, ge=512)
    """Address space of each process in MiB. Raise it for large programs, with ``total_mb``."""
    total_mb: int = Field(1024, ge=128)
    """MiB of all programs together; beyond it the episode ends as the policy's failure.

    Raise it for office suites.
    """
    home_mb: int = Field(64, ge=1)
    """Megabytes of files in the home folder, which lives in memory.

    Raise it for tasks with large start files.
    """
    start_timeout: float = Field(20.0, gt=0)
    """Seconds in which the desktop, and then each program, must show itself.

    Raise it on busy machines.
    """
    call_timeout: float = Field(15.0, gt=0)
    """Seconds for one action or screenshot; beyond it the desktop counts as lost.

    Raise it on busy machines.
    """


class DesktopLost(InfrastructureFailure):
    """The X server, the driver or the whole desktop ended, or did not answer in time.

    Never a reward: play it again elsewhere.
    """


class DesktopSpoiled(Exception):
    """Programs inside broke the desktop: they ended the window manager, or filled too much memory.

    The policy started them.
    """


@dataclass(frozen=True)
class HomeEntry:
    """A file, a folder or something else in a home.

    ``content`` is None for all but files, and for a file that is too large or unreadable.
    """

    kind: str
    content: bytes | None = None


def missing() -> str:
    """Return the command that installs what a desktop needs and this machine lacks.

    Empty when it lacks nothing.
    """
    needed = {"bwrap": "bubblewrap", **PROGRAMS}
    packages = [package for program, package in needed.items() if not shutil.which(program)]
    if packages:
        return f"apt-get install --no-install-recommends {' '.join(packages)}"
    return 'pip install "rayloop[desktop]"' if find_spec("Xlib") is None else ""


class Desktop:
    """A desktop that lives until ``close``, or until the thread that made it ends.

    Raises DesktopLost when it does not start.
    """

    def __init__(self, limits: DesktopLimits) -> None:
        install_command = missing()
        if install_command:
            raise DesktopLost(f"this machine lacks what a desktop needs: {install_command}")
        self._limits = limits
        # The user of the programs, and the user of X, which they then cannot reach.
        self._users = [bubblewrap.free_user(), bubblewrap.free_user()] if os.geteuid() == 0 else []
        host_end, driver_end = socket.socketpair()
        self._channel = Channel(host_end)
        with driver_end:
            self._process = self._start(driver_end)
        try:
            self._channel.ask("begin", limits.start_timeout)
            for path, text in _RC.items():
                self.put(path, text.encode())
        except BaseException as error:
            self.close()
            if isinstance(error, Refused | OSError):
                self._errors.seek(0)
                output = self._errors.read().decode(errors="replace").strip()
                detail = f": {output[-500:]}" if output else ""
                raise DesktopLost(f"the desktop did not start: {error}{detail}") from error
            raise

    def put(self, path: str, content: bytes, executable: bool = False) -> None:
        """Write a file of the home, with the folders above it."""
        self.ask("put", blobs=[content], path=path, mode=0o755 if executable else 0o644)

    def home(self) -> Mapping[str, HomeEntry]:
        """Return all that is in the home, by path.

        The driver reads it inside of the desktop, where a link of the policy leads nowhere.
        """
        header, [contents] = self.ask("list")
        entries = {}
        start = 0
        for entry in header["entries"]:
            size = entry.get("size")
            content = None
            if size is not None:
                content = contents[start : start + size]
                start += size
            entries[entry["path"]] = HomeEntry(entry["kind"], content)
        return entries

    def launch(self, command: Sequence[str]) -> None:
        """Start a program and wait for its window."""
        within = self._limits.start_timeout
        self.ask(
            "launch",
            seconds=within + self._limits.call_timeout,
            command=list(command),
            within=within,
        )

    def screenshot(self, react: float = 0.0, settle: float = 0.0) -> bytes:
        """Return a PNG of the screen.

        Waits at most ``react`` seconds for a change since the last, then ``settle`` until it is
        still.
        """
        header, [pixels] = self.ask(
            "screenshot",
            seconds=react + settle + self._limits.call_timeout,
            react=react,
            settle=settle,
        )
        return png(Image.frombuffer("RGB", tuple(header["size"]), pixels, "raw", "BGRX", 0, 1))

    def type(self, text: str, delay: float, longest: float) -> None:
        """Type a text, and wait ``delay`` seconds after each character, which may take ``longest``.

        Raises ValueError for a character that cannot be typed.
        """
        seconds = self._limits.call_timeout + longest * len(text)
        self.ask("type", seconds=seconds, text=text, delay=delay)

    def ask(
        self, op: str, blobs: Sequence[bytes] = (), seconds: float | None = None, **arguments: Any
    ) -> tuple[Header, list[bytes]]:
        """Call the driver (``inside/driver.py``).

        Raises DesktopLost, DesktopSpoiled, and ValueError for an unknown key.
        """
        try:
            return self._channel.ask(op, seconds or self._limits.call_timeout, blobs, **arguments)
        except Refused as error:
            if error.kind == "ValueError":
                raise ValueError(error.why) from error
            if error.kind == "Spoiled":
                raise DesktopSpoiled(error.why) from error
            raise DesktopLost(f"{op}: {error}") from error
        except OSError as error:
            raise DesktopLost(f"{op}: {error}") from error

    def close(self) -> None:
        """End the desktop. May be called again.

        All that runs in it ends with the first process of its namespace.
        """
        self._channel.close()
        # Found before the kill: a process whose parent has ended is no longer below it. The driver
        # gets no signal when root's bwrap ends.
        driver = processes.tree(self._process.pid)[1:2]
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        for pid in driver:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        for user in self._users:
            user.close_when_unused()

    def _start(self, driver_end: socket.socket) -> subprocess.Popen[bytes]:
        passwd_reader = _passwd(self._users[0].number if self._users else os.geteuid())
        display_reader, display_writer = os.pipe()
        filter_file = os.memfd_create("filter")
        os.write(filter_file, seccomp.administrators_refused())
        os.lseek(filter_file, 0, os.SEEK_SET)
        settings = {
            **self._limits.model_dump(include={"processes", "memory_mb", "total_mb"}),
            "size": [self._limits.width, self._limits.height],
            "display": display_reader,
            "display_written": display_writer,
            "apart": bool(self._users),
        }
        command = self._command(
            driver_end.fileno(),
            settings,
            _server(self._limits, display_writer),
            (
                *("--seccomp", str(filter_file)),
                # Xvfb makes this folder only as root.
                *("--as-pid-1", "--perms", "1777", "--dir", "/tmp/.X11-unix"),
                *("--perms", "0644", "--ro-bind-data", str(passwd_reader), "/etc/passwd"),
            ),
        )
        descriptors = (passwd_reader, display_reader, display_writer, filter_file)
        try:
            self._errors = open(os.memfd_create("desktop"), "w+b")  # noqa: SIM115
            return subprocess.Popen(
                command,
                pass_fds=(driver_end.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _command(
        self,
        connection: int,
        settings: Mapping[str, Any],
        server: list[str],
        options: Sequence[str],
    ) -> list[str]:
        """Return bubblewrap's command: the driver as first process, and the X server."""
        driver = [
            os.path.realpath(sys.executable),
            "-S",
            "-m",
            "rayloop.envs.desktop.inside.driver",
            str(connection),
            json.dumps(settings),
        ]
        driver_user: int | None = None
        server_user: int | None = None
        if self._users:
            driver_user, server_user = (user.number for user in self._users)
        home_bytes = self._limits.home_mb * MIB
        python_path = f"{PACKAGE.parent}{os.pathsep}{_library('Xlib').parent}"
        return bubblewrap.command(
            driver,
            read=[*_code(), *filter(os.path.exists, _SYSTEM)],
            folders={HOME: home_bytes, "/run/user": MIB, "/dev/shm": 64 * MIB},
            environment={**_ENVIRONMENT, "PYTHONPATH": python_path},
            uid=driver_user,
            beside=(server, server_user),
            options=options,
        )


def _passwd(uid: int) -> int:
    """Return a descriptor from which bwrap reads the desktop's /etc/passwd."""
    reader, writer = os.pipe()
    # A pipe holds a line, so this returns before bwrap reads it.
    with open(writer, "w", encoding="utf-8") as file:
        file.write(f"user:x:{uid}:{uid}:user:{HOME}:/bin/bash\n")
    return reader


def _server(limits: DesktopLimits, display_writer: int) -> list[str]:
    """Return the command of the X server, which writes its display's number."""
    return [
        "/usr/bin/prlimit",
        f"--as={limits.memory_mb * MIB}",
        "--core=0",
        "Xvfb",
        "-displayfd",
        str(display_writer),
        "-screen",
        "0",
        f"{limits.width}x{limits.height}x24",
        "-nolisten",
        "tcp",
        "-noreset",
    ]


def _code() -> list[str]:
    """Return the folders of this Python, and the files of rayloop that the driver imports."""
    modules = (
        "__init__.py",
        "envs/__init__.py",
        "sandbox/__init__.py",
        "sandbox/frames.py",
        "sandbox/memory.py",
        "envs/desktop/__init__.py",
        "envs/desktop/inside",
    )
    return [
        *bubblewrap.python_folders(sys.base_prefix),
        *(str(PACKAGE / name) for name in modules),
        str(_library("Xlib")),
        str(_library("six")),
    ]


def _library(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin
