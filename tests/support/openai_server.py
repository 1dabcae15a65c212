"""A small server with the OpenAI interface, in a thread: answers by the transformers engine, or by
a script.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rayloop.core.types import Sampling, TokenPrompt
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import ModelSettings
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine


class Server:
    """``requests`` holds what came, ``faults`` the statuses to answer with first, ``reply`` what
    chat answers.
    """

    def __init__(self, model: Path) -> None:
        self.model, self.requests, self.faults = (
            model,
            list[tuple[str, dict[str, str], dict[str, Any]]](),
            list[int](),
        )
        self.reply = {"message": {"content": "Hello."}, "finish_reason": "stop"}
        self.loads = True
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/load")(self.load)
        self._engine: Any = None
        self.url = ""

    async def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append((request.url.path, dict(request.headers), body))
        return body

    async def completions(self, request: Request) -> Any:
        body = await self._body(request)
        if self.faults:
            return JSONResponse({"error": "as the test wants it"}, self.faults.pop(0))
        if body["min_tokens"] > body["max_tokens"]:
            return JSONResponse(
                {"error": "min_tokens must be less than or equal to max_tokens"}, 400
            )  # as vLLM's does
        if self._engine is None:
            self._engine = await engine(self.model)
        done = await self._engine.generate(
            TokenPrompt(tuple(body["prompt"]), seed=body["seed"]),
            Sampling(
                body["temperature"],
                body["max_tokens"],
                body["min_tokens"],
                tuple(body["stop"]),
                tuple(body["stop_token_ids"]),
                tuple(map(int, body["logit_bias"])),
            ),
        )
        reason = "length" if done.finish == "length" else "stop"
        stop = body["stop"][0] if done.finish == "stop_string" else None
        choice = {
            "token_ids": done.token_ids,
            "logprobs": {"token_logprobs": done.logprobs},
            "finish_reason": reason,
        }
        return {"choices": [choice | {"stop_reason": stop}]}

    async def chat(self, request: Request) -> Any:
        await self._body(request)
        if self.faults:
            return JSONResponse({"error": "as the test wants it"}, self.faults.pop(0))
        return {"choices": [self.reply]}

    async def load(self, request: Request) -> Any:
        body = await self._body(request)
        if self.loads:
            weights = hf_state(load_model(ModelSettings(path=body["model_path"])))
            await self._engine.load(manifest(self._engine.health().version, weights), weights)
        return {"success": self.loads, "message": "as the test wants it"}


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    """A server at ``server.url`` + /v1."""
    server = Server(model)
    runner = uvicorn.Server(uvicorn.Config(server.app, port=0, log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    yield server
    runner.should_exit = True
    thread.join(10)
