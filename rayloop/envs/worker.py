"""The process of an environment with ``isolation: process``: makes instances one after the other and calls them as it is told.

All calls run in its main thread; another one reads what the actor asks for, and ends everything when the actor is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from concurrent.futures import Future
from typing import Any

from rayloop.core.protocols import Environment
from rayloop.core.threads import CallLoop, hanging, own_frames
from rayloop.envs.instance import invoke
from rayloop.envs.process import HEADER
from rayloop.envs.settings import EnvironmentKind


def serve(connection: int) -> None:
    """Serve the socket with this number until the actor is gone."""
    host = _Host(socket.socket(fileno=connection))
    threading.Thread(target=host.listen, daemon=True, name="rayloop-actor").start()
    host.serve()


class _Host:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calls = CallLoop()
        self._environment: Environment | None = None
        self._closed: Future[Any] = Future()

    def listen(self) -> None:
        """Put what the actor asks for; never returns."""
        try:
            while True:
                [length] = HEADER.unpack(self._receive(HEADER.size))
                self._put(*pickle.loads(self._receive(length)))
        except BaseException as error:
            if not isinstance(error, EOFError | OSError):
                print(f"rayloop: the process of an environment ends: {own_frames(error)}", flush=True)
            os.killpg(0, signal.SIGKILL)

    def serve(self) -> None:
        """Carry out calls; after each instance's last one its event loop is ended too. Never returns."""
        while True:
            self._calls.run()
            error = self._closed.exception()
            self._environment = None
            self._send(error is None, error or hanging())

    def _put(self, what: str, *about: Any) -> None:
        if what == "make":
            self._calls.put(lambda: self._make(*about)).add_done_callback(self._answer)
        elif what == "call":
            self._calls.put(lambda: self._invoke(*about)).add_done_callback(self._answer)
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
            content = pickle.dumps((succeeded, value if succeeded else _portable(value)))
        except Exception as error:
            why = f"what it returned ({type(value).__name__}) cannot be sent to the actor: {type(error).__name__}: {error}"
            content = pickle.dumps((False, TypeError(why)))
        self._connection.sendall(HEADER.pack(len(content)) + content)

    def _receive(self, length: int) -> bytearray:
        received = bytearray()
        while len(received) < length:
            part = self._connection.recv(min(length - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return received


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note; another one of its words when it cannot be pickled."""
    trace = own_frames(error)
    try:
        copied: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.add_note(f"In its own process:\n{trace}")
    return copied
