"""A judge on a real Ray Serve for tests, ``python -m rayloop judge serve`` as a process, and the
language model behind it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
import yaml
from fastapi import FastAPI, Request, Response

from rayloop.judge.client import ClientSettings
from tests.support.runs import ROOT, TAG, eventually, tagged

ASKED = re.compile(
    r"Question: (.*)\nReference answer: (.*)\n.*\n<candidate-\w+>\n(.*)\n</candidate"
)
START = 300.0
"""Seconds that a judge may take to serve: engines start slowly on a busy machine."""


class ModelStub:
    """Speaks OpenAI's API. Judges by equality without case; of sorting tasks half of all answers
    are right, whatever they say.

    ``seconds`` is how long it takes; ``status`` other than 200 is an answer for all; ``calls``
    counts; ``bodies`` are kept.
    """

    def __init__(self) -> None:
        self.url, self.seconds, self.status = "", 0.0, 200
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)

    def chat(self, request: Request, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        time.sleep(self.seconds)
        if self.status != 200:
            return Response('{"error": "as the test wants it"}', self.status, {"Retry-After": "7"})
        text = (
            self.verdict(body["messages"][-1]["content"]) if "response_format" in body else "Four."
        )
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
        }
        return Response(json.dumps(answer), media_type="application/json")

    def verdict(self, text: str) -> str:
        found = ASKED.search(text)
        assert found is not None, text
        question, reference, candidate = found[1], found[2], json.loads(found[3])
        right = candidate.casefold().strip(". ") == reference.casefold()
        if question.startswith("Sort"):
            right = zlib.crc32(candidate.encode()) % 2 == 0
        return json.dumps(
            {"reason": "as the stub sees it", "verdict": "correct" if right else "incorrect"}
        )


@contextmanager
def model_stub() -> Iterator[ModelStub]:
    stub = ModelStub()
    server = uvicorn.Server(
        uvicorn.Config(stub.app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, "the model stub", 30)
    stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield stub
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@dataclass
class Served:
    """``announced`` is the file that the judge wrote; ``output`` what it printed."""

    process: subprocess.Popen[bytes]
    folder: Path
    tag: str

    @property
    def announced(self) -> Path:
        return self.folder / "judge.json"

    @property
    def url(self) -> str:
        url: str = json.loads(self.announced.read_text(encoding="utf-8"))["url"]
        return url

    @property
    def key_file(self) -> Path:
        return self.folder / "judge.key"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key_file.read_text(encoding='utf-8').strip()}"}

    @property
    def text(self) -> str:
        return (self.folder / "judge.log").read_text(errors="replace", encoding="utf-8")

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, trust_env=False, timeout=60)

    def settings(self, **changes: Any) -> ClientSettings:
        return ClientSettings(url=self.url, key_file=str(self.key_file), **changes)

    def replicas(self) -> list[psutil.Process]:
        """The live replica processes, oldest first."""
        found = []
        for process in tagged(self.tag):
            with suppress(psutil.Error):
                if "".join(process.cmdline()).startswith("ray::ServeReplica:judge:Judge"):
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def kill(self) -> None:
        """SIGKILL to all replicas that live now."""
        for replica in self.replicas():
            with suppress(psutil.NoSuchProcess):
                replica.kill()

    def ready(self, replicas: int) -> list[psutil.Process]:
        """Wait until so many replicas live and the judge answers."""

        def check() -> bool:
            with suppress(httpx.HTTPError), self.http() as http:
                return (
                    len(self.replicas()) >= replicas
                    and http.get("/readyz", timeout=5).status_code == 200
                )
            return False

        eventually(check, lambda: f"{replicas} replicas\n{self.text}", START, 0.2)
        return self.replicas()


@contextmanager
def served(folder: Path, args: Mapping[str, Any], *options: str) -> Iterator[Served]:
    """Serve on a free port; ended with SIGTERM by the block, after which no process of it is left."""
    config = {
        "http_options": {"host": "127.0.0.1", "port": 0},
        "applications": [{"name": "judge", "args": dict(args)}],
    }
    (folder / "judge.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    tag, temporary = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix=""))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {
        TAG: tag,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        "judge",
        "serve",
        str(folder / "judge.yaml"),
        "--announce",
        str(folder / "judge.json"),
        *options,
    ]
    with (folder / "judge.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rayloop", *command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Served(process, folder, tag)
    try:
        eventually(
            lambda: made.announced.exists() or process.poll() is not None,
            lambda: f"a judge\n{made.text}",
            START,
            0.1,
        )
        assert process.poll() is None, made.text
        yield made
        process.terminate()
        assert process.wait(60) == 0, made.text
        eventually(lambda: not tagged(tag), "the judge's processes end", 15)
        assert not made.announced.exists()
    finally:
        for left in tagged(tag):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        shutil.rmtree(temporary, ignore_errors=True)
