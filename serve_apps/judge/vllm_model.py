"""A vLLM engine in the replica itself, behind the same interface as a server that speaks OpenAI's API."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import ray

from rayloop.core.deadlines import bounded
from rayloop.core.failures import DeadlineExceeded
from rayloop.core.model_files import resolve
from rayloop.engines.generation.vllm_chat import RequestRefused, TooLong, VllmChat
from rayloop.engines.generation.vllm_process import versions
from rayloop.serve_apps.judge.openai_model import TOP, CompletionModel
from rayloop.serve_apps.judge.service import Answer
from rayloop.serve_apps.judge.settings import VllmBackendSettings


class VllmModel(CompletionModel):
    """Made in the replica, whose GPUs the engine takes."""

    def __init__(self, settings: VllmBackendSettings) -> None:
        about = {**settings.engine.model_dump(include={"dtype", "extra"}), "max_tokens": settings.max_tokens}
        super().__init__(settings.model, settings.max_tokens, {"logprobs": True, "top_logprobs": TOP}, about)
        model = resolve(settings.model, settings.revision, weights=True)
        self._engine = VllmChat(str(model.folder), settings.engine, _scratch(), settings.model)
        self._identity = model.identity() | versions()
        self._timeout = settings.timeout

    async def identity(self) -> Mapping[str, Any]:
        """Of what was loaded, which stays while this process lives."""
        return self._identity

    async def complete(self, body: Mapping[str, Any]) -> Answer:
        try:
            late = DeadlineExceeded(f"{self.name}: no reply within {self._timeout:g} s")
            return Answer(200, await bounded(self._timeout, self._engine.complete(body), late))
        except RequestRefused as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else "refused"
            return Answer(400, {"error": {"message": str(error), "type": "invalid_request_error", "code": code}})

    def alive(self) -> None:
        self._engine.alive()

    async def close(self) -> None:
        self._engine.close()


def _scratch() -> str:
    """A new folder within Ray's own, with which it goes: a replica that is killed cannot remove anything."""
    return tempfile.mkdtemp(prefix="judge-", dir=ray.get_runtime_context().get_temp_dir())
