"""The first process inside a desktop's sandbox.

It starts a window manager and programs, acts through XTEST, and grabs the screen.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from Xlib import X
from Xlib.display import Display
from Xlib.error import ConnectionClosedError
from Xlib.ext import xtest

from rayloop.envs.desktop.inside.memory import Watch
from rayloop.sandbox.frames import Channel, Header, arguments

START_TIMEOUT_S = 10.0
"""Seconds for the X server, and again for the window manager."""
BUTTONS = {"left": 1, "middle": 2, "right": 3, "back": 8, "forward": 9}
WHEEL = {"up": 4, "down": 5, "left": 6, "right": 7}
GRAB_EVERY_S = 0.05
"""Seconds between two looks at the screen."""
EXIT_TIMEOUT_S = 1.0
"""Seconds until a process has ended that has closed its connection, or lost the X server."""
MANAGER = "openbox"
# Numbers of the kernel, for which Python has no names.
SET_PDEATHSIG = 1
SET_DUMPABLE = 4
FREE = ("put", "list", "running")
"""Calls that need no screen: they work even when the X server has ended."""


class Spoiled(Exception):
    """Programs that the policy started broke the desktop."""


class Desk:
    """The display, and the programs on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from rayloop.envs.desktop.inside.keyboard import Keyboard

        self._home = os.environ["HOME"]
        self.running: dict[int, str] = {}
        self._last = b""
        self._width, self._height = settings["size"]
        self._server = int(os.environ.pop("BESIDE"))
        self._apart = settings["apart"]
        self._signals: dict[int, int] = {}
        self._wait_for_server(settings["display"])
        self._manager = self._spawn([MANAGER])
        self._display = Display(os.environ["DISPLAY"])
        self._root = self._display.screen().root
        # openbox announces itself before it takes windows: a window that is mapped in between is
        # lost (5 of 40 starts).
        self._until(
            lambda: bool(self._property("_NET_WORKAREA")), START_TIMEOUT_S, "the window manager"
        )
        self._keyboard = Keyboard(self._display)
        self._memory_mb = settings["total_mb"]
        self._memory = Watch(self._memory_mb << 20)

    def answer(self, header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
        """Carry out a call: the method of that name. Raises Spoiled."""
        # Exit codes come first: they say whether the window manager or X has ended.
        self._reap()
        needs_screen = header["op"] not in FREE
        if needs_screen and self._manager in self._signals:
            raise self._blamed()
        try:
            result = getattr(self, f"do_{header['op']}")(*blobs, **arguments(header))
        except ConnectionClosedError as error:
            raise (self._blamed() if needs_screen else error) from error
        answer, content = result if isinstance(result, tuple) else (result or {}, None)
        return answer, [] if content is None else [content]

    # What the host asks for -----------------------------------------------------------------------

    def do_put(self, content: bytes, path: str, mode: int) -> None:
        """Write a file of the home."""
        put_file(self._home, path, content, mode)

    def do_list(self) -> tuple[Header, bytes]:
        """Return all entries of the home, and the contents of its files."""
        entries, contents = home_contents(self._home)
        return {"entries": entries}, contents

    def do_launch(self, command: list[str], within: float) -> None:
        """Start a program and wait until it has a window, and the focus."""
        # Before the start: the window may exist when the next line returns.
        windows_at_start = set(self._property("_NET_CLIENT_LIST"))
        self._spawn(command)

        def has_focused_window() -> bool:
            new_windows = set(self._property("_NET_CLIENT_LIST")) - windows_at_start
            return bool(new_windows & set(self._property("_NET_ACTIVE_WINDOW")))

        self._until(has_focused_window, within, f"a window of {command[0]}")

    def do_screenshot(self, react: float, settle: float) -> tuple[Header, bytes]:
        """Return rows of 4 bytes a pixel (BGRX).

        Waits at most ``react`` seconds for a change, and ``settle`` for two equal looks.
        """
        react_until = time.monotonic() + react
        pixels = self._grab()
        while pixels == self._last and time.monotonic() < react_until:
            time.sleep(GRAB_EVERY_S)
            pixels = self._grab()
        settle_until = time.monotonic() + settle
        is_still = False
        while not is_still and time.monotonic() < settle_until:
            time.sleep(GRAB_EVERY_S)
            previous = pixels
            pixels = self._grab()
            is_still = previous == pixels
        self._last = pixels
        return {"size": [self._width, self._height]}, pixels

    def do_move(self, x: int, y: int) -> None:
        """Put the pointer at a pixel."""
        xtest.fake_input(self._display, X.MotionNotify, x=x, y=y)
        self._display.sync()

    def do_click(self, x: int, y: int, button: str = "left", count: int = 1) -> None:
        """Click ``count`` times at a pixel."""
        self.do_move(x, y)
        for _ in range(count):
            self._button(BUTTONS[button], True)
            self._button(BUTTONS[button], False)
        self._display.sync()

    def do_button(self, down: bool) -> None:
        """Press the left button where the pointer is, or release it."""
        self._button(BUTTONS["left"], down)
        self._display.sync()

    def do_drag(self, x: int, y: int, to_x: int, to_y: int) -> None:
        """Drag in ten steps, since programs begin a drag only when the pointer moves."""
        self.do_move(x, y)
        self._button(BUTTONS["left"], True)
        self._display.sync()
        for step in range(1, 11):
            time.sleep(0.01)
            self.do_move(x + (to_x - x) * step // 10, y + (to_y - y) * step // 10)
        time.sleep(0.01)
        self._button(BUTTONS["left"], False)
        self._display.sync()

    def do_scroll(self, direction: str, ticks: int) -> None:
        """Turn the wheel by ``ticks`` steps where the pointer is."""
        for _ in range(ticks):
            self._button(WHEEL[direction], True)
            self._button(WHEEL[direction], False)
        self._display.sync()

    def do_press(self, keys: list[str]) -> None:
        """Press keys together."""
        self._keyboard.press(keys)

    def do_hold(self, key: str, down: bool) -> None:
        """Press or release one key."""
        self._keyboard.hold(key, down)

    def do_type(self, text: str, delay: float) -> None:
        """Type a text, with ``delay`` seconds after each character."""
        self._keyboard.type(text, delay)

    def do_running(self) -> Header:
        """Return the living programs that were started in here."""
        return {"running": sorted(self.running.values())}

    # The display ----------------------------------------------------------------------------------

    def _wait_for_server(self, reading: int) -> None:
        """Wait until the X server has written the number of its display.

        Raises TimeoutError, ChildProcessError.
        """
        number = b""
        # It writes the number and the line's end in two parts, and dies when nobody reads the
        # second.
        while not number.endswith(b"\n"):
            if not select.select([reading], [], [], START_TIMEOUT_S)[0]:
                raise TimeoutError(f"the X server did not start within {START_TIMEOUT_S:g} seconds")
            part = os.read(reading, 16)
            if not part:
                raise ChildProcessError("the X server ended at its start")
            number += part
        os.close(reading)
        os.environ["DISPLAY"] = f":{number.decode().strip()}"

    def _blamed(self) -> Exception:
        """Return the error for the end of the window manager or of X.

        It is Spoiled when programs in here caused the end.
        """
        if self._memory.filled:
            filled_mb = self._memory.filled >> 20
            return Spoiled(
                f"the programs filled {filled_mb} MiB together, of at most {self._memory_mb}, and"
                " were ended"
            )
        if not self._ended(self._server):
            if self._manager in self._signals:
                return Spoiled("the window manager was ended")
            return Spoiled("the driver's connection to the screen was ended")
        if not self._apart and self._ended(self._manager) and self._signals[self._manager]:
            return Spoiled("all programs were ended by a signal, and the X server with them")
        return ConnectionError("the X server ended")

    def _ended(self, pid: int) -> bool:
        """Return whether a process has ended, or ends within a moment."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while pid not in self._signals and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
        return pid in self._signals

    def _grab(self) -> bytes:
        image = self._root.get_image(0, 0, self._width, self._height, X.ZPixmap, 0xFFFFFFFF)
        return bytes(image.data)

    def _button(self, number: int, down: bool) -> None:
        xtest.fake_input(self._display, X.ButtonPress if down else X.ButtonRelease, number)

    def _property(self, name: str) -> list[int]:
        value = self._root.get_full_property(self._display.intern_atom(name), X.AnyPropertyType)
        return list(value.value) if value else []

    def _until(self, test: Callable[[], bool], seconds: float, event: str) -> None:
        deadline = time.monotonic() + seconds
        while not test():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{event} did not come within {seconds:g} seconds")
            time.sleep(0.005)

    # Processes ------------------------------------------------------------------------------------

    def _spawn(self, command: list[str]) -> int:
        nothing = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1, 2)]
        pid = os.posix_spawnp(
            command[0], command, dict(os.environ), file_actions=nothing, setsid=True
        )
        self.running[pid] = command[0]
        return pid

    def _reap(self) -> None:
        """Collect exit codes: the first process of a namespace inherits every orphan."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.running.pop(pid, None)
            if pid in (self._server, self._manager):
                self._signals[pid] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def confine(settings: dict[str, Any]) -> None:
    """Set limits, which programs inherit, and keep this process and its connection from them."""
    limits = {
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_AS: settings["memory_mb"] << 20,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # Otherwise every program could answer the host in the driver's place.
        with suppress(OSError):
            os.set_inheritable(descriptor, False)
    prctl = ctypes.CDLL(None).prctl
    # Otherwise programs could write into its memory, as the same user.
    prctl(SET_DUMPABLE, 0, 0, 0, 0)
    # For an ordinary user's driver: root's bwrap may not signal another user.
    prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.umask(0o022)
    os.chdir(os.environ["HOME"])


def end_with_the_host(connection: socket.socket) -> None:
    """End the whole namespace when the host's end is closed, also while X does not answer.

    As root, bwrap may not signal other users' processes, so no signal comes for a parent's death.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Confine this process, start the desktop at the first call, and answer calls.

    The first call is "begin". It ends when the host has ended.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=end_with_the_host, args=(connection,), daemon=True).start()
    settings = json.loads(sys.argv[2])
    # With a copy of X's end open, a read of its display would not end when X does.
    os.close(settings["display_written"])
    confine(settings)
    desks: list[Desk] = []

    def answer(header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
        if not desks:
            desks.append(Desk(settings))
            return {}, []
        return desks[0].answer(header, blobs)

    Channel(connection).serve(answer)


SKIPPED = {".cache", ".config", ".local", ".dbus"}
"""What programs keep for themselves, at the top of the home."""
MAX_ENTRIES = 2_000
"""Entries of a home that are returned; the others are left out."""
MAX_TOTAL_BYTES = 8 << 20
"""Bytes of all files that are returned; further entries have no content."""
MAX_FILE_BYTES = 1 << 20
"""Bytes of a file that is returned; the entry of a larger one has no content."""


def put_file(home: str, path: str, content: bytes, mode: int) -> None:
    """Write a file and the folders above it.

    Raises ValueError for a path that is not below ``home``.
    """
    target = os.path.normpath(os.path.join(home, path))
    if not target.startswith(home + os.sep):
        raise ValueError(f"{path} is not below the home")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(content)
    os.chmod(target, mode)


def home_contents(home: str) -> tuple[list[dict[str, Any]], bytes]:
    """Return the entries of the home, and the contents of its files one after the other.

    An entry has ``path``, ``kind``, and ``size`` when its content is returned.
    """
    entries: list[dict[str, Any]] = []
    contents: list[bytes] = []
    bytes_left = MAX_TOTAL_BYTES
    for folder, folders, files in os.walk(home):
        if folder == home:
            folders[:] = [name for name in folders if name not in SKIPPED]
        for name in sorted([*folders, *files]):
            if len(entries) == MAX_ENTRIES:
                return entries, b"".join(contents)
            path = os.path.join(folder, name)
            kind = _kind(path)
            entry: dict[str, Any] = {"path": os.path.relpath(path, home), "kind": kind}
            content = None
            if kind == "file":
                content = _read(path, min(bytes_left, MAX_FILE_BYTES))
            if content is not None:
                entry["size"] = len(content)
                contents.append(content)
                bytes_left -= len(content)
            entries.append(entry)
    return entries, b"".join(contents)


def _kind(path: str) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "other"
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def _read(path: str, max_bytes: int) -> bytes | None:
    """Return a file's content; None when it is larger, not a file now, or cannot be read."""
    try:
        # Programs still run, and may replace a file by a link, which leads elsewhere, or by a pipe,
        # which would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None


if __name__ == "__main__":
    main()
