"""``policy serve``: the current policy of a live run as an OpenAI-compatible endpoint (docs/policy_endpoint.md)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rayloop.commands.arguments import add_overrides, reachable
from rayloop.config.settings import SettingsModel, load
from rayloop.core.failures import ConfigError
from rayloop.launch.ray_variables import joined_cluster
from rayloop.run.folder import RunFolder
from rayloop.run.place import read_place
from rayloop.serve_apps.settings import LOOPBACK, HttpOptions, PolicyLimits


class ServeOptions(SettingsModel):
    """The settings that ``key=value`` changes."""

    http: HttpOptions = HttpOptions(port=0)
    """The address; by default a free port of loopback."""
    limits: PolicyLimits = PolicyLimits()
    """What it accepts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``policy serve``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="serve the policy of a live run until it ends, or a signal comes")
    which = serve.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, dest="folder", metavar="FOLDER", help="the live run's folder, such as runs/quickstart")
    which.add_argument("--name", help="the live run's name, in the cluster at --address")
    add_overrides(serve, "for example http.port=8001 limits.held=64")
    serve.add_argument("--address", help="with --name: the run's Ray cluster (default: RAY_ADDRESS)")
    serve.add_argument("--token-file", type=Path, help="with --name: the cluster's token")
    serve.add_argument("--key-file", type=Path, metavar="FILE", help="default: policy.key beside the announcement")
    serve.add_argument("--announce", type=Path, metavar="FILE", help="default: policy.json in the run's folder")
    serve.add_argument("--insecure", action="store_true", help="no key; on loopback only")
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    options = load(Path(os.devnull), ["http.port=0", *arguments.overrides], ServeOptions)
    if arguments.insecure and options.http.host not in LOOPBACK:
        raise ConfigError(f"--insecure with http.host {options.http.host}: without a key only loopback is served")
    if arguments.folder is None:
        address, token, file = arguments.address or os.environ.get("RAY_ADDRESS"), arguments.token_file, None
        if not address:
            raise ConfigError("--name looks in a running cluster: give its --address, or the run's folder with --run")
        names, announced = "", arguments.announce or Path(f"runs/policy-{arguments.name}.json")
    else:
        file = RunFolder.at(arguments.folder.resolve()).cluster
        place = read_place(file)
        address, token, names = place.address, Path(place.token_file) if place.token_file else None, place.namespace
        announced = arguments.announce or file.with_name("policy.json")
    reachable(address, str(file or address))
    key = None if arguments.insecure else arguments.key_file or announced.with_suffix(".key")
    announced.parent.mkdir(parents=True, exist_ok=True)
    with joined_cluster(address, token, insecure=bool(file) and token is None):
        from rayloop.cluster.stages.serving import serve_policy  # imports ray

        return serve_policy(
            address, names, arguments.name or "", options.http, options.limits, key, announced,
            alive=lambda: file is None or file.exists(),
        )  # fmt: skip
