"""The policy of a live run on Ray Serve, for ``python -m rayloop policy serve`` (docs/policy_endpoint.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from rayloop.core.failures import ConfigError
from rayloop.core.files import new_secret
from rayloop.judge.discovery import read_key
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.http import web
from rayloop.serve_apps.policy.service import PolicyService
from rayloop.serve_apps.policy.settings import PolicyEndpointSettings
from rayloop.serve_apps.web import backpressure


class PolicyReplica:
    """The only replica: it remembers conversations, which a second one would not know."""

    def __init__(self, settings: PolicyEndpointSettings) -> None:
        self._service = PolicyService(settings, Engines(settings.namespace))
        self._key = read_key(settings.key_file or "")

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._service, self._key)


def app(settings: PolicyEndpointSettings) -> Application:
    """The application that Ray Serve runs. Raises ConfigError without a key."""
    if settings.key_file is not None:
        new_secret(Path(settings.key_file), "the policy endpoint's key file")
    elif not settings.insecure:
        raise ConfigError("key_file: everybody who reaches the port could ask. Name a file, or serve loopback insecurely")
    limits = settings.limits
    ingress: Callable[[type], Any] = serve.ingress()
    deployment = serve.deployment(
        name="Policy",
        ray_actor_options={"num_cpus": 0},
        num_replicas=1,
        max_ongoing_requests=2 * limits.held,
        max_queued_requests=limits.queued,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=5,
        **backpressure(),
    )(ingress(PolicyReplica))
    return deployment.bind(settings)
