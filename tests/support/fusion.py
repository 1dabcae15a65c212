"""A server that speaks SandboxFusion's ``POST /run_code`` for ``language: bash``, and runs the code
in bubblewrap.

The fields, their types and what they mean are those of bytedance/SandboxFusion
(sandbox/server/sandbox_api.py and sandbox/runners/base.py at 53a6341), and of its client
sandbox-fusion 0.3.7.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rayloop.sandbox import bubblewrap

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]
"""From a request's JSON to a status and a body."""


def run_code(asked: dict[str, Any]) -> tuple[int, bytes]:
    """As the real one: a new folder with ``files``, the code in a file of it, and what is left of
    ``fetch_files``.
    """
    assert asked["language"] == "bash"
    with tempfile.TemporaryDirectory() as place, bubblewrap.borrowed() as uid:
        folder = Path(place)
        for name, content in asked["files"].items():
            (folder / name).write_bytes(base64.b64decode(content))
        (folder / "code.sh").write_text(asked["code"], encoding="utf-8")
        for path in (folder, *folder.iterdir()):
            path.chmod(0o777)
            if uid is not None:
                os.chown(path, uid, uid)
        limits = ["/usr/bin/prlimit", f"--data={asked['memory_limit_MB'] << 20}", "--nproc=64"]
        program = [*limits, "/bin/bash", "/here/code.sh"]
        line = bubblewrap.command(
            program, write={place: "/here"}, uid=uid, options=["--chdir", "/here"]
        )
        ran: dict[str, Any] = {"status": "Finished", "execution_time": 0.1}
        try:
            ended = subprocess.run(
                line, input=b"", capture_output=True, timeout=asked["run_timeout"], check=False
            )
            ran |= {
                "return_code": ended.returncode,
                "stdout": ended.stdout.decode(),
                "stderr": ended.stderr.decode(),
            }
        except subprocess.TimeoutExpired:
            ran |= {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        left = {name: folder / name for name in asked["fetch_files"] if (folder / name).is_file()}
        files = {name: base64.b64encode(path.read_bytes()).decode() for name, path in left.items()}
    status = "Success" if ran["return_code"] == 0 else "Failed"
    answer = {
        "status": status,
        "message": "",
        "compile_result": None,
        "run_result": ran,
        "files": files,
        "executor_pod_name": None,
    }
    return 200, json.dumps(answer).encode()


@contextmanager
def server(answer: Answer = run_code) -> Iterator[str]:
    """Its address, while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/run_code"
            status, body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join(10)
