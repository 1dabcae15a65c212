"""Measuring in processes of their own: what hangs is killed, what dies is reported, and the GPU's memory comes back."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")


class Child:
    """A process that calls ``target(*arguments)``, a function of a module."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._began = time.monotonic()
        self._pipe, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_call, args=(other, target, arguments), daemon=False)
        self._process.start()
        other.close()

    def answer(self, within: float) -> dict[str, Any]:
        """``seconds`` since its start, and ``answer``, ``error``, ``died`` (its exit code) or ``hung``. It has ended then."""
        try:
            found: dict[str, Any] = (
                self._pipe.recv() if self._pipe.poll(within) else {"hung": f"ended after {within:g} s"}
            )
        except EOFError:
            self._process.join(5)
            found = {"died": self._process.exitcode}
        found["seconds"] = round(time.monotonic() - self._began, 3)
        self.end()
        return found

    def end(self) -> None:
        """End the process, if it has not."""
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def _call(pipe: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send({"answer": target(*arguments)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[-2000:]})
