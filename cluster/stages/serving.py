"""Serving the judge, the policy of a live run or a run's console with Ray Serve.

They are served until a signal comes or the run ends.
"""

import io
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ProxyStatus

from rayloop.actors.handles import Handle, submit
from rayloop.cluster.driver_actor import DriverActor
from rayloop.cluster.session import node_rows, serve_details, session
from rayloop.core.failures import ConfigError, DeadlineExceeded, InfrastructureFailure
from rayloop.core.files import write_whole
from rayloop.core.threads import call_within
from rayloop.judge.discovery import Address, announce, read_key, withdraw
from rayloop.launch.signals import STOP, handling
from rayloop.run.config import RunConfig
from rayloop.run.place import run_of
from rayloop.serve_apps.console import service as console
from rayloop.serve_apps.judge import app as judge
from rayloop.serve_apps.judge.address import announce_in_ray, unclaimed
from rayloop.serve_apps.policy import app as policy
from rayloop.serve_apps.settings import (
    LOOPBACK,
    ConsolePlace,
    HttpOptions,
    PolicyEndpointSettings,
    PolicyLimits,
    ServeFile,
)
from rayloop.web import with_token

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at Serve."""
STATUS_TIMEOUT_S = 5.0
"""Seconds for one look at Serve's status.

Ray itself waits a minute for a cluster that has ended, and then ends the process.
"""
PROXY_TIMEOUT_S = 60.0
"""Seconds within which a proxy must answer once the replicas run."""
CONFIG_TIMEOUT_S = 60.0
"""Seconds within which the run's driver must return its configuration; it is asked once."""


class ServeFailed(InfrastructureFailure):
    """Ray Serve did not bring the application up, or lost it."""


def serve_judge(
    file: ServeFile, address: str | None, temporary: str | None, announced: Path
) -> int:
    """Serve in the cluster at ``address``, or in a private one, until SIGTERM or SIGINT.

    Raises ServeFailed, ConfigError (``room``).
    """
    (application,) = file.applications
    settings = application.args
    replicas = settings.replicas
    per_replica = {"CPU": replicas.cpus, "GPU": judge.gpus(settings), **replicas.resources}
    needed = {name: replicas.max * amount for name, amount in per_replica.items()}
    logs = announced.parent / "judge-logs"
    logs.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def findable(url: str) -> Iterator[str]:
        """Announce the address in the file.

        For runs in the same Ray cluster it is announced in a named actor, too.
        """
        place = Address(url=url, key_file=settings.key_file or "")
        actor = announce_in_ray(application.name, place)
        announce(announced, place)
        try:
            yield f"{url} ({settings.backend.kind}), announced in {announced}"
        finally:
            withdraw(announced, place)
            with suppress(RayError):
                ray.kill(actor)

    # SIGTERM is KeyboardInterrupt, like SIGINT; Ray's own handler would end the process.
    interrupt = signal.default_int_handler
    with session(needed, address, temporary, logs), handling(interrupt, *STOP):
        unclaimed(application.name)
        _serve(
            "judge",
            application.name,
            judge.app(settings.model_dump()),
            file.http_options,
            findable,
            proxies=file.proxy_location,
        )
    return 0


def serve_policy(
    address: str,
    namespace: str,
    name: str,
    http: HttpOptions,
    limits: PolicyLimits,
    key_file: Path | None,
    announced: Path,
    alive: Callable[[], bool],
) -> int:
    """Serve the policy of a run in the cluster at ``address``, until a signal or the run's end.

    The run is the one in ``namespace``, or the one called ``name``. ``alive`` returns whether the
    run lives. Raises ServeFailed, and ConfigError without such a run, or without ``room``.
    """
    key = None if key_file is None else str(key_file.resolve())

    @contextmanager
    def findable(url: str) -> Iterator[str]:
        """Announce the base URL and the key file in the file."""
        # Readable by all: it names the file of the key, and does not contain the key.
        place = json.dumps({"url": f"{url}/v1", "key_file": key or ""})
        write_whole(announced, place.encode(), mode=0o644, durable=False)
        try:
            yield f"{url}/v1 model {config.name}, announced in {announced}"
        finally:
            announced.unlink(missing_ok=True)

    ray.init(address=address, log_to_driver=False, namespace="rayloop")
    try:
        with handling(signal.default_int_handler, *STOP):
            run_namespace = namespace or _namespace_of(name)
            config = _config(run_namespace)
            application = policy.app(_endpoint(config, run_namespace, limits, key))
            _serve("policy", f"policy-{config.name}", application, http, findable, alive)
    finally:
        # Once its cluster has ended, a call of Ray waits a minute and then ends this process.
        if alive():
            ray.shutdown()
    return 0


def serve_console(folder: Path, address: str, http: HttpOptions, key: Path | None) -> int:
    """Serve the console of the run in ``folder`` in the cluster at ``address``.

    It is below /console/ until a signal comes. ``key``: the token's file. Raises ServeFailed, and
    ConfigError without ``room``.
    """
    prefix = f"/console/{folder.name}"
    file = str(key) if key else None
    with session({}, address, None, folder / "logs"), handling(signal.default_int_handler, *STOP):

        def shown(url: str) -> AbstractContextManager[str]:
            token = read_key(file) if file else ""
            return nullcontext(with_token(f"{url}{prefix}/", token, lambda: Path(file or "")))

        place = ConsolePlace(folder=str(folder), key_file=file, insecure=key is None)
        name = f"console-{folder.name}"
        _serve("console", name, console.app(place), http, shown, prefix=prefix)
    return 0


def _serve(
    who: str,
    name: str,
    application: Any,
    http: HttpOptions,
    findable: Callable[[str], AbstractContextManager[str]],
    alive: Callable[[], bool] = lambda: True,
    proxies: str = "HeadOnly",
    prefix: str = "/",
) -> None:
    """Serve an application of ``serve.deployment(...).bind``.

    It is served until a signal comes, or ``alive()`` is false. ``findable`` announces a URL while
    it is entered, and returns a line to print. Raises ServeFailed, ConfigError (``room``).
    """
    running = room(name, http, prefix)
    try:
        port = running or http.port or free_port(http.host)
        if not running:
            ray_serve.start(proxy_location=proxies, http_options={"host": http.host, "port": port})
        try:
            ray_serve.run(application, name=name, route_prefix=prefix)
        except (RuntimeError, RayServeException) as error:
            raise ServeFailed(str(error)) from error
        with findable(url(http.host, port)) as line:
            print(f"{who}: {line}", flush=True)
            try:
                watch(name, who, alive)
            except ServeFailed:
                # The end of the run ends Serve with it, which is not a failure of the endpoint.
                if alive():
                    raise
            print(f"{who}: the run has ended, and with it the endpoint", flush=True)
    except KeyboardInterrupt:
        print(f"{who}: received a signal, ending", flush=True)
    finally:
        if alive():
            end(name, started=not running)


def room(name: str, wanted: HttpOptions, prefix: str = "/") -> int:
    """The port of a Ray Serve that runs in this cluster already; 0 when none runs.

    It must have room for an application at ``prefix``. Raises ConfigError: Ray Serve would ignore
    other options in silence, and replace an application with the same name.
    """
    details = serve_details()
    if details is None:
        return 0
    host = details["http_options"]["host"]
    port = details["http_options"]["port"]

    if name in details["applications"]:
        raise ConfigError(
            f"Ray Serve has an application named {name} in this cluster already. Choose another"
            " name"
        )
    for served_name, served in details["applications"].items():
        if served["route_prefix"] == prefix:
            raise ConfigError(
                f"the application {served_name} answers at {prefix} of this cluster's Ray Serve"
                f" ({host}:{port}) already. Use it, or serve in a private cluster (without"
                " --address)"
            )

    if host != wanted.host or wanted.port not in (0, port):
        raise ConfigError(
            f"Ray Serve answers at {host}:{port} in this cluster already, and cannot answer at"
            f" {wanted.host}:{wanted.port} too. Set http_options.host={host}"
            f" http_options.port={port} (--host, --port), or serve elsewhere (without --address)"
        )
    return int(port)


def end(name: str, *, started: bool) -> None:
    """Remove the application, and Ray Serve when nothing needs it.

    This process must have ``started`` Ray Serve, and no other application may use it.
    """
    # They are raised when Serve has ended already.
    with suppress(RayError, RayServeException):
        if started and not set(ray_serve.status().applications) - {name}:
            # Its controller ends itself within the call. Ray prints in a thread that the call has
            # failed and will be tried again.
            with redirect_stdout(io.StringIO()):
                ray_serve.shutdown()
                time.sleep(POLL_INTERVAL_S)
        elif name in ray_serve.status().applications:
            ray_serve.delete(name)


