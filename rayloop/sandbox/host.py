"""The host's side of the sandbox: a fork server and its interpreters.

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
_SANDBOX_SOURCES = (str(_ROOT / "rayloop" / "__init__.py"), str(Path(__file__).parent))
_SERVER_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rayloop.sandbox.server import main;"
    " main(sys.argv[2])"
)
_SERVER_START_TIMEOUT_S = 60.0
"""How long the fork server may load its modules."""
_CONFINE_TIMEOUT_S = 20.0
"""How long a new interpreter may take to confine itself."""
_EXIT_TIMEOUT_S = 5.0
"""How long a killed interpreter, or the fork server, may take to end."""
_MESSAGE_BYTES = 1 << 16
"""The largest message on the control socket."""


@dataclass(frozen=True)
class CodeResult:
    """What a call of an interpreter returned.

    The code may have forged all of it, within the limits of rayloop/sandbox/cells.py. ``error``:
    the code's traceback; ``images``: PNG; ``dropped``: the number of figures beyond the limit;
    ``seconds``: measured by the interpreter's own clock.
    """

    text: str
    error: str | None
    images: tuple[bytes, ...]
    seconds: float
    dropped: int


class Interpreter:
    """A Python that keeps its names between calls.

    It serves one thread at a time. It is ended by ``close``, or when a call fails.
    """

    def __init__(
        self, connection: socket.socket, pidfd: int, user: bubblewrap.User | None, server: "_Server"
    ) -> None:
        self._connection = connection
        self._pidfd = pidfd
        self._user = user
        self._server = server
        self._channel = frames.Channel(connection, frames.MOST_ANSWERED)
        self._lock = threading.Lock()
        self.closed = False

    def run(self, code: str, seconds: float) -> CodeResult:
        """Run code.

        Raises CodeDeadline after ``seconds``, CodeFailed when the code ended the interpreter or
        forged a bad answer (both end it), SandboxFailed when the fork server has ended.
        """
        started = time.monotonic()
        result = None
        with contextlib.suppress(frames.Refused):
            header, images = self._ask("run", seconds, code=code)
            elapsed = time.monotonic() - started
            result = _result(header, images, elapsed)
        if result is None:
            raise self._end_after_failure("an answer that no interpreter gives")
        return result

    def images(self, named: Mapping[str, bytes], seconds: float) -> str | None:
        """Give code images under names, from PNG, JPEG or WebP.

        Returns why one cannot be read, else None. Raises as ``run``.
        """
        return self._give("images", list(named.values()), seconds, names=list(named))

    def video(self, name: str, encoded: Sequence[bytes], fps: float, seconds: float) -> str | None:
        """Give code a reader of frames from one animated image, or from one image a frame.

        Returns and raises as ``images``.
        """
        return self._give("video", encoded, seconds, name=name, fps=fps)

    def alive(self) -> bool:
        """Whether its process lives, and the fork server, which ends it when it ends itself."""
        return self._server.alive() and not _ends_within(self._pidfd, 0)

    def close(self) -> None:
        """End the interpreter, and wait until its process has ended (some milliseconds).

        May be called again, and from another thread.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended = _ends_within(self._pidfd, _EXIT_TIMEOUT_S)
        os.close(self._pidfd)
        self._channel.close()
        if self._user is not None:
            # A process that has not ended still has this user number: no other program may get it.
            if ended:
                self._user.close()
            else:
                self._user.keep()

    def _give(
        self, op: str, blobs: Sequence[bytes], seconds: float, **arguments: Any
    ) -> str | None:
        """Send encoded images. Returns why they were refused, else None."""
        bounds = frames.MOST_GIVEN
        size = sum(map(len, blobs))
        if len(blobs) > bounds.blobs or size > bounds.size:
            return (
                f"{len(blobs)} images of {size} bytes, which may be {bounds.blobs} of {bounds.size}"
            )
        try:
            self._ask(op, seconds, blobs, **arguments)
        except frames.Refused as error:
            return _clean(str(error)[: cells.MAX_ERROR_CHARACTERS])
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
            raise self._end_after_failure(str(error)) from None
        except ConnectionError:
            raise self._end_after_failure("it ended the interpreter") from None
        # While it is stopped, threads and alarms of its code cost nothing between calls.
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        # OSError: the process has ended, which the next call notices on its connection.
        with self._lock, contextlib.suppress(OSError):
            # After ``close`` the number of the descriptor may belong to another file.
            if not self.closed:
                signal.pidfd_send_signal(self._pidfd, number)

    def hello(self) -> None:
        """Wait until it has confined itself. Raises SandboxFailed."""
        until = time.monotonic() + _CONFINE_TIMEOUT_S
        try:
            header, _ = frames.receive(self._connection, until, frames.MOST_ANSWERED)
        except OSError as error:
            self.close()
            raise SandboxFailed(
                f"a new interpreter ended at once ({type(error).__name__})"
            ) from error
        if header.get("ready") is not True:
            self.close()
            raise SandboxFailed(str(header.get("error")))

    def _end_after_failure(self, reason: str) -> Exception:
        """End the interpreter.

        Returns SandboxFailed when the fork server has ended too, else CodeFailed.
        """
        self.close()
        if self._server.alive():
            return CodeFailed(reason)
        return SandboxFailed("the fork server has ended, with its interpreters")


