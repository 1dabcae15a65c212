"""Inside the sandbox: the fork server.

It has loaded the modules of the interpreters; each interpreter is a fork that confines itself
before code runs. The server runs no code itself, has one thread, and ends with its host: the
control socket is closed then.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn

from rayloop.sandbox import cells, confine, frames, kernel
from rayloop.sandbox.options import Level

_THREAD_COUNTS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PRELOADED = (
    "random",
    "secrets",
    "math",
    "base64",
    "collections",
    "itertools",
    "statistics",
    "re",
)
_PRELOADED_OF_PIL = (
    "ImageDraw",
    "ImageFilter",
    "ImageOps",
    "ImageEnhance",
    "ImageChops",
    "ImageFont",
    "ImageStat",
)
_REAP_INTERVAL_S = 1.0
_REQUEST_BYTES = 1 << 16


def main(text: str) -> NoReturn:
    """Run the fork server with ``text``, the settings as JSON (rayloop/sandbox/host.py).

    It sends "ready", then an answer to each request for an interpreter.
    """
    settings: dict[str, Any] = json.loads(text)
    control = socket.socket(fileno=settings["control"])
    kernel.die_with_parent(None)
    # The arguments have paths of this machine.
    del sys.argv[1:]
    del sys.orig_argv[1:]
    try:
        home = None
        if settings["level"] == Level.NAMESPACES:
            home = _enter_pid_namespace(control)
        kernel.adopt_orphans()
        _load(settings)
        # A fork has the calling thread alone: a lock of another one would stay locked in it.
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(
                f"{threads} threads before the first fork; a module of preload starts some"
            )
    except BaseException as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)

    # A collection in a fork would write to every object, and so copy all shared pages.
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    ForkServer(settings, control, home).serve()


def _enter_pid_namespace(control: socket.socket) -> int:
    """Become process 1 of a new pid namespace.

    Returns a descriptor of the namespace, to come back from another one. Raises OSError.
    """
    kernel.enter_user_namespace(0)
    kernel.unshare(kernel.NEW_MOUNTS, kernel.NEW_PID)
    # A process keeps its own pid namespace: only its children are in the new one.
    if os.fork():
        # The host notices the server's end only when no process holds the socket.
        control.close()
        _, status = os.wait()
        os._exit(os.waitstatus_to_exitcode(status) & 255)
    kernel.die_with_parent(None)
    return os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


def _load(settings: dict[str, Any]) -> None:
    """Load the modules, and draw a first picture, so that interpreters share the memory.

    Raises ImportError.
    """
    # Before any import: OpenBLAS starts its threads when it is loaded.
    os.environ.update(dict.fromkeys(_THREAD_COUNTS, "1"), MPLBACKEND="Agg")
    # The cache must be writable, else matplotlib makes its list of fonts again.
    cache = os.path.join(settings["folder"], "matplotlib")
    if settings["fonts"]:
        shutil.copytree(settings["fonts"], cache)
    os.environ["MPLCONFIGDIR"] = cache
    for name in (*settings["preload"], *_PRELOADED):
        importlib.import_module(name)

    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
        importlib.import_module("numpy.linalg").svd([[1.0]])

    if "PIL.Image" in sys.modules:
        image = sys.modules["PIL.Image"]
        image.init()
        image.new("RGB", (8, 8)).resize((4, 4)).rotate(3).save(io.BytesIO(), "PNG")
        for name in _PRELOADED_OF_PIL:
            importlib.import_module(f"PIL.{name}")

    if "matplotlib.pyplot" in sys.modules:
        plt = sys.modules["matplotlib.pyplot"]
        plt.figure(figsize=(2, 2))
        plt.plot([0, 1])
        plt.title("x")
        plt.savefig(io.BytesIO(), format="png")
        plt.close("all")


class ForkServer:
    """A server that forks an interpreter for each request of the host.

    It also removes the folders of interpreters that have ended.
    """

    def __init__(self, settings: dict[str, Any], control: socket.socket, home: int | None) -> None:
        self._settings = settings
        self._control = control
        self._home = home
        self._children: dict[int, str] = {}
        self._fork_count = 0

    def serve(self) -> NoReturn:
        """Answer requests until the host closes the control socket.

        Then it ends all interpreters and this process.
        """
        while True:
            readable, _, _ = select.select([self._control], [], [], _REAP_INTERVAL_S)
            self._reap()
            if readable:
                request = self._control.recv(_REQUEST_BYTES)
                if not request:
                    self._end()
                self._spawn(json.loads(request))

    def _spawn(self, request: dict[str, Any]) -> None:
        """Fork an interpreter, and answer with its socket and its pidfd."""
        host_end, child_end = socket.socketpair()
        with host_end, child_end:
            self._fork_count += 1
            folder = os.path.join(self._settings["folder"], str(self._fork_count))

            if self._home is not None:
                kernel.unshare(kernel.NEW_PID)
            try:
                pid = os.fork()
                if pid == 0:
                    self._become_interpreter(child_end, folder, request["user"])
            except OSError as error:
                self._control.send(json.dumps({"error": f"fork refused: {error}"}).encode())
                return
            finally:
                # The server goes back, also after a failure, so that the next interpreter gets a
                # different namespace.
                if self._home is not None:
                    kernel.set_namespace(self._home, kernel.NEW_PID)
            self._children[pid] = folder

            pidfd = kernel.pidfd(pid)
            answer = json.dumps({"pid": pid}).encode()
            socket.send_fds(self._control, [answer], [host_end.fileno(), pidfd])
            os.close(pidfd)

    def _become_interpreter(
        self, connection: socket.socket, folder: str, user: int | None
    ) -> NoReturn:
        """In the child: confine it, report that, and serve. Never returns into the server."""
        try:
            # Its generator is a copy of the server's; Python seeds its own after a fork.
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
            connection = confine.confine(self._settings, connection, folder, user)
            frames.send(connection, {"ready": True})
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                frames.send(connection, {"error": reason})
            finally:
                os._exit(1)
        try:
            cells.Cells(connection).serve()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Remove the folders of children that have ended, and end processes they left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                break
            folder = self._children.pop(pid, None)
            if folder is not None:
                _remove(folder)
        # In its own pid namespace, an interpreter that ends takes its processes with it.
        if self._home is None:
            for pid in _child_pids() - set(self._children):
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> NoReturn:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _remove(folder: str) -> None:
    """Remove a folder, also one that is deeper than Python can walk."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        subprocess.run(
            ["/bin/rm", "-rf", folder],
            check=False,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _child_pids() -> set[int]:
    """The pids of this process's children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
            return set(map(int, file.read().split()))
    except (OSError, ValueError):
        return set()
