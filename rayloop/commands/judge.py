"""``judge serve|check|calibrate``: the judge on Ray Serve, its readiness, and its calibration."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from pydantic import ValidationError

from rayloop.commands.arguments import add_cluster, cluster
from rayloop.config.settings import Component, load, local_path
from rayloop.config.yaml_source import parse_value
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.judge.api import JudgeVersion
from rayloop.judge.calibrate import Gate, calibrate
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.transport import JudgeConnection
from rayloop.serve_apps.settings import CONFIGS, LOOPBACK, ServeFile

ANNOUNCED = Path("runs/judge.json")
"""The file that clients with ``url: auto`` read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of each action."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve a judge until a signal comes")
    serve.add_argument("config", type=Path, nargs="?", default=CONFIGS / "judge_cpu.yaml", help="default: the rules, on a CPU")
    serve.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="for example http_options.port=8001")
    serve.add_argument("--announce", type=Path, default=ANNOUNCED, metavar="FILE", help="for clients with url: auto")
    add_cluster(serve)
    serve.set_defaults(run=_serve)
    check = actions.add_parser("check", help="exit code 0 and one line when the judge is ready, else 1 and one line")
    _add_target(check)
    check.set_defaults(run=_check)
    calibrate = actions.add_parser("calibrate", help="judge labelled answers; exit code 1 below the gate")
    _add_target(calibrate)
    calibrate.add_argument(
        "--gate", action="append", default=[], metavar="key=value", help="for example min_kappa=0.7; may be repeated"
    )
    calibrate.add_argument("--drift", action="store_true", help="the subset that runs repeat, for a quick look")
    calibrate.add_argument("--patience", type=float, default=600.0, metavar="SECONDS", help="for each verdict")
    calibrate.set_defaults(run=_calibrate)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT, or auto")
    parser.add_argument("--announce", type=Path, default=ANNOUNCED, metavar="FILE", help="the file that auto reads")
    parser.add_argument("--key-file", default="", metavar="FILE", help="default: the one that the judge announced")


def _serve(arguments: argparse.Namespace) -> int:
    if "=" in str(arguments.config) and not arguments.config.is_file():  # the default, with a value changed
        arguments.overrides, arguments.config = ([str(arguments.config), *arguments.overrides], CONFIGS / "judge_cpu.yaml")
    file = load(arguments.config, arguments.overrides, ServeFile)
    (application,) = file.applications
    open_ = application.args.key_file is None and (arguments.insecure or application.args.insecure)
    if open_ and file.http_options.host not in LOOPBACK:
        raise ConfigError(f"--insecure with http_options.host {file.http_options.host}: without a key only loopback is served")
    key = application.args.key_file or str(arguments.announce.with_suffix(".key"))
    settings = application.args.model_copy(update={"insecure": True} if open_ else {"key_file": str(local_path(key))})
    file = file.model_copy(update={"applications": (application.model_copy(update={"args": settings}),)})
    with cluster(arguments) as (address, temporary):
        from rayloop.cluster.stages.serving import serve_judge  # imports ray

        return serve_judge(file, address, temporary, arguments.announce)


def client_settings(arguments: argparse.Namespace) -> ClientSettings:
    """The settings for a client of the judge on the command line."""
    found = {"use": "rayloop.judge.discovery:FileDiscovery", "with": {"path": str(arguments.announce)}}
    return ClientSettings(url=arguments.url, key_file=arguments.key_file, discovery=Component.model_validate(found))


def _check(arguments: argparse.Namespace) -> int:
    print(asyncio.run(_ready(client_settings(arguments))))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    pairs = [word.partition("=") for word in arguments.gate]
    try:
        gate = Gate.model_validate({name: parse_value(value, f"--gate {name}") for name, _, value in pairs})
    except ValidationError as error:
        raise ConfigError(f"--gate: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error

    async def ask() -> bool:
        client = JudgeClient(client_settings(arguments))
        try:
            return await calibrate(client, gate, arguments.patience, drift=arguments.drift)
        finally:
            await client.close()

    return 0 if asyncio.run(ask()) else 1


async def _ready(settings: ClientSettings) -> str:
    """One line that describes a ready judge. Raises InfrastructureFailure with one line, ConfigError for a bad key file."""
    connection = JudgeConnection(settings)
    try:
        await connection.get("/readyz")
        about = JudgeVersion.model_validate_json(await connection.get("/version"))
    except ValueError as error:
        raise InfrastructureFailure(f"{connection.url} is not a judge: {str(error).splitlines()[0]}") from error
    finally:
        await connection.close()
    return f"ready: {connection.url} {about.backend} {about.model or '(no model)'} {about.fingerprint}"
