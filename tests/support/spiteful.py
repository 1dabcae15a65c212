"""What foreign code may do with a move of the policy: a game of gymnasium and a server of OpenEnv
that break as the move says.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.openenv_server import error
from tests.support.pictures import picture

RAISED = (
    ValueError("an illegal move"),
    AssertionError("no such state"),
    IndexError("off the board"),
    KeyError("x"),
    RuntimeError("over"),
    FileNotFoundError(2, "no", "level"),
)
"""By the action."""


def act(text: str, space: Any) -> int:
    """Raises more than a ValueError on texts that it did not expect."""
    return int(re.findall(r"\d", text)[0]) + int(text.encode("ascii", "strict")[-1] == 0)


def describe(observed: Any, info: Any) -> str:
    return f"at {observed}"


def _registered() -> None:
    import gymnasium

    class Spiteful(gymnasium.Env):  # type: ignore[misc]
        """Each action breaks it in another way; 9 is a move that it takes."""

        action_space = gymnasium.spaces.Discrete(10)
        observation_space = gymnasium.spaces.Discrete(3)

        def reset(
            self, *, seed: int | None = None, options: Any = None
        ) -> tuple[int, dict[str, Any]]:
            super().reset(seed=seed)
            return 0, {}

        def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if action < len(RAISED):
                raise RAISED[action]
            reward = {6: float("nan"), 7: float("-inf")}.get(action, 1.0)
            return 0, reward, False, False, {}

    if "rayloop/Spiteful-v0" not in gymnasium.registry:
        gymnasium.register("rayloop/Spiteful-v0", entry_point=Spiteful, disable_env_checker=True)


with suppress(ImportError):
    _registered()


SCREENS = (
    base64.b64encode(picture(28, 56)).decode(),
    "no base64",
    base64.b64encode(b"\x89PNG\r\n\x1a\n").decode(),
    base64.b64encode(picture(56, 56)[:-9]).decode(),
    "",
    base64.b64encode(picture(10, 4000)).decode(),
    [[300]],
)


def _session(socket: Any) -> None:
    """Whatever the action is, each message is answered in the next of its ways."""
    for number, raw in enumerate(socket):
        message = json.loads(raw)
        if message["type"] == "close":
            return
        if message["type"] == "step" and number % 4 == 1:
            socket.send(error("EXECUTION_ERROR", "IndexError: off the board"))
            continue
        if message["type"] == "step" and number % 4 == 2:
            socket.send(error("VALIDATION_ERROR", "by: a whole number is expected"))
            continue
        screen = SCREENS[number % len(SCREENS)]
        reward = float("nan") if number % 5 == 3 else 1.0
        observation = {"text": "x" * (3_000_000 if number % 5 == 4 else 5), "screen": screen}
        socket.send(
            json.dumps(
                {
                    "type": "observation",
                    "data": {"observation": observation, "reward": reward, "done": False},
                }
            )
        )


@contextmanager
def serving() -> Iterator[str]:
    """The address of the server."""
    from websockets.sync.server import serve

    with serve(_session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(5)
