"""The process of one machine, in OSWorld's Python (3.9 or newer).

It makes a DesktopEnv and answers calls. It imports nothing of rayloop but frames.
"""

import importlib
import socket
import sys
from typing import Any

from rayloop.sandbox.frames import Channel, Header, arguments


class SetupFailed(Exception):
    """The task's setup failed, though ``reset`` returned an observation."""


class NoScreenshot(Exception):
    """The machine returned no screenshot."""


class MachineServer:
    """One machine."""

    def __init__(self) -> None:
        self._env: Any = None

    def answer(self, header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
        """Carry out a call: the method of that name."""
        return getattr(self, f"do_{header['op']}")(**arguments(header))

    def do_make(self, options: dict[str, Any]) -> tuple[Header, list[bytes]]:
        """Boot the machine, which DesktopEnv's constructor does."""
        options["screen_size"] = tuple(options["screen_size"])
        self._env = importlib.import_module("desktop_env.desktop_env").DesktopEnv(**options)
        return {}, []

    def do_reset(self, task: dict[str, Any]) -> tuple[Header, list[bytes]]:
        """Reset the machine for a task.

        Raises SetupFailed where OSWorld continues after five failed setups, NoScreenshot, and
        whatever OSWorld raises.
        """
        controller = self._env.setup_controller
        setup = controller.setup
        results: list[Any] = []

        def watched(*arguments: Any, **options: Any) -> Any:
            results.append(False)
            results[-1] = setup(*arguments, **options)
            return results[-1]

        # ``reset`` continues after a failed setup and reports nothing: only these return values
        # show it.
        controller.setup = watched
        try:
            observation = self._env.reset(task_config=task)
        finally:
            controller.setup = setup
        if results and results[-1] is False:
            raise SetupFailed(f"the setup of task {task.get('id')} failed {len(results)} times")
        return {}, [_screenshot(observation)]

    def do_step(self, action: str, pause: float) -> tuple[Header, list[bytes]]:
        """Carry out one action, and take a screenshot ``pause`` seconds after it.

        No screenshot is taken when the episode is done.
        """
        observation, _, done, _ = self._env.step(action, pause)
        return {"done": bool(done)}, [] if done else [_screenshot(observation)]

    def do_evaluate(self) -> tuple[Header, list[bytes]]:
        """Return OSWorld's result, 0 to 1."""
        return {"result": float(self._env.evaluate())}, []

    def do_close(self) -> tuple[Header, list[bytes]]:
        """Stop the machine."""
        if self._env is not None:
            self._env.close()
        return {}, []


def _screenshot(observation: Any) -> bytes:
    """Return the observation's PNG. Raises NoScreenshot."""
    shot = observation.get("screenshot") if isinstance(observation, dict) else None
    if not shot:
        raise NoScreenshot("OSWorld returned no screenshot after its three tries")
    return bytes(shot)


def main() -> None:
    """Serve the socket whose number is the first argument."""
    Channel(socket.socket(fileno=int(sys.argv[1]))).serve(MachineServer().answer)
