"""The policy of a live run on Ray Serve (docs/policy_endpoint.md).

``python -m rayloop policy serve`` starts it.
"""

from typing import Any

from fastapi import FastAPI
from ray.serve import Application

from rayloop.chat.openai.routes import add_routes
from rayloop.judge.discovery import read_key
from rayloop.serve_apps.deployment import deployed
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.settings import PolicyEndpointSettings
from rayloop.web import application


class PolicyReplica:
    """The only replica: it remembers conversations, which a second one would not know."""

    def __init__(self, settings: PolicyEndpointSettings) -> None:
        self._service = PolicyService(settings, Engines(settings.namespace))
        self._key = read_key(settings.key_file or "")

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._service, self._key)


def app(settings: PolicyEndpointSettings) -> Application:
    """The application that Ray Serve runs. Raises ConfigError without a key."""
    return deployed(
        "Policy",
        PolicyReplica,
        settings,
        what="the policy endpoint",
        ray_actor_options={"num_cpus": 0},
        num_replicas=1,
        max_ongoing_requests=2 * settings.limits.held,
        max_queued_requests=settings.limits.queued,
        graceful_shutdown_timeout_s=5,
    )


def web(service: PolicyService, key: str) -> FastAPI:
    """The application. ``key`` "" admits everybody."""
    limits = service.settings.limits
    app = application("rayloop policy", service, key, limits, "the policy endpoint", invalid=400)
    add_routes(app, lambda request: service)
    return app
