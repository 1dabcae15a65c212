"""Serving the judge: start Ray Serve, run the application, announce its address, and end it at a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray.exceptions import RayError

from rayloop.cluster.session import session
from rayloop.cluster.stages.serving import begin, deploy, end, room, url, watch
from rayloop.core.signals import handling
from rayloop.judge.discovery import Address, announce, withdraw
from rayloop.serve_apps.judge.address import announce_in_ray, unclaimed
from rayloop.serve_apps.judge.app import app, gpus
from rayloop.serve_apps.judge.settings import ServeFile


def serve(file: ServeFile, address: str | None, temporary: str | None, announced: Path) -> int:
    """Serve in the cluster at ``address``, or in a private one, until SIGTERM or SIGINT. Returns 0.

    Raises ServeFailed, and ConfigError when Ray Serve is used there in a way that leaves no room for this judge.
    """
    (application,) = file.applications
    replicas = application.args.replicas
    each = {"CPU": replicas.cpus, "GPU": gpus(application.args), **replicas.resources}
    needed = {name: replicas.max * amount for name, amount in each.items()}
    host = file.http_options.host
    interrupt = signal.default_int_handler  # SIGTERM is KeyboardInterrupt, like SIGINT; Ray's own handler ends the process
    with session(needed, address, temporary, logs(announced)), handling(interrupt, signal.SIGTERM):
        unclaimed(application.name)
        running = room(application, file.http_options)
        try:
            port = begin(host, file.http_options.port, running, file.proxy_location)
            deploy(app(application.args.model_dump()), application)
            place = Address(url=url(host, port), key_file=application.args.key_file or "")
            with _findable(place, application.name, announced):
                print(f"judge: {place.url} ({application.args.backend.kind}), announced in {announced}", flush=True)
                watch(application.name, "judge")
        except KeyboardInterrupt:
            print("judge: received a signal, ending", flush=True)
        finally:
            end(application.name, started=not running)
    return 0


@contextmanager
def _findable(place: Address, name: str, announced: Path) -> Iterator[None]:
    """Announce the address in the file and, for runs in the same Ray cluster, in a named actor, while the block runs."""
    actor = announce_in_ray(name, place)
    announce(announced, place)
    try:
        yield
    finally:
        withdraw(announced, place)
        with suppress(RayError):
            ray.kill(actor)


def logs(announced: Path) -> Path:
    """The folder for a private cluster's output, made if it is missing."""
    folder = announced.parent / "judge-logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
