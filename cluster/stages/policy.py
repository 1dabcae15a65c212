"""Serving the policy of a live run: find the run, start Ray Serve in its cluster, and end with the run or with a signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from rayloop.actors.handles import Handle, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.stages.serving import ServeFailed, begin, deploy, end, room, url, watch
from rayloop.core.failures import ConfigError
from rayloop.core.files import write_whole
from rayloop.core.signals import handling
from rayloop.run.config import RunConfig
from rayloop.run.place import run_of
from rayloop.serve_apps.http_options import HttpOptions
from rayloop.serve_apps.policy.app import app
from rayloop.serve_apps.policy.settings import PolicyEndpointSettings, PolicyLimits

ANSWER = 60.0
"""Seconds within which the run's driver must return its configuration; it is asked once."""


class Application(NamedTuple):
    """The application's name in Serve, and its root."""

    name: str
    route_prefix: str = "/"


def serve(
    address: str, namespace: str, name: str, http: HttpOptions, limits: PolicyLimits, key_file: Path | None,
    announced: Path, alive: Callable[[], bool],
) -> int:  # fmt: skip
    """Serve the run in ``namespace``, or the one called ``name``, of the cluster at ``address`` until a signal or the run's end.

    Returns 0. ``alive`` returns whether the run lives.

    Raises ConfigError when there is no such run or no room for another application, ServeFailed.
    """
    ray.init(address=address, log_to_driver=False, namespace="rayloop")
    try:
        with handling(signal.default_int_handler, signal.SIGTERM):
            found = namespace or _named(name)
            config = _config(found)
            application = Application(f"policy-{config.name}")
            running = room(application, http)
            try:
                port = begin(http.host, http.port, running)
                deploy(app(settings(config, found, limits, key_file)), application)
                place = url(http.host, port)
                with _announced(announced, place, key_file):
                    print(f"policy: {place}/v1 model {config.name}, announced in {announced}", flush=True)
                    _watch(application.name, alive)
            except KeyboardInterrupt:
                print("policy: received a signal, ending", flush=True)
            finally:
                if alive():
                    end(application.name, started=not running)
    finally:
        if alive():
            ray.shutdown()
    return 0


def settings(config: RunConfig, namespace: str, limits: PolicyLimits, key_file: Path | None) -> PolicyEndpointSettings:
    """The endpoint's settings from a run's configuration, with which its tokens are those of the run's episodes."""
    sampling, episode = config.rollout.sampling, config.environment.episode
    return PolicyEndpointSettings(
        run=config.name, namespace=namespace, model=config.model, temperature=sampling.temperature,
        max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, tokens=episode.max_tokens, images=episode.max_images,
        key_file=None if key_file is None else str(key_file.resolve()), insecure=key_file is None, limits=limits,
    )  # fmt: skip


def _watch(name: str, alive: Callable[[], bool]) -> None:
    try:
        watch(name, "policy", alive)
    except ServeFailed:
        if alive():
            raise
    print("policy: the run has ended, and with it the endpoint", flush=True)


def _config(namespace: str) -> RunConfig:
    """The configuration of the run in ``namespace``, from its driver. Raises ConfigError when no driver answers."""
    names = [name for found, name in _actors() if found == namespace and name.startswith("driver-")]
    for name in names:
        with suppress(ValueError, RayError, TimeoutError):
            driver: Handle[DriverActor] = ray.get_actor(name, namespace=namespace)
            config: RunConfig = ray.get(submit(driver, DriverActor.about), timeout=ANSWER)
            return config
    raise ConfigError(f"no driver of the run in namespace {namespace} answers: it is starting, or has ended")


def _named(name: str) -> str:
    """The namespace of the one live run of this name. Raises ConfigError."""
    found = sorted({namespace for namespace, actor in _actors() if actor.startswith("driver-")})
    ours = [namespace for namespace in found if run_of(namespace) == name]
    if len(ours) == 1:
        return ours[0]
    there = ", ".join(filter(None, map(run_of, found))) or "none"
    many = f"{len(ours)} runs of this name are live: name one by its folder, --run" if ours else "it is not live"
    raise ConfigError(f"--name {name}: {many}. Live runs of this cluster: {there}")


def _actors() -> list[tuple[str, str]]:
    """Namespace and name of all named actors."""
    return [(actor["namespace"], actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]


@contextmanager
def _announced(file: Path, place: str, key_file: Path | None) -> Iterator[None]:
    """Announce the base URL and the key file to clients in ``file``, while the block runs."""
    key = "" if key_file is None else str(key_file.resolve())
    write_whole(file, json.dumps({"url": f"{place}/v1", "key_file": key}).encode(), mode=0o644, durable=False)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
