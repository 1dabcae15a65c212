"""``train``: train a policy, or continue a run."""

from __future__ import annotations

import argparse
import sys

from rayloop.commands.arguments import add_cluster, add_run, cluster
from rayloop.config.settings import dump
from rayloop.launch.restarts import supervised
from rayloop.run.config import read
from rayloop.run.preflight import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "steps=20 model.path=/models/qwen")
    add_cluster(parser)
    parser.add_argument(
        "--again",
        type=int,
        default=0,
        metavar="N",
        help="when the machines failed (exit code 69) start again by itself, up to N times, from the newest checkpoint",
    )
    parser.add_argument("--print-config", action="store_true", help="show the expanded configuration and stop")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.again:
        return supervised([sys.executable, "-m", "rayloop", *sys.argv[1:], "--again=0"], arguments.again)
    with cluster(arguments) as (address, temporary):
        config = read(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(dump(config), end="")
            return 0
        preflight(config)
        from rayloop.cluster.stages.train import train  # imports ray, which reads the environment

        return train(config, address, temporary)
