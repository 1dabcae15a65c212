"""``try`` shows one row as the model sees it, two answers, and the reward of each."""

from __future__ import annotations

import argparse

from rayloop.commands.arguments import add_run
from rayloop.run.config import read
from rayloop.run.preflight import preflight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``try``."""
    add_run(parser, "rollout.sampling.max_tokens=200")
    parser.add_argument("--row", type=int, metavar="N", help="row of data.train, counted from 1 (default: the first usable)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Try one row. Returns the exit code; raises RayloopError."""
    config = read(arguments.config, arguments.overrides)
    preflight(config, trains=False)
    from rayloop.cluster.stages.trial import try_row  # imports torch

    return try_row(config, arguments.row)
