"""Outside of the sandbox: a fork server and its interpreters.

Calls block up to a deadline, and may come from any thread.
"""

import contextlib
import dataclasses
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayloop.sandbox import bubblewrap, cells, frames
from rayloop.sandbox.options import CodeDeadline, CodeFailed, Level, Options, SandboxFailed

_ROOT = Path(__file__).parents[2]
_OWN = (str(_ROOT / "rayloop" / "__init__.py"), str(Path(__file__).parent))
_BEGIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rayloop.sandbox.server import main;"
    " main(sys.argv[2])"
)
START, _HELLO, _END = 60.0, 20.0, 5.0
"""Seconds: for the fork server to load its modules, for an interpreter to hold itself in, for a
killed one to be gone.
"""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What a call of an interpreter returned, all of which the code may have forged, within the
    limits of rayloop/sandbox/cells.py. ``error``: the code's traceback; ``images``: PNG;
    ``dropped``: figures beyond the limit; ``seconds``: by its own clock.
    """

    text: str
    error: str | None
    images: tuple[bytes, ...]
    seconds: float
    dropped: int


class Interpreter:
    """A Python that keeps its names between calls.

    Not for several threads at once. Ended by ``close``, or when a call failed.
    """

    def __init__(
        self, connection: socket.socket, pidfd: int, user: bubblewrap.User | None, server: "_Server"
    ) -> None:
        self._connection, self._pidfd, self._user, self._server = connection, pidfd, user, server
        self._channel = frames.Channel(connection, frames.MOST_ANSWERED)
        self._lock, self.closed = threading.Lock(), False

    def run(self, code: str, seconds: float) -> CodeResult:
        """Run code.

        Raises CodeDeadline after ``seconds``, CodeFailed when the code ended the interpreter or
        forged a bad answer (both end it), SandboxFailed when the fork server is gone.
        """
        began = time.monotonic()
        try:
            if (
                result := _result(*self._ask("run", seconds, code=code), time.monotonic() - began)
            ) is not None:
                return result
        except frames.Refused:
            pass
        raise self._spoiled("an answer that no interpreter gives")

    def images(self, named: Mapping[str, bytes], seconds: float) -> str | None:
        """Give code images under names, from PNG, JPEG or WebP. Returns why one cannot be read,
        else None. Raises as ``run``.
        """
        return self._given("images", list(named.values()), seconds, names=list(named))

    def video(self, name: str, encoded: Sequence[bytes], fps: float, seconds: float) -> str | None:
        """Give code a reader of frames: one animated image, or one image a frame.

        Returns and raises as ``images``.
        """
        return self._given("video", encoded, seconds, name=name, fps=fps)

    def alive(self) -> bool:
        """Whether its process lives, and the fork server, which takes it along."""
        return self._server.alive() and not _ready(self._pidfd, 0)

    def close(self) -> None:
        """End it, and wait until it is gone (some milliseconds).

        May be called again, and from another thread.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        gone = bool(_ready(self._pidfd, _END))
        os.close(self._pidfd)
        self._channel.close()
        if self._user is not None:
            # A process that has not ended still has this user number: nobody else may get it.
            (self._user.close if gone else self._user.keep)()

    def _given(
        self, op: str, blobs: Sequence[bytes], seconds: float, **arguments: Any
    ) -> str | None:
        most, given = frames.MOST_GIVEN, sum(map(len, blobs))
        if len(blobs) > most.blobs or given > most.size:
            return f"{len(blobs)} images of {given} bytes, which may be {most.blobs} of {most.size}"
        try:
            self._ask(op, seconds, blobs, **arguments)
        except frames.Refused as error:
            return _clean(str(error)[: cells.MOST_ERROR])
        return None

    def _ask(
        self, op: str, seconds: float, blobs: Sequence[bytes] = (), **arguments: Any
    ) -> tuple[frames.Header, list[bytes]]:
        if self.closed:
            raise CodeFailed("the interpreter was ended by an earlier call")
        self._signal(signal.SIGCONT)
        try:
            answer = self._channel.ask(op, seconds, blobs, **arguments)
        except TimeoutError:
            self.close()
            raise CodeDeadline(f"it did not end within {seconds:g} seconds") from None
        except frames.Malformed as error:
            raise self._spoiled(str(error)) from None
        except ConnectionError:
            raise self._spoiled("it ended the interpreter") from None
        self._signal(signal.SIGSTOP)  # threads and alarms of its code cost nothing between calls
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(OSError):  # it has ended, which its connection says
            if not self.closed:  # else the descriptor may be another one's
                signal.pidfd_send_signal(self._pidfd, number)

    def hello(self) -> None:
        """Wait until it has confined itself. Raises SandboxFailed."""
        try:
            header, _ = frames.receive(
                self._connection, time.monotonic() + _HELLO, frames.MOST_ANSWERED
            )
        except OSError as error:
            self.close()
            raise SandboxFailed(
                f"a new interpreter ended at once ({type(error).__name__})"
            ) from error
        if header.get("ready") is not True:
            self.close()
            raise SandboxFailed(str(header.get("error")))

    def _spoiled(self, why: str) -> Exception:
        """End the interpreter.

        Returns SandboxFailed when the fork server is gone too, else CodeFailed.
        """
        self.close()
        return (
            CodeFailed(why)
            if self._server.alive()
            else SandboxFailed("the fork server is gone, with its interpreters")
        )


