"""``judge serve|check|calibrate`` and ``policy serve``: a judge, or a live run's policy, on Ray
Serve (docs/policy_endpoint.md).
"""

import argparse
import os
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
    serve.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="for example http_options.port=8001",
    )
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
    if (
        "=" in str(arguments.config) and not arguments.config.is_file()
    ):  # the default, with a value changed
        arguments.overrides, arguments.config = (
            [str(arguments.config), *arguments.overrides],
            CONFIGS / "judge_cpu.yaml",
        )
    file = load(arguments.config, arguments.overrides, ServeFile)
    (application,) = file.applications
    open_ = application.args.key_file is None and (arguments.insecure or application.args.insecure)
    if open_ and file.http_options.host not in LOOPBACK:
        raise ConfigError(
            f"--insecure with http_options.host {file.http_options.host}: without a key only"
            " loopback is served"
        )
    key = application.args.key_file or str(arguments.announce.with_suffix(".key"))
    settings = application.args.model_copy(
        update={"insecure": True} if open_ else {"key_file": str(local_path(key))}
    )
    file = file.model_copy(
        update={"applications": (application.model_copy(update={"args": settings}),)}
    )
    with cluster(arguments) as (address, temporary):
        from rayloop.cluster.stages.serving import serve_judge  # imports ray

        return serve_judge(file, address, temporary, arguments.announce)


def client_settings(arguments: argparse.Namespace) -> ClientSettings:
    """The settings for a client of the judge on the command line."""
    found = {
        "use": "rayloop.judge.discovery:FileDiscovery",
        "with": {"path": str(arguments.announce)},
    }
    return ClientSettings(
        url=arguments.url, key_file=arguments.key_file, discovery=Component.model_validate(found)
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
        raise ConfigError(
            f"--gate: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
        ) from error

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
    return (
        f"ready: {connection.url} {about.backend} {about.model or '(no model)'} {about.fingerprint}"
    )


class ServeOptions(SettingsModel):
    """The settings that ``key=value`` changes."""

    http: HttpOptions = HttpOptions(port=0)
    """The address; by default a free port of loopback."""
    limits: PolicyLimits = PolicyLimits()
    """What it accepts."""


def add_policy(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``policy serve``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser(
        "serve", help="serve the policy of a live run until it ends, or a signal comes"
    )
    which = serve.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--run",
        type=Path,
        dest="folder",
        metavar="FOLDER",
        help="the live run's folder, such as runs/quickstart",
    )
    which.add_argument("--name", help="the live run's name, in the cluster at --address")
    add_overrides(serve, "for example http.port=8001 limits.held=64")
    serve.add_argument(
        "--address", help="with --name: the run's Ray cluster (default: RAY_ADDRESS)"
    )
    serve.add_argument("--token-file", type=Path, help="with --name: the cluster's token")
    serve.add_argument(
        "--key-file", type=Path, metavar="FILE", help="default: policy.key beside the announcement"
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
    if arguments.folder is None:
        address, token, file = (
            arguments.address or os.environ.get("RAY_ADDRESS"),
            arguments.token_file,
            None,
        )
        if not address:
            raise ConfigError(
                "--name looks in a running cluster: give its --address, or the run's folder with"
                " --run"
            )
        names, announced = "", arguments.announce or Path(f"runs/policy-{arguments.name}.json")
    else:
        folder = RunFolder.at(arguments.folder.resolve())
        file, place = folder.cluster, live_place(folder)
        address, token, names = (
            place.address,
            Path(place.token_file) if place.token_file else None,
            place.namespace,
        )
        announced = arguments.announce or file.with_name("policy.json")
    if file is None:
        reachable(address, address)
    key = None if arguments.insecure else arguments.key_file or announced.with_suffix(".key")
    announced.parent.mkdir(parents=True, exist_ok=True)
    with joined_cluster(address, token, insecure=bool(file) and token is None):
        from rayloop.cluster.stages.serving import serve_policy  # imports ray

        return serve_policy(
            address,
            names,
            arguments.name or "",
            options.http,
            options.limits,
            key,
            announced,
            alive=lambda: file is None or file.exists(),
        )
