"""``stacks``: the stack of every thread of the actors of a live run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rayloop.commands.arguments import live_cluster
from rayloop.run.folder import RunFolder
from rayloop.view.words import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stacks``."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of the live run, <output>/<name>")
    parser.add_argument("--role", help="only these actors: driver, rollout, environment, reward, reference or policy")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the stacks of each actor. Returns 0; raises ConfigError."""
    with live_cluster(RunFolder.at(arguments.run_folder.resolve())) as place:
        from rayloop.cluster.stages.live import stacks  # imports ray

        for actor, text in stacks(place, arguments.role):
            print(f"=== {actor} ===\n{visible(text)}\n", flush=True)
    return 0
