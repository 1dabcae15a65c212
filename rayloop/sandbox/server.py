"""Inside the sandbox: the fork server.

It has loaded what interpreters need; each is a fork that confines itself before code runs. It runs
no code itself, has one thread, and ends with its host: the control socket is closed then.
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

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main(text: str) -> NoReturn:
    """``text``: the settings as JSON (rayloop/sandbox/host.py).

    Answers "ready", then a request for each interpreter.
    """
    settings: dict[str, Any] = json.loads(text)
    control = socket.socket(fileno=settings["control"])
    kernel.die_with_parent(None)
    del sys.argv[1:], sys.orig_argv[1:]  # paths of this machine
    try:
        home = None
        if settings["level"] == Level.NAMESPACES:
            home = _own_pids(control)
        kernel.adopt_orphans()
        _load(settings)
        # A fork has the calling thread alone: a lock of another one would stay locked in it.
        tasks = len(os.listdir("/proc/self/task"))
        if tasks != 1:
            raise RuntimeError(
                f"{tasks} threads before the first fork; a module of preload starts some"
            )
    except BaseException as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)

    # A collection in a fork would write to every object, and so copy all shared pages.
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    ForkServer(settings, control, home).serve()


def _own_pids(control: socket.socket) -> int:
    """Go on as process 1 of a new pid namespace, and return its descriptor, to come back from
    another one. Raises OSError.
    """
    kernel.enter_user_namespace(0)
    kernel.unshare(kernel.NEW_MOUNTS, kernel.NEW_PID)
    # A process keeps its own pid namespace: only its children are in the new one.
    if os.fork():
        # The host notices the server's end only when no process holds the socket.
        control.close()
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 255)
    kernel.die_with_parent(None)
    return os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)


def _load(settings: dict[str, Any]) -> None:
    """The modules, and what a first picture needs, so that interpreters share it.

    Raises ImportError.
    """
    # Before any import: OpenBLAS starts its threads when it is loaded.
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"), MPLBACKEND="Agg")
    cache = os.path.join(
        settings["folder"], "matplotlib"
    )  # must be writable, else the list of fonts is made again
    if settings["fonts"]:
        shutil.copytree(settings["fonts"], cache)
    os.environ["MPLCONFIGDIR"] = cache
    for name in (
        *settings["preload"],
        "random",
        "secrets",
        "math",
        "base64",
        "collections",
        "itertools",
        "statistics",
        "re",
    ):
        importlib.import_module(name)

    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
        importlib.import_module("numpy.linalg").svd([[1.0]])

    if "PIL.Image" in sys.modules:
        image = sys.modules["PIL.Image"]
        image.init()
        image.new("RGB", (8, 8)).resize((4, 4)).rotate(3).save(io.BytesIO(), "PNG")
        for name in (
            "ImageDraw",
            "ImageFilter",
            "ImageOps",
            "ImageEnhance",
            "ImageChops",
            "ImageFont",
            "ImageStat",
        ):
            importlib.import_module(f"PIL.{name}")

    if "matplotlib.pyplot" in sys.modules:
        plt = sys.modules["matplotlib.pyplot"]
        plt.figure(figsize=(2, 2))
        plt.plot([0, 1])
        plt.title("x")
        plt.savefig(io.BytesIO(), format="png")
        plt.close("all")


class ForkServer:
    """Forks an interpreter for each request of the host, and removes the folders of those that have
    ended.
    """

    def __init__(self, settings: dict[str, Any], control: socket.socket, home: int | None) -> None:
        self._settings, self._control, self._home = settings, control, home
        self._children: dict[int, str] = {}
        self._made = 0

    def serve(self) -> NoReturn:
        """Answer requests until the host closes the control socket; then end all interpreters and
        this process.
        """
        while True:
            readable, _, _ = select.select([self._control], [], [], 1.0)
            self._reap()
            if readable:
                request = self._control.recv(1 << 16)
                if not request:
                    self._end()
                self._spawn(json.loads(request))

    def _spawn(self, request: dict[str, Any]) -> None:
        """Fork one; the answer carries its socket and its pidfd."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._made += 1
            folder = os.path.join(self._settings["folder"], str(self._made))

            if self._home is not None:
                kernel.unshare(kernel.NEW_PID)
            try:
                pid = os.fork()
                if pid == 0:
                    self._become(theirs, folder, request["user"])
            except OSError as error:
                self._control.send(json.dumps({"error": f"fork refused: {error}"}).encode())
                return
            finally:
                # The server goes back, so that the next interpreter gets a namespace of its own;
                # also when it got none.
                if self._home is not None:
                    kernel.set_namespace(self._home, kernel.NEW_PID)
            self._children[pid] = folder

            handle = kernel.pidfd(pid)
            socket.send_fds(
                self._control, [json.dumps({"pid": pid}).encode()], [ours.fileno(), handle]
            )
            os.close(handle)

    def _become(self, connection: socket.socket, folder: str, user: int | None) -> NoReturn:
        """In the child: confine it, report that, and serve. Never returns into the server."""
        try:
            if (
                "numpy.random" in sys.modules
            ):  # its generator is a copy of the server's; Python's own seeds itself
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
        """Forget children that have ended, with their folders, and end what they left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                break
            if (folder := self._children.pop(pid, None)) is not None:
                _remove(folder)
        for pid in _children_of_this() - set(self._children) if self._home is None else ():
            os.kill(pid, signal.SIGKILL)

    def _end(self) -> NoReturn:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _remove(folder: str) -> None:
    """Also a tree that is deeper than Python can walk."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        subprocess.run(
            ["/bin/rm", "-rf", folder],
            check=False,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _children_of_this() -> set[int]:
    """Pids, also of adopted ones.

    (In a pid namespace of its own a child takes all that it started with it.)
    """
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="utf-8") as file:
            return set(map(int, file.read().split()))
    except (OSError, ValueError):
        return set()