class Sandbox:
    """A source of interpreters at ``level``.

    Their fork server starts in the background, and again after it was lost.
    """

    def __init__(self, level: Level, options: Options | None = None) -> None:
        self.level = level
        self.options = options or Options()
        self._changed = threading.Condition()
        self._spares: deque[Interpreter] = deque()
        self._waiting = 0
        self._closed = False
        self._failure: SandboxFailed | None = None
        self._server: _Server | None = None
        # The kernel ends a child with the THREAD that started it, so one thread that stays starts
        # them all.
        self._keeper = threading.Thread(target=self._keep_spares, daemon=True, name="sandbox")
        self._keeper.start()

    def interpreter(self, seconds: float = _SERVER_START_TIMEOUT_S) -> Interpreter:
        """Return a new interpreter, at once when a spare is ready. Raises SandboxFailed."""
        until = time.monotonic() + seconds
        while True:
            spare = self._next_spare(until)
            if spare.alive():
                spare.hello()
                return spare
            # It ended while it waited.
            spare.close()

    def close(self) -> None:
        """End all interpreters and the fork server."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join(_EXIT_TIMEOUT_S * 2)

    @property
    def pid(self) -> int | None:
        """Process id of the fork server (of bubblewrap around it); None while none runs."""
        return self._server.process.pid if self._server else None

    def _next_spare(self, until: float) -> Interpreter:
        """Wait for a spare and take it. Raises SandboxFailed."""
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

    def _keep_spares(self) -> None:
        """Start the server, and keep spares ready."""
        while True:
            with self._changed:
                while not self._closed and not self._needs_spare():
                    self._changed.wait()
                if self._closed:
                    break
            try:
                # Outside the lock: a start takes seconds, and callers must be able to give up.
                spare = self._spawn()
            except (SandboxFailed, OSError) as error:
                failure = error if isinstance(error, SandboxFailed) else SandboxFailed(str(error))
                self._end_server()
                with self._changed:
                    self._failure = failure
                    self._changed.notify_all()
                continue
            with self._changed:
                self._spares.append(spare)
                self._changed.notify_all()
        self._end_server()

    def _spawn(self) -> Interpreter:
        """Return an interpreter of the running server, or of a new one when that does not answer.

        Raises SandboxFailed.
        """
        if self._server is not None:
            with contextlib.suppress(SandboxFailed):
                return self._server.spawn()
        self._end_server()
        self._server = _Server(self.level, self.options)
        return self._server.spawn()

    def _needs_spare(self) -> bool:
        # After a failure nothing is started until the next call of ``interpreter``.
        if self._failure is not None:
            return False
        return len(self._spares) < self._waiting + self.options.spares

    def _end_server(self) -> None:
        """End the spares and the server, if there is one."""
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
        """Raise SandboxFailed with what the kernel, or an import, refused."""
        self._level = level
        self._folder = ""
        self._user: bubblewrap.User | None = None
        # Not a pipe: it is not read after the start, and a full pipe would stop the server.
        with tempfile.TemporaryFile() as errors:
            # This kind of socket keeps the borders of messages: one ``recv`` is one message.
            host_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                if level == Level.NAMESPACES and os.geteuid() == 0:
                    self._user = bubblewrap.free_user()
                self.process = subprocess.Popen(
                    self._command_line(self._settings(options, server_end.fileno())),
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    pass_fds=(server_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                host_end.close()
                self._release()
                raise SandboxFailed(f"{level}: {error}") from error
            finally:
                # With a copy left here, ``recv`` would not notice that the server has ended.
                server_end.close()
            self._control = host_end
            self._wait_until_ready(errors)

    def _settings(self, options: Options, control: int) -> dict[str, Any]:
        """The JSON settings of the server; makes its folder where it has no private /tmp."""
        if self._level == Level.NAMESPACES:
            folder = "/tmp"
        else:
            self._folder = folder = tempfile.mkdtemp(prefix="sandbox-")
            # mkdtemp admits its owner alone; an interpreter of another user must get through.
            os.chmod(folder, 0o711)
        system = (*bubblewrap.OF_USR, "/lib", "/lib64", *bubblewrap.SYSTEM)
        return dataclasses.asdict(options) | {
            "level": self._level,
            "control": control,
            "fonts": fonts_folder() if "matplotlib.pyplot" in options.preload else None,
            "read": [*bubblewrap.python_folders(), *_SANDBOX_SOURCES, *system],
            "folder": folder,
        }

    def _command_line(self, settings: Mapping[str, Any]) -> list[str]:
        """The command of the server, in bubblewrap at the level NAMESPACES. Raises OSError."""
        text = json.dumps(settings)
        python = [sys.executable, "-I", "-B", "-c", _SERVER_CODE, str(_ROOT), text]
        if self._level != Level.NAMESPACES:
            return python
        read = [*bubblewrap.python_folders(), *_SANDBOX_SOURCES]
        if settings["fonts"]:
            read.append(settings["fonts"])
        uid = self._user.number if self._user else None
        proc: bubblewrap.Proc = "host" if bubblewrap.refused(uid) else "fresh"
        return bubblewrap.command(python, read=read, uid=uid, proc=proc)

    def _wait_until_ready(self, errors: Any) -> None:
        """Wait for the server's first message. Raises SandboxFailed."""
        self._control.settimeout(_SERVER_START_TIMEOUT_S)
        try:
            message = json.loads(self._control.recv(_MESSAGE_BYTES) or b"{}")
        except OSError as error:
            message = {"error": f"not ready within {_SERVER_START_TIMEOUT_S:g} seconds ({error})"}
        if message.get("ready"):
            return
        self.close()
        errors.seek(0)
        output = errors.read(4096).decode(errors="replace").strip()
        raise SandboxFailed(
            message.get("error")
            or output
            or f"the fork server ended with {self.process.returncode}"
        )

    def spawn(self) -> Interpreter:
        """Return a new interpreter, which confines itself next. Raises SandboxFailed."""
        needs_user = os.geteuid() == 0 and self._level != Level.NAMESPACES
        user = bubblewrap.free_user() if needs_user else None
        request = {"user": user.number if user else None}
        try:
            self._control.send(json.dumps(request).encode())
            text, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 2)
            if len(descriptors) == 2:
                connection = socket.socket(fileno=descriptors[0])
                return Interpreter(connection, descriptors[1], user, self)
            reason = json.loads(text or b'{"error": "the fork server has ended"}')["error"]
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
        """Close the socket, at which the server ends itself; kill it if it does not."""
        self._control.close()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._release()

    def _release(self) -> None:
        """Remove the server's folder and give its user number back."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._user:
            self._user.close_when_unused()


def _result(header: Mapping[str, Any], blobs: Sequence[bytes], elapsed: float) -> CodeResult | None:
    """The result of a call, or None unless every part is one that an interpreter may give.

    ``elapsed``: seconds that the call took by the host's clock.
    """
    text = header.get("text")
    most_text = cells.MAX_TEXT_CHARACTERS + len(cells.more(10**15))
    if not isinstance(text, str) or len(text) > most_text:
        return None
    error = header.get("error")
    if error is not None and not (
        isinstance(error, str) and len(error) <= cells.MAX_ERROR_CHARACTERS
    ):
        return None
    seconds = header.get("seconds")
    if type(seconds) is not float or not 0 <= seconds <= elapsed:
        return None
    dropped = header.get("dropped")
    if type(dropped) is not int or not 0 <= dropped <= cells.MAX_DROPPED_FIGURES:
        return None
    clean_error = _clean(error) if error else None
    return CodeResult(_clean(text), clean_error, tuple(blobs), seconds, dropped)


def _clean(text: str) -> str:
    """``text`` without lone surrogates, which JSON may carry and nothing else takes."""
    return text.encode(errors="replace").decode()


def _ends_within(descriptor: int, seconds: float) -> bool:
    """Whether the process of this pidfd ends within ``seconds``."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


_PRINT_FONT_CACHE = "import matplotlib, matplotlib.font_manager; print(matplotlib.get_cachedir())"


@functools.cache
def fonts_folder() -> str | None:
    """A folder with matplotlib's font list alone in it, or None.

    With None each fork server makes its own list, in some seconds.
    """
    command = [sys.executable, "-c", _PRINT_FONT_CACHE]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    folder = Path(process.stdout.strip().splitlines()[-1])
    # Where matplotlib may not write, its cache is a temporary folder that ended with the process.
    if not list(folder.glob("fontlist-*.json")):
        return None
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes - {".json", ".lock"}:
        return None
    return os.fspath(folder)
