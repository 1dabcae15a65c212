"""Measuring in processes of their own: what hangs is killed with all it started, what dies is
reported, and the GPU's memory comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

CONTEXT = multiprocessing.get_context("spawn")
GRACE_S = 15.0
"""Seconds that processes have to end by themselves after SIGTERM."""


def completed(
    command: Sequence[str], limit: float, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run``, in a session of its own, whose end is the end of all that it started.

    Raises TimeoutExpired after ``limit`` seconds, when all of it has ended.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            said, blamed = process.communicate(timeout=limit)
        except BaseException:  # Ctrl-C, too, does not reach another session
            end_all(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, blamed)


def end_all(leader: int) -> None:
    """End a process, those below it and those of its session: SIGTERM, and SIGKILL after
    ``GRACE_S`` seconds.
    """
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(leader)
        found = {process.pid: process for process in (top, *top.children(recursive=True))}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                found.setdefault(process.pid, process)
    for process in found.values():
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(found.values(), GRACE_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, 5)


class Child:
    """A process that calls ``target(*arguments)``, a function of a module."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._began = time.monotonic()
        self._pipe, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_call, args=(other, target, arguments), daemon=False)
        self._process.start()
        other.close()

    def answer(self, within: float) -> dict[str, Any]:
        """``seconds`` since its start, and ``answer``, ``error``, ``died`` (its exit code) or
        ``hung``. It has ended then.
        """
        try:
            found: dict[str, Any] = (
                self._pipe.recv()
                if self._pipe.poll(within)
                else {"hung": f"ended after {within:g} s"}
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
        if self._process.is_alive() and self._process.pid is not None:
            end_all(self._process.pid)  # vLLM's processes would keep the GPU's memory
            self._process.join(5)


def _call(pipe: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send({"answer": target(*arguments)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[-2000:]})
