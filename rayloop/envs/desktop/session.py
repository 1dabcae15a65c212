"""The host's side of one desktop: starts it in its sandbox, asks its driver, and ends it with all
that runs in it.
"""

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
DYING = 10.0
"""Seconds in which a killed desktop is gone."""
_RC = {
    # equal states then have equal pixels, and an idle desktop takes no CPU
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


@dataclass(frozen=True, slots=True)
class HomeEntry:
    """What lies at a path of a home.

    ``content`` is None for a folder, and for what is no file, is too large or unreadable.
    """

    kind: str
    content: bytes | None = None


def missing() -> str:
    """What a desktop needs and this machine lacks, with the command that installs it; empty when it
    has all.
    """
    lacks = [
        package
        for program, package in {"bwrap": "bubblewrap", **PROGRAMS}.items()
        if not shutil.which(program)
    ]
    if lacks:
        return f"apt-get install --no-install-recommends {' '.join(lacks)}"
    return 'pip install "rayloop[desktop]"' if find_spec("Xlib") is None else ""


class Desktop:
    """A desktop that lives until ``close``, or until the thread that made it ends; raises
    DesktopLost when it does not start.
    """

    def __init__(self, limits: DesktopLimits) -> None:
        if lacks := missing():
            raise DesktopLost(f"this machine lacks what a desktop needs: {lacks}")
        self._limits = limits
        self._users = [bubblewrap.free_user(), bubblewrap.free_user()] if os.geteuid() == 0 else []
        """Of the programs, and of X, which is then out of their reach."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            self._process = self._start(theirs)
        try:
            self._channel.ask("begin", limits.start_timeout)
            for path, text in _RC.items():
                self.put(path, text.encode())
        except BaseException as error:
            self.close()
            if isinstance(error, Refused | OSError):
                self._errors.seek(0)
                said = self._errors.read().decode(errors="replace").strip()
                raise DesktopLost(
                    f"the desktop did not start: {error}{said and f': {said[-500:]}'}"
                ) from error
            raise

    def put(self, path: str, content: bytes, executable: bool = False) -> None:
        """Write a file of the home, with the folders above it."""
        self.ask("put", blobs=[content], path=path, mode=0o755 if executable else 0o644)

    def home(self) -> Mapping[str, HomeEntry]:
        """All that is in the home, by path.

        It is read inside of the desktop: a link of the policy leads nowhere.
        """
        header, [contents] = self.ask("list")
        entries, start = {}, 0
        for entry in header["entries"]:
            size = entry.get("size")
            entries[entry["path"]] = HomeEntry(
                entry["kind"], None if size is None else contents[start : start + size]
            )
            start += size or 0
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
        """PNG of the screen.

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
        """Wait ``delay`` seconds after each character; each may take ``longest``.

        Raises ValueError for one that is no text.
        """
        self.ask(
            "type", seconds=self._limits.call_timeout + longest * len(text), text=text, delay=delay
        )

    def ask(
        self, op: str, blobs: Sequence[bytes] = (), seconds: float | None = None, **arguments: Any
    ) -> tuple[Header, list[bytes]]:
        """One call of the driver (``inside/driver.py``).

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
        """End it.

        Whatever runs in it is gone with the first process of its namespace. May be called again.
        """
        self._channel.close()
        # Found before the kill: a process whose parent has ended is no longer below it.
        driver = processes.tree(self._process.pid)[
            1:2
        ]  # which gets no signal when root's bwrap ends
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        for pid in driver:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING)
        for user in self._users:
            user.close_when_unused()

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        users = [user.number for user in self._users]
        uid = users[0] if users else os.geteuid()
        limits = self._limits
        reading, writing = os.pipe()
        # A pipe holds a line, so this returns before bwrap reads it.
        with open(writing, "w", encoding="utf-8") as passwd:
            passwd.write(f"user:x:{uid}:{uid}:user:{HOME}:/bin/bash\n")

        display, written = os.pipe()

        filtered = os.memfd_create("filter")
        os.write(filtered, seccomp.administrators_refused())
        os.lseek(filtered, 0, os.SEEK_SET)
        options = {
            **limits.model_dump(include={"processes", "memory_mb", "total_mb"}),
            "size": [limits.width, limits.height],
            "display": display,
            "display_written": written,
            "apart": bool(users),
        }

        server = [
            "/usr/bin/prlimit",
            f"--as={limits.memory_mb * MIB}",
            "--core=0",
            "Xvfb",
            "-displayfd",
            str(written),
        ]
        server += [
            "-screen",
            "0",
            f"{limits.width}x{limits.height}x24",
            "-nolisten",
            "tcp",
            "-noreset",
        ]

        paths = _code()
        line = bubblewrap.command(
            [
                *(
                    os.path.realpath(sys.executable),
                    "-S",
                    "-m",
                    "rayloop.envs.desktop.inside.driver",
                ),
                *(str(theirs.fileno()), json.dumps(options)),
            ],
            read=[*paths, *filter(os.path.exists, _SYSTEM)],
            folders={HOME: limits.home_mb * MIB, "/run/user": MIB, "/dev/shm": 64 * MIB},
            environment={
                **_ENVIRONMENT,
                "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{_library('Xlib').parent}",
            },
            uid=users[0] if users else None,
            beside=(server, users[1] if users else None),
            options=[
                *("--seccomp", str(filtered)),
                *(
                    "--as-pid-1",
                    "--perms",
                    "1777",
                    "--dir",
                    "/tmp/.X11-unix",
                ),  # which Xvfb makes for root alone
                *("--perms", "0644", "--ro-bind-data", str(reading), "/etc/passwd"),
            ],
        )
        try:
            self._errors = open(os.memfd_create("desktop"), "w+b")  # noqa: SIM115
            return subprocess.Popen(
                line,
                pass_fds=(theirs.fileno(), reading, display, written, filtered),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        finally:
            for descriptor in (reading, display, written, filtered):
                os.close(descriptor)


def _code() -> list[str]:
    """The Python of this process, and of its packages only what the driver imports."""
    own = (
        "__init__.py",
        "envs/__init__.py",
        "sandbox/__init__.py",
        "sandbox/frames.py",
        "sandbox/memory.py",
        "envs/desktop/__init__.py",
    )
    python = bubblewrap.python_folders(sys.base_prefix)
    return [
        *python,
        *(str(PACKAGE / name) for name in (*own, "envs/desktop/inside")),
        str(_library("Xlib")),
        str(_library("six")),
    ]


def _library(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin
