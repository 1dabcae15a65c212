"""``judge serve|check|calibrate`` and ``policy serve``: a judge, or a live run's policy.

Both run on Ray Serve (docs/policy_endpoint.md).
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rayloop.commands.arguments import add_cluster, add_overrides, cluster, live_place, reachable
from rayloop.config.settings import Component, SettingsModel, load, local_path
from rayloop.config.yaml_source import parse_value
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.core.threads import complete
from rayloop.judge.api import JudgeVersion
from rayloop.judge.calibrate import CALIBRATION, Gate, calibrate
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.transport import JudgeConnection
from rayloop.launch.ray_variables import joined_cluster
from rayloop.run.folder import RunFolder
from rayloop.serve_apps.settings import CONFIGS, LOOPBACK, HttpOptions, PolicyLimits, ServeFile

ANNOUNCED = Path("runs/judge.json")
"""The file that clients with ``url: auto`` read."""


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the actions of ``judge``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve a judge until a signal comes")
    serve.add_argument(
        "config",
        type=Path,
        nargs="?",
        default=CONFIGS / "judge_cpu.yaml",
        help="default: the rules, on a CPU",
    )
    add_overrides(serve, "for example http_options.port=8001")
    serve.add_argument(
        "--announce",
        type=Path,
        default=ANNOUNCED,
        metavar="FILE",
        help="for clients with url: auto",
    )
    add_cluster(serve)
    serve.set_defaults(run=_serve_judge)
    check = actions.add_parser(
        "check", help="exit code 0 and one line when the judge is ready, else 1 and one line"
    )
    _add_target(check)
    check.set_defaults(run=_check)
    calibrate = actions.add_parser(
        "calibrate", help="judge labelled answers; exit code 1 below the gate"
    )
    _add_target(calibrate)
    gate = "for example min_kappa=0.7; may be repeated"
    calibrate.add_argument("--gate", action="append", default=[], metavar="key=value", help=gate)
    calibrate.add_argument(
        "--drift", action="store_true", help="the subset that runs repeat, for a quick look"
    )
    calibrate.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="for each verdict"
    )
    calibrate.set_defaults(run=_calibrate)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT, or auto")
    parser.add_argument(
        "--announce", type=Path, default=ANNOUNCED, metavar="FILE", help="the file that auto reads"
    )
    parser.add_argument(
        "--key-file", default="", metavar="FILE", help="default: the one that the judge announced"
    )


def _serve_judge(arguments: argparse.Namespace) -> int:
    if "=" in str(arguments.config) and not arguments.config.is_file():
        # The first word changes a value of the default configuration.
        arguments.overrides = [str(arguments.config), *arguments.overrides]
        arguments.config = CONFIGS / "judge_cpu.yaml"
    file = load(arguments.config, arguments.overrides, ServeFile)
    (application,) = file.applications
    settings = application.args
    without_key = settings.key_file is None and (arguments.insecure or settings.insecure)
    if without_key and file.http_options.host not in LOOPBACK:
        raise ConfigError(
            f"--insecure with http_options.host {file.http_options.host}: without a key only"
            " loopback is served"
        )
    if without_key:
        settings = settings.model_copy(update={"insecure": True})
    else:
        key_file = settings.key_file or str(arguments.announce.with_suffix(".key"))
        settings = settings.model_copy(update={"key_file": str(local_path(key_file))})
    application = application.model_copy(update={"args": settings})
    file = file.model_copy(update={"applications": (application,)})
    with cluster(arguments) as (address, temporary):
        from rayloop.cluster.stages.serving import serve_judge  # imports ray

        return serve_judge(file, address, temporary, arguments.announce)


def client_settings(arguments: argparse.Namespace) -> ClientSettings:
    """The settings for a client of the judge on the command line."""
    discovery = {
        "use": "rayloop.judge.discovery:FileDiscovery",
        "with": {"path": str(arguments.announce)},
    }
    return ClientSettings(
        url=arguments.url,
        key_file=arguments.key_file,
        discovery=Component.model_validate(discovery),
    )


def _check(arguments: argparse.Namespace) -> int:
    print(complete(_ready(client_settings(arguments))))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    pairs = [word.partition("=") for word in arguments.gate]
    try:
        gate = Gate.model_validate(
            {name: parse_value(value, f"--gate {name}") for name, _, value in pairs}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"--gate: {problem['loc']}: {problem['msg']}") from error

    arguments.announce.parent.mkdir(parents=True, exist_ok=True)

    async def ask() -> bool:
        client = JudgeClient(client_settings(arguments))
        try:
            return await calibrate(
                client,
                gate,
                arguments.patience,
                drift=arguments.drift,
                keep=arguments.announce.with_name(CALIBRATION),
            )
        finally:
            await client.close()

    return 0 if complete(ask()) else 1


async def _ready(settings: ClientSettings) -> str:
    """One line that describes a ready judge.

    Raises InfrastructureFailure with one line, ConfigError for a bad key file.
    """
    connection = JudgeConnection(settings)
    try:
        await connection.get("/readyz")
        about = JudgeVersion.model_validate_json(await connection.get("/version"))
    except ValueError as error:
        raise InfrastructureFailure(
            f"{connection.url} is not a judge: {str(error).splitlines()[0]}"
        ) from error
    finally:
        await connection.close()
    model = about.model or "(no model)"
    return f"ready: {connection.url} {about.backend} {model} {about.fingerprint}"


class ServeOptions(SettingsModel):
    """The settings that ``key=value`` changes."""

    http: HttpOptions = HttpOptions(port=0)
    """The address; by default a free port of loopback."""
    limits: PolicyLimits = PolicyLimits()
    """The limits of its requests."""


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``policy serve``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser(
        "serve", help="serve the policy of a live run until it ends, or a signal comes"
    )
    run = serve.add_mutually_exclusive_group(required=True)
    run.add_argument(
        "--run",
        type=Path,
        dest="folder",
        metavar="FOLDER",
        help="the live run's folder, such as runs/quickstart",
    )
    run.add_argument("--name", help="the live run's name, in the cluster at --address")
    add_overrides(serve, "for example http.port=8001 limits.held=64")
    serve.add_argument(
        "--address", help="with --name: the run's Ray cluster (default: RAY_ADDRESS)"
    )
    serve.add_argument("--token-file", type=Path, help="with --name: the cluster's token")
    serve.add_argument(
        "--key-file", type=Path, metavar="FILE", help="default: policy.key next to the announcement"
    )
    serve.add_argument(
        "--announce", type=Path, metavar="FILE", help="default: policy.json in the run's folder"
    )
    serve.add_argument("--insecure", action="store_true", help="no key; on loopback only")
    serve.set_defaults(run=_serve_policy)


def _serve_policy(arguments: argparse.Namespace) -> int:
    options = load(Path(os.devnull), ["http.port=0", *arguments.overrides], ServeOptions)
    if arguments.insecure and options.http.host not in LOOPBACK:
        raise ConfigError(
            f"--insecure with http.host {options.http.host}: without a key only loopback is served"
        )
    folder = arguments.folder
    run = _run_by_folder(folder) if folder else _run_by_name(arguments)
    announcement = arguments.announce or run.announcement
    key = None
    if not arguments.insecure:
        key = arguments.key_file or announcement.with_suffix(".key")
    announcement.parent.mkdir(parents=True, exist_ok=True)
    insecure = run.cluster_file is not None and run.token is None
    with joined_cluster(run.address, run.token, insecure=insecure):
        from rayloop.cluster.stages.serving import serve_policy  # imports ray

        return serve_policy(
            run.address,
            run.namespace,
            arguments.name or "",
            options.http,
            options.limits,
            key,
            announcement,
            alive=run.is_alive,
        )


@dataclass(frozen=True)
class _ServedRun:
    """The live run of a served policy, and its cluster."""

    address: str
    token: Path | None
    namespace: str
    """Its namespace in the cluster; empty for a run that is looked up by its name."""
    announcement: Path
    """The file of the announcement by default."""
    cluster_file: Path | None = None
    """The file that exists while the run lives; None for a run that is looked up by its name."""

    def is_alive(self) -> bool:
        """Whether the run lives, as its folder shows it."""
        return self.cluster_file is None or self.cluster_file.exists()


def _run_by_name(arguments: argparse.Namespace) -> _ServedRun:
    """The run of ``--name`` in the cluster of ``--address``. Raises ConfigError."""
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise ConfigError(
            "--name looks in a running cluster: give its --address, or the run's folder with --run"
        )
    reachable(address, address)
    announcement = Path(f"runs/policy-{arguments.name}.json")
    return _ServedRun(address, arguments.token_file, "", announcement)


def _run_by_folder(path: Path) -> _ServedRun:
    """The run of ``--run``. Raises ConfigError when it is not live."""
    folder = RunFolder.at(path.resolve())
    place = live_place(folder)
    return _ServedRun(
        place.address,
        Path(place.token_file) if place.token_file else None,
        place.namespace,
        folder.cluster.with_name("policy.json"),
        folder.cluster,
    )
