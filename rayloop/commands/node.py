"""``node head|worker``: one Ray node of a cluster, which finds the others.

See rayloop/launch/node.py.
"""

import argparse
import os
from pathlib import Path

from rayloop.launch.node import head, run_node, worker
from rayloop.launch.rendezvous import ROOT, default_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two roles and their options."""
    roles = parser.add_subparsers(required=True, metavar="ROLE")
    for role, run, cpus in (
        ("head", head, "default: 0"),
        ("worker", worker, "default: the job's, or all"),
    ):
        node = roles.add_parser(role, help=f"a {role} node; ends with SIGTERM")
        _add_resources(node, cpus)
        _add_network(node)
        _add_lifetime(node)
        node.set_defaults(role=run, program=[])
        if role == "head":
            node.add_argument(
                "--insecure",
                action="store_true",
                help="no token: everybody who reaches the ports may run code",
            )
        else:
            node.add_argument(
                "--wait",
                type=float,
                default=600.0,
                metavar="SECONDS",
                help="for a head to be published (600)",
            )
            program = "after --: runs with RAY_ADDRESS set; the node ends with it"
            node.add_argument("program", nargs="*", help=program)
    parser.set_defaults(run=run_node)


def _add_resources(node: argparse.ArgumentParser, cpus: str) -> None:
    """Add the cluster that a node joins, and the resources that it offers."""
    node.add_argument(
        "--cluster",
        required=True,
        metavar="NAME",
        help="nodes of the same name find each other",
    )
    node.add_argument(
        "--rendezvous",
        type=Path,
        default=default_root(),
        metavar="DIR",
        help=f"folder that all nodes see (default: RAYLOOP_RENDEZVOUS, else {ROOT})",
    )
    node.add_argument("--num-cpus", type=int, help=f"CPUs to offer ({cpus})")
    node.add_argument(
        "--num-gpus",
        type=int,
        help="GPUs to offer (default: none for a head, else the job's, or all)",
    )
    node.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a custom resource to offer",
    )
    node.add_argument(
        "--object-store-memory",
        type=int,
        metavar="BYTES",
        help="default: Ray's, 30 %% of the memory",
    )


def _add_network(node: argparse.ArgumentParser) -> None:
    """Add a node's ports and network, and its temporary folder."""
    node.add_argument(
        "--ports",
        default="20000-29999",
        metavar="LOW-HIGH",
        help="range to take ports from (20000-29999)",
    )
    node.add_argument(
        "--interface",
        default=os.environ.get("RAYLOOP_INTERFACE") or None,
        metavar="NAME",
        help=(
            "network to listen on, such as ib0 (default: RAYLOOP_INTERFACE, else the address that"
            " Slurm or the route names)"
        ),
    )
    node.add_argument(
        "--temp-dir",
        type=Path,
        metavar="DIR",
        help="parent of Ray's temporary folder (default: TMPDIR, /tmp)",
    )


def _add_lifetime(node: argparse.ArgumentParser) -> None:
    """Add the time to save before a node ends, and its restarts."""
    node.add_argument(
        "--grace",
        type=float,
        default=150.0,
        metavar="SECONDS",
        help="for the program to save, near a job's limit also for other nodes' programs (150)",
    )
    node.add_argument(
        "--requeue",
        type=int,
        default=0,
        metavar="N",
        help=(
            "restarts near the time limit or after a failure of the machines: of the Slurm job,"
            " else of the node (0)"
        ),
    )