def free_port(host: str) -> int:
    """A port of this host that is free now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def url(host: str, port: int) -> str:
    """The URL of a healthy proxy: this node's if there is one.

    Raises ServeFailed when none is healthy in time.
    """
    if host in LOOPBACK:
        return f"http://{host}:{port}"
    deadline = time.monotonic() + PROXY_TIMEOUT_S
    while time.monotonic() < deadline:
        healthy = [
            node
            for node, status in ray_serve.status().proxies.items()
            if status == ProxyStatus.HEALTHY
        ]
        hosts = {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in node_rows()
            if node["NodeID"] in healthy
        }
        if hosts:
            here = ray.get_runtime_context().get_node_id()
            proxy = hosts.get(here) or min(hosts.values())
            return f"http://{proxy}:{port}"
        time.sleep(POLL_INTERVAL_S)
    raise ServeFailed(
        f"no proxy of Ray Serve is healthy within {PROXY_TIMEOUT_S:g} s:"
        f" {ray_serve.status().proxies}"
    )


def watch(name: str, who: str, still: Callable[[], bool] = lambda: True) -> None:
    """Print the application's changes of state while ``still()``.

    Raises ServeFailed when another process ends it.
    """
    last_state = "RUNNING"
    while still():
        time.sleep(POLL_INTERVAL_S)
        try:
            application = call_within(STATUS_TIMEOUT_S, ray_serve.status).applications.get(name)
        except DeadlineExceeded:
            continue
        except (RayError, RayServeException) as error:
            raise ServeFailed(
                f"Ray Serve, or its cluster, was ended from outside: {str(error).splitlines()[0]}"
            ) from error
        if application is None:
            raise ServeFailed(f"the application {name} was deleted from outside")
        state = application.status.value
        if state != last_state:
            first_line = application.message.splitlines()[0] if application.message else ""
            print(f"{who}: {state} {first_line}".rstrip(), flush=True)
        last_state = state


def _endpoint(
    config: RunConfig, namespace: str, limits: PolicyLimits, key_file: str | None
) -> PolicyEndpointSettings:
    """The endpoint's settings from a run's configuration.

    With them the endpoint makes the same tokens as the run's episodes.
    """
    sampling = config.rollout.sampling
    episode = config.environment.episode
    return PolicyEndpointSettings(
        run=config.name,
        namespace=namespace,
        model=config.model,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        tokens=episode.max_tokens,
        images=episode.max_images,
        key_file=key_file,
        insecure=key_file is None,
        limits=limits,
    )


def _config(namespace: str) -> RunConfig:
    """The configuration of the run in ``namespace``, from its driver.

    Raises ConfigError when no driver answers.
    """
    # A driver that is being replaced may be listed with its successor: the first answer counts.
    for actor_namespace, name in _actors():
        if actor_namespace != namespace or not name.startswith("driver-"):
            continue
        # ``get_actor`` raises ValueError for an actor that has ended since it was listed.
        with suppress(ValueError, RayError, TimeoutError):
            driver: Handle[DriverActor] = ray.get_actor(name, namespace=namespace)
            config: RunConfig = ray.get(submit(driver, DriverActor.about), timeout=CONFIG_TIMEOUT_S)
            return config
    raise ConfigError(
        f"no driver of the run in namespace {namespace} answers: it is starting, or has ended"
    )


def _namespace_of(name: str) -> str:
    """The namespace of the one live run of this name. Raises ConfigError."""
    namespaces = {namespace for namespace, actor in _actors() if actor.startswith("driver-")}
    live = sorted(namespaces)
    matches = [namespace for namespace in live if run_of(namespace) == name]
    if len(matches) == 1:
        return matches[0]
    live_names = ", ".join(filter(None, map(run_of, live))) or "none"
    reason = "it is not live"
    if matches:
        reason = f"{len(matches)} runs of this name are live: name one by its folder, --run"
    raise ConfigError(f"--name {name}: {reason}. Live runs of this cluster: {live_names}")


def _actors() -> list[tuple[str, str]]:
    """Namespace and name of all named actors."""
    return [
        (actor["namespace"], actor["name"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
    ]
