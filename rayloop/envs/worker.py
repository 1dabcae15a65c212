"""The process of an environment with ``isolation: process``.

Calls run in its main thread, another thread reads them.
"""

import os
import pickle
import signal
import socket
import threading
from concurrent.futures import Future
from typing import Any

from rayloop.core.protocols import Environment
from rayloop.core.threads import CallLoop, hanging, own_frames
from rayloop.envs.process import PICKLED
from rayloop.envs.settings import EnvironmentKind
from rayloop.envs.tools import invoke
from rayloop.sandbox import frames


def serve(connection: int) -> None:
    """Serve the socket with this number until the actor has ended."""
    host = _Host(socket.socket(fileno=connection))
    threading.Thread(target=host.listen, daemon=True, name="rayloop-actor").start()
    host.serve()


class _Host:
    """Runs the environment's calls. ``_call`` is the number of the call that is carried out."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calls = CallLoop()
        self._environment: Environment | None = None
        self._closed: Future[Any] = Future()
        self._call = 0

    def listen(self) -> None:
        """Queue the calls of the actor; kill the process group when the actor has ended.

        Never returns.
        """
        try:
            while True:
                header, [pickled] = frames.receive(self._connection, None, PICKLED)
                self._call = header["call"]
                self._put(header["op"], *pickle.loads(pickled))
        except BaseException as error:
            # An OSError is the end of the actor: nobody is left who would read it.
            if not isinstance(error, OSError):
                print(
                    f"rayloop: the process of an environment ends: {own_frames(error)}", flush=True
                )
            os.killpg(0, signal.SIGKILL)

    def serve(self) -> None:
        """Carry out calls; after each instance's last one its event loop is ended too.

        Never returns.
        """
        while True:
            self._calls.run()
            error = self._closed.exception()
            self._environment = None
            self._send(error is None, error or hanging())

    def _put(self, op: str, *arguments: Any) -> None:
        if op in ("make", "call"):
            work = self._make if op == "make" else self._invoke
            self._calls.put(lambda: work(*arguments)).add_done_callback(self._answer)
        else:
            self._closed = self._calls.put(self._close)
            self._calls.stop()

    def _make(self, kind: EnvironmentKind) -> None:
        self._environment = kind.build()

    def _invoke(self, method: str, args: tuple[Any, ...]) -> Any:
        assert self._environment is not None
        return invoke(self._environment, method, args)

    def _close(self) -> Any:
        return None if self._environment is None else self._environment.close()

    def _answer(self, answer: Future[Any]) -> None:
        error = answer.exception()
        self._send(error is None, answer.result() if error is None else error)

    def _send(self, succeeded: bool, value: Any) -> None:
        try:
            content = pickle.dumps(value if succeeded else _portable(value))
        except Exception as error:
            reason = (
                f"what it returned ({type(value).__name__}) cannot be sent to the actor:"
                f" {type(error).__name__}: {error}"
            )
            succeeded = False
            content = pickle.dumps(TypeError(reason))
        frames.send(self._connection, {"call": self._call, "succeeded": succeeded}, [content])


def _portable(error: BaseException) -> BaseException:
    """Return the error with its traceback as a note; a RuntimeError when it cannot be pickled."""
    trace = own_frames(error)
    try:
        # Pickle calls a class with ``args`` alone: an error that needs more cannot be read.
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"In its own process:\n{trace}")
    return copy
