"""Serving an application: room in a cluster's Ray Serve, its start, its end, and a watch over it."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any, Protocol

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ProxyStatus

from rayloop.cluster.session import serve_details
from rayloop.core.failures import ConfigError, DeadlineExceeded, InfrastructureFailure
from rayloop.core.threads import call_within
from rayloop.serve_apps.http_options import LOOPBACK

POLL = 1.0
ASKED = 5.0
"""Seconds for one look at Serve's status; Ray itself waits a minute for a cluster that is gone, and then ends the process."""
PROXY = 60.0
"""Seconds within which a proxy must answer once the replicas run."""


class ServeFailed(InfrastructureFailure):
    """Ray Serve did not bring the application up, or lost it."""


def begin(host: str, port: int, running: int, proxies: str = "HeadOnly") -> int:
    """The port of Ray Serve: that of the one ``running`` (``room``), else of the one that is started here."""
    if running:
        return running
    port = port or free_port(host)
    ray_serve.start(proxy_location=proxies, http_options={"host": host, "port": port})
    return port


def deploy(application: Any, named: Named) -> None:
    """Run an application of ``serve.deployment(...).bind``, and wait until it is up. Raises ServeFailed."""
    try:
        ray_serve.run(application, name=named.name, route_prefix=named.route_prefix)
    except (RuntimeError, RayServeException) as error:
        raise ServeFailed(str(error)) from error


class Listens(Protocol):
    """The address of an application."""

    @property
    def host(self) -> str:
        """The interface, such as 127.0.0.1."""
        ...

    @property
    def port(self) -> int:
        """The port; 0 for a free one."""
        ...


class Named(Protocol):
    """An application of Ray Serve."""

    @property
    def name(self) -> str:
        """The name in Serve's status."""
        ...

    @property
    def route_prefix(self) -> str:
        """The root of its routes."""
        ...


def room(application: Named, wanted: Listens) -> int:
    """The port of a Ray Serve that runs in this cluster already and has room for the application; 0: none runs.

    Raises ConfigError: Ray Serve would ignore other options in silence, and replace what has the same name.
    """
    found = serve_details()
    if found is None:
        return 0
    host, port = found["http_options"]["host"], found["http_options"]["port"]
    if application.name in found["applications"]:
        raise ConfigError(f"Ray Serve has an application named {application.name} in this cluster already. Choose another name")
    for name, other in found["applications"].items():
        if other["route_prefix"] == application.route_prefix:
            raise ConfigError(
                f"the application {name} answers at {other['route_prefix']} of this cluster's Ray Serve ({host}:{port}) already. "
                "Use it, or serve in a cluster of its own (without --address)"
            )
    if host != wanted.host or wanted.port not in (0, port):
        raise ConfigError(
            f"Ray Serve answers at {host}:{port} in this cluster already, and cannot answer at {wanted.host}:{wanted.port} too. "
            f"Set http_options.host={host} http_options.port={port}, or serve in a cluster of its own (without --address)"
        )
    return int(port)


def end(name: str, *, started: bool) -> None:
    """Remove the application and, when this process has ``started`` Ray Serve and no other application uses it, Ray Serve."""
    with suppress(RayError, RayServeException):  # gone already
        if started and not set(ray_serve.status().applications) - {name}:
            # Its controller ends itself within the call. Ray prints in a thread that the call has failed and will be tried again.
            with redirect_stdout(io.StringIO()):
                ray_serve.shutdown()
                time.sleep(POLL)
        elif name in ray_serve.status().applications:
            ray_serve.delete(name)


def free_port(host: str) -> int:
    """A port of this host that is free now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def url(host: str, port: int) -> str:
    """The URL of a healthy proxy: this node's if there is one. Raises ServeFailed when none is healthy in time."""
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


def watch(name: str, who: str, still: Callable[[], bool] = lambda: True) -> None:
    """Print each change of the application's state, prefixed with ``who``, while ``still()``.

    Raises ServeFailed when another process deletes it, or ends Ray Serve.
    """
    before = "RUNNING"
    while still():
        time.sleep(POLL)
        try:
            application = call_within(ASKED, ray_serve.status).applications.get(name)
        except DeadlineExceeded:
            continue
        except (RayError, RayServeException) as error:
            raise ServeFailed(f"Ray Serve, or its cluster, was ended from outside: {str(error).splitlines()[0]}") from error
        if application is None:
            raise ServeFailed(f"the application {name} was deleted from outside")
        state = application.status.value
        if state != before:
            print(f"{who}: {state} {application.message.splitlines()[0] if application.message else ''}".rstrip(), flush=True)
        before = state
