"""An application as a deployment of Ray Serve."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from rayloop.core.failures import ConfigError
from rayloop.core.files import new_secret
from rayloop.web import RETRY_AFTER_S


def deployed(name: str, replica: type, settings: Any, *, what: str, **options: Any) -> Application:
    """The application of Ray Serve with this class of replica and its ``settings``.

    ``what`` names it in errors. Makes the key file when it is missing. Raises ConfigError without a
    key, unless ``settings.insecure``.
    """
    if settings.key_file is not None:
        new_secret(Path(settings.key_file), f"{what}'s key file")
    elif not settings.insecure:
        raise ConfigError(
            "key_file: everybody who reaches the port could ask. Name a file, or set insecure: true"
            " on loopback"
        )
    # Ray has this option since 2.60.
    if "backpressure_config" in inspect.signature(serve.deployment).parameters:
        options["backpressure_config"] = {"retry_after_s": RETRY_AFTER_S}
    ingress: Callable[[type], Any] = serve.ingress()
    options |= {"health_check_period_s": 5, "health_check_timeout_s": 30}
    return serve.deployment(name=name, **options)(ingress(replica)).bind(settings)
