"""Arguments that several commands share: a run's configuration, and the Ray cluster that it uses."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayloop.launch.ray_variables import joined_cluster, private_cluster


def add_run(parser: argparse.ArgumentParser, example: str) -> None:
    """A run's configuration and the values to change in it."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of a run")
    add_overrides(parser, f"values to change, for example {example}")


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """``key=value``, any number of them; the default keeps argparse from calling them required."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Which Ray cluster to use, for ``cluster``."""
    parser.add_argument("--address", help="Ray cluster to join (default: RAY_ADDRESS, else a private local cluster)")
    parser.add_argument("--token-file", type=Path, help="the joined cluster's token (default: RAY_AUTH_TOKEN_PATH)")
    parser.add_argument(
        "--insecure", action="store_true", help="no token: everybody who reaches the ports may run code"
    )


@contextmanager
def cluster(arguments: argparse.Namespace) -> Iterator[tuple[str | None, str | None]]:
    """The address to join, or the temporary folder of a private cluster; in both cases Ray's variables are set.

    A configuration is read inside it: a component's module may import ray, which reads them then.
    """
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    if address:
        with joined_cluster(address, arguments.token_file, arguments.insecure):
            yield address, None
    else:
        with private_cluster(arguments.insecure) as temporary:
            yield None, temporary
