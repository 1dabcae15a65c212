"""A server that answers like a resources server of NeMo Gym, for tests of the adapter: what the
test wants, also what breaks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROW = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "How is the weather?"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "get_weather",
                "description": "",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
                    "required": ["city"],
                },
            }
        ],
    },
    "expected": "cold",
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


class Answers:
    """What the server answers: path -> status and body. A body may be a function of the request."""

    def __init__(self) -> None:
        self.by_path: dict[str, tuple[int, Any]] = {
            "/seed_session": (200, {}),
            "/get_weather": (200, {"weather": "cold"}),
            "/verify": (200, {"reward": 1.0}),
        }
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.cookies: list[str | None] = []


@contextmanager
def answering() -> Iterator[tuple[Answers, str]]:
    """The server's answers, which the test may change, and its address."""
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers.requests.append((self.path, request))
            answers.cookies.append(self.headers["Cookie"])
            status, body = answers.by_path.get(self.path, (404, {"detail": "Not Found"}))
            if callable(body):
                status, body = body(request)
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Set-Cookie", "session=s1; path=/")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the requests are kept."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield answers, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(5)
