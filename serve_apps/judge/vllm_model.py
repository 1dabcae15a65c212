"""A vLLM engine in the replica itself, with the interface of a server that speaks OpenAI's API."""

import tempfile
from collections.abc import Mapping
from typing import Any

import ray

from rayloop.core.deadlines import bounded
from rayloop.core.failures import DeadlineExceeded
from rayloop.core.model_files import resolve
from rayloop.engines.generation.vllm_chat import RequestRefused, TooLong, VllmChat
from rayloop.engines.generation.vllm_process import versions
from rayloop.serve_apps.judge.openai_model import TOP_LOGPROBS, ChatAnswer, CompletionModel
from rayloop.serve_apps.settings import VllmBackendSettings


class VllmModel(CompletionModel):
    """A model in an engine of this replica, which takes the replica's GPUs."""

    def __init__(self, settings: VllmBackendSettings) -> None:
        about = {
            **settings.engine.model_dump(include={"dtype", "extra"}),
            "max_tokens": settings.max_tokens,
        }
        extra = {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        super().__init__(settings.model, settings.max_tokens, extra, about)
        model = resolve(settings.model, settings.revision, weights=True, key="backend.model")
        # The engine's scratch folder is within Ray's own, which Ray removes: a replica that is
        # killed cannot remove anything.
        scratch = tempfile.mkdtemp(prefix="judge-", dir=ray.get_runtime_context().get_temp_dir())
        self._engine = VllmChat(
            str(model.folder), settings.engine.placed(settings.gpus, None), scratch, settings.model
        )
        self._identity = model.identity() | versions()
        self._timeout = settings.timeout

    async def identity(self) -> Mapping[str, Any]:
        """The identity of the loaded files, which does not change while this process lives."""
        return self._identity

    async def complete(self, body: Mapping[str, Any]) -> ChatAnswer:
        """A chat completion, with the status 400 for a request that vLLM refuses.

        Raises DeadlineExceeded.
        """
        timeout_error = DeadlineExceeded(f"{self.name}: no reply within {self._timeout:g} s")
        try:
            completion = self._engine.complete(body)
            return ChatAnswer(200, await bounded(self._timeout, completion, timeout_error))
        except RequestRefused as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else "refused"
            problem = {"message": str(error), "type": "invalid_request_error", "code": code}
            return ChatAnswer(400, {"error": problem})

    def alive(self) -> None:
        """Raise InfrastructureFailure when the engine is dead."""
        self._engine.alive()

    async def close(self) -> None:
        """End the engine."""
        self._engine.close()
