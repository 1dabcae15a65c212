"""Arguments that several commands share: a run's configuration, and its Ray cluster."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.launch.network import unreachable
from rayloop.launch.ray_variables import joined_cluster, private_cluster
from rayloop.run.folder import RunFolder
from rayloop.run.place import Place, read_place


def add_run(parser: argparse.ArgumentParser, example: str) -> None:
    """Add a run's configuration, and the values to change in it."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of a run")
    add_overrides(parser, f"values to change, for example {example}")


def add_run_folder(
    parser: argparse.ArgumentParser, help: str = "folder of the run, <output>/<name>"
) -> None:
    """Add the folder of one run."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help=help)


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add any number of ``key=value``; with the default, argparse does not call them required."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``cluster`` reads."""
    parser.add_argument(
        "--address", help="Ray cluster to join (default: RAY_ADDRESS, else a private local cluster)"
    )
    parser.add_argument(
        "--token-file", type=Path, help="the joined cluster's token (default: RAY_AUTH_TOKEN_PATH)"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="no token: everybody who reaches the ports may run code",
    )


JOIN_WITHIN_S = 15
"""Seconds in which Ray must find a node of a live run's cluster on this machine."""


@contextmanager
def cluster(arguments: argparse.Namespace) -> Iterator[tuple[str | None, str | None]]:
    """The address to join, or a private cluster's folder.

    Read a configuration inside: a component may import ray.
    """
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    if address:
        with joined_cluster(address, arguments.token_file, arguments.insecure):
            yield address, None
    else:
        with private_cluster(arguments.insecure) as temporary:
            yield None, temporary


@contextmanager
def live_cluster(folder: RunFolder) -> Iterator[Place]:
    """The cluster of the live run in ``folder``, with Ray's variables set for joining it.

    Raises ConfigError when the run is not live.
    """
    place = live_place(folder)
    token = Path(place.token_file) if place.token_file else None
    with joined_cluster(place.address, token, insecure=token is None, within=JOIN_WITHIN_S):
        yield place


def live_place(folder: RunFolder) -> Place:
    """The cluster of the live run in ``folder``, which answers.

    Raises ConfigError when it is not a live run of this user.
    """
    place = read_place(folder.cluster)
    holder = folder.lock.holder()
    # A killed run leaves its file, and another program, or another user's, may have its ports now.
    if holder is None:
        raise ConfigError(
            f"{folder.path} is not a live run: the process that ran it has ended, or was killed"
        )
    reason = f"if the run lives, run this command where {holder} is"
    if holder.lives():
        reason = "the run has ended, or was killed"
    reachable(place.address, str(folder.cluster), reason)
    return place


def reachable(address: str, what: str, why: str = "the run has ended, or was killed") -> None:
    """Raises ConfigError with ``why`` when nobody listens at the address.

    Ray itself would try for half a minute.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and unreachable(host, int(port)):
        raise ConfigError(f"{what}: no Ray cluster answers at {address}; {why}")
