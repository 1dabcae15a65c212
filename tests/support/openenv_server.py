"""A server that speaks OpenEnv's WebSocket protocol, for tests of the adapter: it counts, and fails
on demand.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import ServerConnection, serve

from tests.support.pictures import picture


class Counter:
    """Count up to 3.

    The action is ``{"by": 1}``; ``fault`` says what goes wrong with the next message.
    """

    def __init__(self) -> None:
        self.fault: str | dict[str, Any] = ""
        self.resets, self.closed = list[dict[str, Any]](), 0

    def session(self, socket: ServerConnection) -> None:
        count = 0
        for raw in socket:
            message = json.loads(raw)
            kind, data = message["type"], message.get("data", {})
            if kind == "close":
                self.closed += 1
                return
            if self.fault == "hang":
                time.sleep(3)
            elif self.fault == "gone":
                socket.close()
                return
            elif isinstance(self.fault, dict):
                socket.send(json.dumps({"type": "error", "data": self.fault}))
                continue
            elif self.fault:
                socket.send(error(self.fault, "as the test wants it"))
                continue
            if kind == "reset":
                self.resets.append(data)
                count = 0
            elif not isinstance(data.get("by"), int):
                socket.send(error("VALIDATION_ERROR", "by: a whole number is expected"))
                continue
            else:
                count += data["by"]
            screen = base64.b64encode(picture(28, 56)).decode()
            observation = {
                "text": f"the count is {count}",
                "screen": screen,
                "grid": [0] * 12,
                "grid_shape": [2, 2, 3],
            }
            reported = {"observation": observation, "reward": float(count == 3), "done": count >= 3}
            socket.send(json.dumps({"type": "observation", "data": reported}))


def error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


@contextmanager
def counting() -> Iterator[tuple[Counter, str]]:
    """The server, and its address."""
    counter = Counter()
    with serve(counter.session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield counter, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(5)
