"""Serving the judge: start Ray Serve, run the application, tell clients where it is, and end it when a signal comes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ProxyStatus

from cluster.roles.session import serve_details, session
from judge.discovery import Address, announce, withdraw
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.signals import handling
from serve_apps.judge.address import publish, unclaimed
from serve_apps.judge.app import app, gpus
from serve_apps.judge.settings import LOOPBACK, ApplicationSettings, HttpOptions, ServeFile

POLL = 1.0
PROXY = 60.0
"""Seconds within which a proxy must answer once the replicas run."""


class ServeFailed(InfrastructureFailure):
    """Ray Serve did not bring the judge up, or lost it."""


def serve(file: ServeFile, address: str | None, temporary: str | None, announced: Path) -> int:
    """Serve in the cluster at ``address``, or in a private one, until SIGTERM or SIGINT. Returns 0.

    Raises ServeFailed, and ConfigError when Ray Serve is used there in a way that leaves no room for this judge.
    """
    (application,) = file.applications
    replicas = application.args.replicas
    each = {"CPU": replicas.cpus, "GPU": gpus(application.args), **replicas.resources}
    needed = {name: replicas.max * amount for name, amount in each.items()}
    host = file.http_options.host
    interrupt = (
        signal.default_int_handler
    )  # SIGTERM is KeyboardInterrupt, like SIGINT; Ray's own handler ends the process
    with session(needed, address, temporary, logs(announced)), handling(interrupt, signal.SIGTERM):
        unclaimed(application.name)
        running = room(application, file.http_options)
        port = running or file.http_options.port or free_port(host)
        try:
            if not running:
                options = {"host": host, "port": port}
                ray_serve.start(proxy_location=file.proxy_location, http_options=options)
            _deploy(application)
            place = Address(url=_url(host, port), key_file=application.args.key_file or "")
            with _findable(place, application.name, announced):
                print(f"judge: {place.url} ({application.args.backend.kind}), announced in {announced}", flush=True)
                _watch(application.name)
        except KeyboardInterrupt:
            print("judge: received a signal, ending", flush=True)
        finally:
            end(application.name, started=not running)
    return 0


def room(application: ApplicationSettings, wanted: HttpOptions) -> int:
    """The port of a Ray Serve that runs in this cluster already and has room for the application; 0: none runs.

    Raises ConfigError: Ray Serve would ignore other options in silence, and replace what has the same name.
    """
    found = serve_details()
    if found is None:
        return 0
    host, port = found["http_options"]["host"], found["http_options"]["port"]
    if application.name in found["applications"]:
        raise ConfigError(
            f"Ray Serve has an application named {application.name} in this cluster already. Choose another name"
        )
    for name, other in found["applications"].items():
        if other["route_prefix"] == application.route_prefix:
            raise ConfigError(
                f"the application {name} answers at {other['route_prefix']} of this cluster's Ray Serve ({host}:{port}) already. "
                "Use it, if it is a judge, or serve in a cluster of its own (without --address)"
            )
    if host != wanted.host or wanted.port not in (0, port):
        raise ConfigError(
            f"Ray Serve answers at {host}:{port} in this cluster already, and cannot answer at {wanted.host}:{wanted.port} too. "
            f"Set http_options.host={host} http_options.port={port}, or serve in a cluster of its own (without --address)"
        )
    return int(port)


def end(name: str, *, started: bool) -> None:
    """Take back the application and, when this process has ``started`` it and nobody else uses it, Ray Serve."""
    with suppress(RayError, RayServeException):  # gone already
        if started and not set(ray_serve.status().applications) - {name}:
            ray_serve.shutdown()
        elif name in ray_serve.status().applications:
            ray_serve.delete(name)


def _deploy(application: ApplicationSettings) -> None:
    deployed = app(application.args.model_dump())
    try:
        ray_serve.run(deployed, name=application.name, route_prefix=application.route_prefix)
    except (RuntimeError, RayServeException) as error:
        raise ServeFailed(str(error)) from error


@contextmanager
def _findable(place: Address, name: str, announced: Path) -> Iterator[None]:
    """In the file and, for runs in the same Ray cluster, as a named actor."""
    actor = publish(name, place)
    announce(announced, place)
    try:
        yield
    finally:
        withdraw(announced, place)
        with suppress(RayError):
            ray.kill(actor)


def logs(announced: Path) -> Path:
    """Where a private cluster's output is kept."""
    folder = announced.parent / "judge-logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _url(host: str, port: int) -> str:
    """Of a proxy that answers: this node's, else any."""
    if host in LOOPBACK:
        return f"http://{host}:{port}"
    deadline = time.monotonic() + PROXY
    while time.monotonic() < deadline:
        healthy = [node for node, status in ray_serve.status().proxies.items() if status == ProxyStatus.HEALTHY]
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in healthy}
        if hosts:
            here = ray.get_runtime_context().get_node_id()
            return f"http://{hosts.get(here) or min(hosts.values())}:{port}"
        time.sleep(POLL)
    raise ServeFailed(f"no proxy of Ray Serve is healthy within {PROXY:g} s: {ray_serve.status().proxies}")


def _watch(name: str) -> NoReturn:
    """Report each change of the application's state. Raises ServeFailed when somebody else deletes it, or ends Ray Serve."""
    before = "RUNNING"
    while True:
        time.sleep(POLL)
        try:
            application = ray_serve.status().applications.get(name)
        except (RayError, RayServeException) as error:
            raise ServeFailed(f"somebody else ended Ray Serve, or its cluster: {str(error).splitlines()[0]}") from error
        if application is None:
            raise ServeFailed(f"the application {name} was deleted by somebody else")
        state = application.status.value
        if state != before:
            print(
                f"judge: {state} {application.message.splitlines()[0] if application.message else ''}".rstrip(),
                flush=True,
            )
        before = state
