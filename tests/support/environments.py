"""Environments that are awkward to host: bound to their thread, made of coroutines, or bound to
break what is around them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure, DeadlineExceeded, ToolDeadline
from rayloop.core.protocols import Observation, StepResult, ToolResult
from rayloop.core.threads import call_within
from rayloop.core.types import Message, Task


class ThreadBound:
    """As Playwright's sync API: what it holds works only in the thread that made it, and only while
    no event loop runs there.
    """

    class Settings(SettingsModel):
        """Nothing to set."""

    def __init__(self, settings: ThreadBound.Settings) -> None:
        self._owner = threading.current_thread()
        self._pages = sqlite3.connect(":memory:", isolation_level=None)
        self._pages.execute("create table said (text)")

    def reset(self, task: Task) -> Observation:
        self._work("reset")
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        said = self._work(text)
        return StepResult(Observation((Message("user", (f"{said} so far",)),)))

    def evaluate(self) -> float:
        return float(self._work("evaluate"))

    def close(self) -> None:
        self._pages.close()

    def _work(self, text: str) -> int:
        """Raises RuntimeError in another thread (sqlite does too, unless its number is used again),
        or in a running event loop.
        """
        if threading.current_thread() is not self._owner:
            raise RuntimeError("cannot switch to a different thread")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._pages.execute("insert into said values (?)", (text,))
            return int(self._pages.execute("select count(*) from said").fetchone()[0])
        raise RuntimeError("used inside of a running event loop")


class Ticker:
    """A tool without work: for its schema."""

    name = "ticks"
    description = "Says how often it has ticked."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": {}}

    def __call__(self, **arguments: Any) -> ToolResult:
        return ToolResult("0")


class Coroutines:
    """Every method is a coroutine; ``reset`` leaves a heartbeat on the event loop that all of them
    must share.
    """

    class Settings(SettingsModel):
        closed: str | None = None
        """A file that ``close`` makes, when the heartbeat was on its loop."""

    tools = (Ticker(),)

    def __init__(self, settings: Coroutines.Settings) -> None:
        self._settings = settings
        self._ticks = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset(self, task: Task) -> Observation:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._heart = asyncio.create_task(self._beat())
        return Observation(task.messages)

    async def step(self, text: str) -> StepResult:
        await asyncio.sleep(0)
        self._same()
        return StepResult(Observation((Message("user", (str(self._ticks),)),)))

    async def evaluate(self) -> float:
        self._same()
        return float(self._ticks)

    async def close(self) -> None:
        if self._loop is None:
            return
        self._same()
        if self._settings.closed is not None and not self._heart.done():
            Path(self._settings.closed).touch()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            self._ticks += 1

    def _same(self) -> None:
        assert asyncio.get_running_loop() is self._loop
        assert threading.get_ident() == self._thread


class Unpicklable(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def _hold(seconds: float) -> None:
    """Hang in C, without giving up the interpreter: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(int(seconds))


def _child(seconds: float) -> None:
    """Hang in a program that was started, as a browser would be."""
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=False)


def _tool(seconds: float) -> None:
    try:
        call_within(0.01, time.sleep, seconds)
    except DeadlineExceeded as error:
        raise ToolDeadline("the tool gave no answer") from error


def _raising(error: Callable[[], BaseException]) -> Callable[[float], None]:
    def fault(seconds: float) -> None:
        raise error()

    return fault


FAULTS: dict[str, Callable[[float], Any]] = {
    "none": lambda _: None,
    "hang": time.sleep,
    "hold": _hold,
    "child": _child,
    "tool": _tool,
    "exit": lambda _: os._exit(3),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: ctypes.string_at(0),
    "data": _raising(lambda: DataFailure("page.html", "missing")),
    "bug": _raising(lambda: ValueError("boom")),
    "disk": _raising(lambda: OSError(28, "No space left on device")),
    "leave": _raising(lambda: SystemExit(4)),
    "stop": _raising(lambda: StopIteration("boom")),
    "odd": _raising(lambda: Unpicklable("boom", "twice")),
    "lambda": lambda _: StepResult(info={"f": lambda: 0}),
}
"""Given the seconds that a hang lasts."""


class WaitsForTheOthers:
    """A question whose ``reset`` waits, for the task ``late``, until the test says that the other
    episodes have their answer.
    """

    Settings = SettingsModel
    answered = threading.Event()

    def __init__(self, settings: SettingsModel) -> None:
        pass

    def reset(self, task: Task) -> Observation:
        if task.id == "late":
            assert self.answered.wait(60)
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        return StepResult(done=True)

    def evaluate(self) -> None:
        return None

    def close(self) -> None: ...


class Fault:
    """Does what the policy says, one of ``FAULTS``, and leaves its process id."""

    class Settings(SettingsModel):
        pids: str | None = None
        """A folder for a file named by the process id, of each instance that was reset."""
        at: str = ""
        """A method other than ``step`` that ``does`` something."""
        does: str = "none"
        tasks: tuple[str, ...] = ()
        """Tasks whose ``step`` does it, whatever the policy says."""
        seconds: float = 60.0
        """How long a hang lasts."""

    def __init__(self, settings: Fault.Settings) -> None:
        self._settings = settings
        self._act("__init__")

    def reset(self, task: Task) -> Observation:
        self._task = task.id
        if self._settings.pids is not None:
            (Path(self._settings.pids) / str(os.getpid())).touch()
        self._act("reset")
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        does = self._settings.does if self._task in self._settings.tasks else text
        answer = FAULTS.get(does, FAULTS["none"])(self._settings.seconds)
        return answer if isinstance(answer, StepResult) else StepResult(done=True)

    def evaluate(self) -> float:
        """Its process id."""
        self._act("evaluate")
        return float(os.getpid())

    def close(self) -> None:
        self._act("close")

    def _act(self, method: str) -> None:
        if self._settings.at == method:
            FAULTS[self._settings.does](self._settings.seconds)


class Modules(Fault):
    """``evaluate`` counts the heavy libraries that its process has loaded."""

    def evaluate(self) -> float:
        return float(len({"torch", "transformers", "ray", "vllm"} & set(sys.modules)))


class Immediate(Fault):
    """Needs no thread of its own, it says.

    ``evaluate`` gives the thread that calls it, by its number on this machine.
    """

    immediate = True

    def evaluate(self) -> float:
        return float(threading.get_native_id())


class DerivedFromImmediate(Immediate):
    """Does not say so itself."""


class ImmediateCoroutines(Coroutines):
    """Promises what its methods do not keep."""

    immediate = True
