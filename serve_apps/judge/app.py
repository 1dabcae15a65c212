"""The judge on Ray Serve: ``serve run rayloop.serve_apps.judge.app:app``, ``serve deploy serve_apps/judge/configs/judge_cpu.yaml``.

``python -m rayloop judge serve CONFIG`` does the same, makes a key, and announces the address to clients (docs/judge.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from rayloop.core.failures import ConfigError
from rayloop.core.files import new_secret
from rayloop.judge.cache import VerdictCache
from rayloop.judge.discovery import read_key
from rayloop.judge.grader import Grader
from rayloop.judge.rubric import FOLDER, load_rubrics
from rayloop.serve_apps.judge.http import web
from rayloop.serve_apps.judge.openai_model import CompletionModel, OpenAIModel
from rayloop.serve_apps.judge.service import JudgeService
from rayloop.serve_apps.judge.settings import JudgeSettings, OpenAIBackendSettings, RuleBackendSettings, VllmBackendSettings
from rayloop.serve_apps.web import backpressure


class Judge:
    """One replica, in which the application of serve_apps/judge/http.py is built: it holds connections and a model."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._service = JudgeService(settings, *built(settings), serve.get_replica_context().replica_id.unique_id)
        self._key = read_key(settings.key_file or "")

    async def check_health(self) -> None:
        """Serve calls this, and replaces the replica when it raises."""
        if self._service.chat is not None:
            self._service.chat.alive()

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._service, self._key)


def built(settings: JudgeSettings) -> tuple[Grader, CompletionModel | None]:
    """The grader for the backend in ``settings``, and its model, if there is one. Raises ConfigError."""
    rubrics = load_rubrics(Path(settings.rubrics) if settings.rubrics else FOLDER)
    cache = VerdictCache(settings.cache.size, Path(settings.cache.path) if settings.cache.path else None)
    match settings.backend:
        case RuleBackendSettings():
            return Grader(rubrics), None
        case OpenAIBackendSettings():
            model = OpenAIModel(settings.backend)
            return Grader(rubrics, model, "openai", cache), model
        case VllmBackendSettings():
            if seeing := [name for name, rubric in rubrics.items() if rubric.sees_images]:
                raise ConfigError(
                    f"rubrics: {', '.join(seeing)} shows images, and the backend vllm reads text only. Serve a model that sees "
                    "with `vllm serve` and judge through the backend openai, or set sees_images: false"
                )
            from rayloop.serve_apps.judge.vllm_model import VllmModel  # imports vLLM and torch

            own = VllmModel(settings.backend)
            return Grader(rubrics, own, "vllm", cache), own


def app(args: dict[str, Any]) -> Application:
    """The application that Ray Serve runs; ``args`` are a JudgeSettings. Raises pydantic.ValidationError, ConfigError."""
    settings = JudgeSettings.model_validate(args)
    if settings.key_file is not None:
        new_secret(Path(settings.key_file), "the judge's key file")
    elif not settings.insecure:
        raise ConfigError("key_file: everybody who reaches the port could ask. Name a file, or set insecure: true on loopback")
    limits, replicas = settings.limits, settings.replicas
    scale: dict[str, Any] = {"num_replicas": replicas.min}
    if replicas.min < replicas.max:
        target = {"min_replicas": replicas.min, "max_replicas": replicas.max, "target_ongoing_requests": replicas.target}
        scale = {"autoscaling_config": target}
    ingress: Callable[[type], Any] = serve.ingress()
    deployment = serve.deployment(
        name="Judge",
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": gpus(settings), "resources": replicas.resources},
        max_ongoing_requests=limits.ongoing,
        max_queued_requests=limits.queued,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=min(limits.seconds, 60),
        **scale,
        **backpressure(),
    )(ingress(Judge))
    return deployment.bind(settings)


def gpus(settings: JudgeSettings) -> int:
    """The number of GPUs of one replica."""
    backend = settings.backend
    return backend.gpus if isinstance(backend, VllmBackendSettings) else 0
