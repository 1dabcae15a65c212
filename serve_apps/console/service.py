"""The run console on Ray Serve, next to a judge: ``rayloop console RUN --address HEAD:PORT``.

Its replica reads the run's folder.
"""

from pathlib import Path
from typing import Any

from ray.serve import Application

from rayloop.judge.discovery import read_key
from rayloop.run.folder import RunFolder
from rayloop.serve_apps.console.app import web
from rayloop.serve_apps.deployment import deployed
from rayloop.serve_apps.settings import ConsolePlace


class ConsoleReplica:
    """The only replica. It asks for no CPU, so that it fits into a cluster that a run fills."""

    def __init__(self, settings: ConsolePlace) -> None:
        """Open the run. Raises ConfigError where this node sees no run in the folder, or no key."""
        self._folder = RunFolder.begun(Path(settings.folder))
        self._token = read_key(settings.key_file or "")

    def __serve_build_asgi_app__(self) -> Any:
        return web(self._folder, self._token)


def app(settings: ConsolePlace) -> Application:
    """The application that Ray Serve runs. Raises ConfigError without a key."""
    return deployed(
        "Console",
        ConsoleReplica,
        settings,
        what="the console",
        ray_actor_options={"num_cpus": 0},
        num_replicas=1,
        max_ongoing_requests=32,
        max_queued_requests=256,
        graceful_shutdown_timeout_s=5,
    )
