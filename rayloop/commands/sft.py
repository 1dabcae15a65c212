"""``sft``: supervised steps on the answers of the training rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from rayloop.commands.arguments import add_cluster, add_overrides, cluster
from rayloop.config.settings import check_components, load
from rayloop.sft.stage import SftConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sft``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the stage (docs/sft.md)")
    add_overrides(parser, "values to change, for example steps=200 output=runs/models/mine")
    add_cluster(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the stage. Returns the exit code; raises RayloopError."""
    with cluster(arguments) as (address, temporary):
        config = load(arguments.config, arguments.overrides, SftConfig)
        check_components(config)
        from rayloop.cluster.stages.sft import sft  # imports ray, which reads the environment

        return sft(config, address, temporary)
