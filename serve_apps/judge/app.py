"""The judge on Ray Serve.

``serve run rayloop.serve_apps.judge.app:app`` and ``serve deploy
serve_apps/judge/configs/judge_cpu.yaml`` start it. ``python -m rayloop judge serve CONFIG`` does
the same, makes a key, and announces the address to clients (docs/judge.md).
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from starlette.exceptions import HTTPException

from rayloop.core.failures import ConfigError
from rayloop.judge.api import JudgeBody, JudgeRequest, JudgeResponse, JudgeVersion
from rayloop.judge.cache import VerdictCache
from rayloop.judge.discovery import read_key
from rayloop.judge.grader import Grader
from rayloop.judge.rubric import FOLDER, load_rubrics
from rayloop.serve_apps.deployment import deployed
from rayloop.serve_apps.judge.openai_model import CompletionModel, OpenAIModel
from rayloop.serve_apps.judge.service import JudgeService
from rayloop.serve_apps.settings import (
    JudgeSettings,
    OpenAIBackendSettings,
    RuleBackendSettings,
    VllmBackendSettings,
)
from rayloop.web import KEY, RETRY_AFTER_S, ImagePart, TextPart, application, documented, problem


class Judge:
    """One replica, with connections and a model, in which the application of ``web`` is built."""

    def __init__(self, settings: JudgeSettings) -> None:
        grader, model = built(settings)
        replica = serve.get_replica_context().replica_id.unique_id
        self._service = JudgeService(settings, grader, model, replica)
        self._key = read_key(settings.key_file or "")

    async def check_health(self) -> None:
        """Serve calls this, and replaces the replica when it raises."""
        if self._service.chat is not None:
            self._service.chat.alive()

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._service, self._key)


def built(settings: JudgeSettings) -> tuple[Grader, CompletionModel | None]:
    """The grader for the backend in ``settings``, and its model, if there is one.

    Raises ConfigError.
    """
    rubrics = load_rubrics(Path(settings.rubrics) if settings.rubrics else FOLDER)
    cache_file = Path(settings.cache.path) if settings.cache.path else None
    cache = VerdictCache(settings.cache.size, cache_file)
    match settings.backend:
        case RuleBackendSettings():
            return Grader(rubrics), None
        case OpenAIBackendSettings():
            model = OpenAIModel(settings.backend)
            return Grader(rubrics, model, "openai", cache), model
        case VllmBackendSettings():
            with_images = [name for name, rubric in rubrics.items() if rubric.sees_images]
            if with_images:
                raise ConfigError(
                    f"rubrics: {', '.join(with_images)} shows images, and the backend vllm reads"
                    " text only. Serve a model that sees with `vllm serve` and judge through the"
                    " backend openai, or set sees_images: false"
                )
            # Here, since it imports vLLM and torch.
            from rayloop.serve_apps.judge.vllm_model import VllmModel

            vllm_model = VllmModel(settings.backend)
            return Grader(rubrics, vllm_model, "vllm", cache), vllm_model


def app(args: dict[str, Any]) -> Application:
    """The application that Ray Serve runs; ``args`` are a JudgeSettings.

    Raises pydantic.ValidationError, ConfigError.
    """
    settings = JudgeSettings.model_validate(args)
    limits = settings.limits
    replicas = settings.replicas
    scale: dict[str, Any] = {"num_replicas": replicas.min}
    if replicas.min < replicas.max:
        scale = {
            "autoscaling_config": {
                "min_replicas": replicas.min,
                "max_replicas": replicas.max,
                "target_ongoing_requests": replicas.target,
            }
        }
    return deployed(
        "Judge",
        Judge,
        settings,
        what="the judge",
        max_ongoing_requests=limits.ongoing,
        max_queued_requests=limits.queued,
        ray_actor_options={
            "num_cpus": replicas.cpus,
            "num_gpus": gpus(settings),
            "resources": replicas.resources,
        },
        graceful_shutdown_timeout_s=min(limits.seconds, 60),
        **scale,
    )


def gpus(settings: JudgeSettings) -> int:
    """The number of GPUs of one replica."""
    backend = settings.backend
    return backend.gpus if isinstance(backend, VllmBackendSettings) else 0


class CompletionMessage(BaseModel):
    """A message of a chat completion."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class CompletionRequest(BaseModel):
    """The part of OpenAI's request that is passed on.

    Other keys are refused, so that no key is ignored silently.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str = Field("judge", max_length=256)
    """Ignored: there is one model."""
    messages: list[CompletionMessage] = Field(min_length=1, max_length=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


def web(service: JudgeService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""
    limits = service.settings.limits
    app = application("rayloop judge", service, key, limits, "the judge")

    @app.get("/version", responses=documented(401, 403), dependencies=KEY)
    async def version() -> JudgeVersion:
        return service.version

    @app.post(
        "/v1/judge", responses=documented(400, 401, 403, 408, 413, 422, 503), dependencies=KEY
    )
    async def judge(body: JudgeBody) -> JudgeResponse:
        items = body.items if isinstance(body, JudgeRequest) else (body,)
        if len(items) > limits.items:
            raise HTTPException(
                422, f"{len(items)} items, {limits.items} are allowed in one request"
            )
        return JudgeResponse(results=tuple(await service.judge(items)))

    @app.post(
        "/v1/chat/completions",
        responses=documented(400, 401, 403, 404, 408, 413, 422, 429, 503),
        dependencies=KEY,
        response_model=dict[str, Any],
    )
    async def chat(body: CompletionRequest) -> Response:
        if service.chat is None:
            return problem(
                404,
                "no_model",
                f"the backend {service.grader.label} has no language model; POST /v1/judge works",
            )
        request = body.model_dump(exclude_none=True) | {"model": service.chat.name}
        request.pop("max_completion_tokens", None)
        tokens = body.max_completion_tokens or body.max_tokens or limits.chat_tokens
        request["max_tokens"] = min(tokens, limits.chat_tokens)
        status, answer, retry_after = await service.complete(service.chat, request)
        if status in (200, 400, 422, 429):
            headers = {"Retry-After": retry_after or str(RETRY_AFTER_S)} if status == 429 else None
            return Response(json.dumps(answer), status, headers, media_type="application/json")
        return problem(503, "model_failed", f"the model's server answered {status}")

    return app
