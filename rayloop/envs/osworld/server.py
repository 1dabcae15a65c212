"""Runs in OSWorld's own Python: makes one DesktopEnv and answers frames. Imports ``desktop_env`` and rayloop's frames only."""

from __future__ import annotations

import importlib
import socket
import sys
from typing import Any

from rayloop.envs.frames import Channel, Header


class SetupFailed(Exception):
    """The task's setup failed, though ``reset`` returned an observation."""


class NoScreenshot(Exception):
    """The machine gave no screenshot."""


class Server:
    """One machine."""

    def __init__(self) -> None:
        self._env: Any = None

    def answer(self, header: Header, blob: bytes) -> tuple[Header, bytes]:
        arguments = {key: value for key, value in header.items() if key not in ("op", "call", "blob")}
        return getattr(self, f"do_{header['op']}")(**arguments)

    def do_make(self, options: dict[str, Any]) -> tuple[Header, bytes]:
        """Its constructor boots the machine."""
        if "screen_size" in options:
            options["screen_size"] = tuple(options["screen_size"])
        self._env = importlib.import_module("desktop_env.desktop_env").DesktopEnv(**options)
        return {}, b""

    def do_reset(self, task: dict[str, Any]) -> tuple[Header, bytes]:
        """Raises SetupFailed where OSWorld goes on after five failed setups, NoScreenshot, and whatever it raises itself."""
        controller = self._env.setup_controller
        setup, ended = controller.setup, []

        def watched(*arguments: Any, **options: Any) -> Any:
            ended.append(False)
            ended[-1] = setup(*arguments, **options)
            return ended[-1]

        controller.setup = watched
        try:
            seen = self._env.reset(task_config=task)
        finally:
            controller.setup = setup
        if ended and ended[-1] is False:
            raise SetupFailed(f"the setup of task {task.get('id')} failed {len(ended)} times")
        return {}, _screenshot(seen)

    def do_step(self, action: str, pause: float) -> tuple[Header, bytes]:
        seen, _, done, _ = self._env.step(action, pause)
        return {"done": bool(done)}, b"" if done else _screenshot(seen)

    def do_evaluate(self) -> tuple[Header, bytes]:
        return {"result": float(self._env.evaluate())}, b""

    def do_close(self) -> tuple[Header, bytes]:
        if self._env is not None:
            self._env.close()
        return {}, b""


def _screenshot(seen: Any) -> bytes:
    """Raises NoScreenshot."""
    shot = seen.get("screenshot") if isinstance(seen, dict) else None
    if not shot:
        raise NoScreenshot("OSWorld returned no screenshot after its three tries")
    return bytes(shot)


def main() -> None:
    Channel(socket.socket(fileno=int(sys.argv[1]))).serve(Server().answer)
