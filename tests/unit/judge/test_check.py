"""``judge check`` on a judge that is not ready: one line with every condition to fix."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rayloop.cli import main

FAILING = {
    "model": (
        "InfrastructureFailure: http://model.example:8000/v1: ConnectError:"
        f" {'no route to host ' * 12}"
    ),
    "canary": "was not judged yet",
    "queue": "512 items are held, the limit is 512",
}


class NotReady(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(json.dumps({"ready": False, "failing": FAILING}).encode())

    def log_message(self, *_: object) -> None: ...


def test_each_failing_condition_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), NotReady) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["judge", "check", f"http://127.0.0.1:{server.server_address[1]}"]) == 1
        server.shutdown()
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "/readyz: HTTP 503: " in line
    assert all(f'"{name}": "{why}"' in line for name, why in FAILING.items()), line