class Sandbox:
    """Interpreters at ``level``.

    Their fork server starts in the background, and again after it was lost.
    """

    def __init__(self, level: Level, options: Options | None = None) -> None:
        self.level, self.options = level, options or Options()
        self._changed = threading.Condition()
        self._spares: deque[Interpreter] = deque()
        self._waiting, self._closed = 0, False
        self._failure: SandboxFailed | None = None
        self._server: _Server | None = None
        # The kernel ends a child with the THREAD that started it, so one thread that stays starts
        # them all.
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="sandbox")
        self._keeper.start()

    def interpreter(self, seconds: float = START) -> Interpreter:
        """A new one, at once when a spare is ready. Raises SandboxFailed."""
        until = time.monotonic() + seconds
        while True:
            found = self._next(until)
            if found.alive():
                found.hello()
                return found
            found.close()  # it ended while it waited

    def close(self) -> None:
        """End all interpreters and the fork server."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join(_END * 2)

    @property
    def pid(self) -> int | None:
        """Process id of the fork server (of bubblewrap around it); None while there is none."""
        return self._server.process.pid if self._server else None

    def _next(self, until: float) -> Interpreter:
        with self._changed:
            self._waiting += 1
            self._failure = None
            self._changed.notify_all()
            try:
                while not self._spares:
                    if self._failure is not None:
                        raise self._failure
                    if self._closed:
                        raise SandboxFailed("the sandbox is closed")
                    if not self._changed.wait(until - time.monotonic()):
                        raise SandboxFailed("no interpreter in time")
                return self._spares.popleft()
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def _keep(self) -> None:
        """Start the server, and keep spares ready."""
        while True:
            with self._changed:
                while not self._closed and not self._wanted():
                    self._changed.wait()
                if self._closed:
                    break
            try:
                # Outside the lock: a start takes seconds, and callers must be able to give up.
                new = self._spawn()
            except (SandboxFailed, OSError) as error:
                self._drop()
                with self._changed:
                    self._failure = (
                        error if isinstance(error, SandboxFailed) else SandboxFailed(str(error))
                    )
                    self._changed.notify_all()
                continue
            with self._changed:
                self._spares.append(new)
                self._changed.notify_all()
        self._drop()

    def _spawn(self) -> Interpreter:
        """Returns an interpreter of the running server, or of a new one when that does not answer.

        Raises SandboxFailed.
        """
        if self._server is not None:
            with contextlib.suppress(SandboxFailed):
                return self._server.spawn()
        self._drop()
        self._server = _Server(self.level, self.options)
        return self._server.spawn()

    def _wanted(self) -> bool:
        if self._failure is not None:
            return False  # until the next call of ``interpreter``
        return len(self._spares) < self._waiting + self.options.spares

    def _drop(self) -> None:
        """Be without a server."""
        with self._changed:
            spares = list(self._spares)
            self._spares.clear()

        # Outside the lock, since each waits until its process has ended.
        for spare in spares:
            spare.close()
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """The process of the fork server, and the socket on which it is asked for interpreters."""

    def __init__(self, level: Level, options: Options) -> None:
        """Raises SandboxFailed with what the kernel, or an import, refused."""
        self._level, self._folder = level, ""
        # This kind of socket keeps the borders of messages: one ``recv`` is one message.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._user = (
            bubblewrap.free_user() if level == Level.NAMESPACES and os.geteuid() == 0 else None
        )
        python = bubblewrap.python_folders()
        letters = fonts_folder() if "matplotlib.pyplot" in options.preload else None
        settings: dict[str, Any] = dataclasses.asdict(options) | {
            "level": level,
            "control": theirs.fileno(),
            "fonts": letters,
        }
        system = (*bubblewrap.OF_USR, "/lib", "/lib64", *bubblewrap.SYSTEM)
        settings |= {"read": [*python, *_OWN, *system], "folder": "/tmp"}
        if level != Level.NAMESPACES:
            settings["folder"] = self._folder = tempfile.mkdtemp(prefix="sandbox-")
            # mkdtemp admits its owner alone; an interpreter of another user must get through.
            os.chmod(self._folder, 0o711)
        line = [sys.executable, "-I", "-B", "-c", _BEGIN, str(_ROOT), json.dumps(settings)]
        variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        # Not a pipe: nobody reads it after the start, and a full one would stop the server.
        with tempfile.TemporaryFile() as errors:
            try:
                if level == Level.NAMESPACES:
                    read = [*python, *_OWN, *([letters] if letters else [])]
                    number = self._user.number if self._user else None
                    fresh = not bubblewrap.refused(number)
                    line = bubblewrap.command(
                        line, read=read, uid=number, proc="fresh" if fresh else "host"
                    )
                self.process = subprocess.Popen(
                    line,
                    env=variables,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                self._forget()
                raise SandboxFailed(f"{level}: {error}") from error
            finally:
                # With a copy left here, ``recv`` would not notice that the server has ended.
                theirs.close()
            self._control = ours
            self._first_word(errors)

    def _first_word(self, errors: Any) -> None:
        """Wait until it is ready. Raises SandboxFailed."""
        self._control.settimeout(START)
        try:
            word = json.loads(self._control.recv(1 << 16) or b"{}")
        except OSError as error:
            word = {"error": f"not ready within {START:g} seconds ({error})"}
        if not word.get("ready"):
            self.close()
            errors.seek(0)
            said = errors.read(4096).decode(errors="replace").strip()
            raise SandboxFailed(
                word.get("error") or said or f"the fork server ended with {self.process.returncode}"
            )

    def spawn(self) -> Interpreter:
        """Raises SandboxFailed."""
        own = os.geteuid() == 0 and self._level != Level.NAMESPACES
        user = bubblewrap.free_user() if own else None
        try:
            self._control.send(json.dumps({"user": user.number if user else None}).encode())
            text, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 2)
            if len(descriptors) == 2:
                return Interpreter(socket.socket(fileno=descriptors[0]), descriptors[1], user, self)
            reason = json.loads(text or b'{"error": "the fork server is gone"}')["error"]
        except OSError as error:
            reason = f"the fork server does not answer: {error}"
            # It may start the interpreter later.
            if user:
                user.keep()
                user = None
        if user:
            user.close()
        raise SandboxFailed(reason)

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """It ends itself when its socket closes; else it is killed."""
        self._control.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._forget()

    def _forget(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._user:
            self._user.close_when_unused()


def _result(header: Mapping[str, Any], blobs: Sequence[bytes], most: float) -> CodeResult | None:
    """None unless every part is one that an interpreter may give.

    ``most``: seconds that the call took here.
    """
    text, error, took, dropped = (
        header.get(name) for name in ("text", "error", "seconds", "dropped")
    )
    if not (isinstance(text, str) and len(text) <= cells.MOST_TEXT + len(cells.more(10**15))):
        return None
    if not (error is None or (isinstance(error, str) and len(error) <= cells.MOST_ERROR)):
        return None
    if not (
        type(took) is float
        and 0 <= took <= most
        and type(dropped) is int
        and 0 <= dropped <= cells.MOST_DROPPED
    ):
        return None
    return CodeResult(_clean(text), _clean(error) if error else None, tuple(blobs), took, dropped)


def _clean(text: str) -> str:
    """Without halves of characters, which JSON may carry and nothing else takes."""
    return text.encode(errors="replace").decode()


def _ready(descriptor: int, seconds: float) -> bool:
    """Whether the process of this pidfd ends within ``seconds``."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


_MAKE = "import matplotlib, matplotlib.font_manager; print(matplotlib.get_cachedir())"


@functools.cache
def fonts_folder() -> str | None:
    """A folder with the list alone in it, or None: then each fork server makes its own, in some
    seconds.
    """
    try:
        made = subprocess.run(
            [sys.executable, "-c", _MAKE], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    place = Path(made.stdout.strip().splitlines()[-1])
    if not list(place.glob("fontlist-*.json")) or {found.suffix for found in place.iterdir()} - {
        ".json",
        ".lock",
    }:
        return None
    return os.fspath(place)
