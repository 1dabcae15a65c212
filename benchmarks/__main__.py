"""``python -m rayloop.benchmarks`` (and ``python -m rayloop bench``): measurements that print one JSON line each.

docs/performance.md has their figures.
"""

from __future__ import annotations

import argparse
import sys

from rayloop.benchmarks import (
    judge,
    latency,
    memory,
    multi_turn,
    recipe,
    rollout,
    scale,
    shares,
    start,
    step,
    structure,
    train,
    weight_sync,
)
from rayloop.benchmarks.envs import browser, desktop
from rayloop.benchmarks.interpreter import sandbox
from rayloop.benchmarks.trainer import saving


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    step.add_step(actions.add_parser("step", help="GRPO steps through the real actors"))
    step.add_compare(actions.add_parser("compare", help="GRPO steps of TRL and of rayloop, alternately"))
    start.add_arguments(actions.add_parser("start", help="from the command to the first step, by process"))
    rollout.add_arguments(actions.add_parser("rollout", help="generation through the actors and by bare vLLM, alternately"))
    weight_sync.add_arguments(actions.add_parser("weight_sync", help="weights from one actor to another, beside a plain copy"))
    train.add_arguments(actions.add_parser("train", help="the trainer's tokens per second, beside matrix products"))
    saving.add_arguments(actions.add_parser("saving", help="how long a checkpoint holds up training, waited for and beside it"))
    scale.add_arguments(actions.add_parser("scale", help="the driver with simulated engines and environments"))
    multi_turn.add_arguments(actions.add_parser("multi_turn", help="long episodes with large screenshots on simulated engines"))
    latency.add_arguments(actions.add_parser("latency", help="how busy engines are with slow environments, beside a turn barrier"))
    shares.add_arguments(actions.add_parser("shares", help="tokens per rank of a simulated trainer, beside the fewest"))
    browser.add_arguments(actions.add_parser("browser", help="steps of MiniWoB++ pages in the real Chromium"))
    desktop.add_arguments(actions.add_parser("desktop", help="local desktops: being up, screenshots, clicks, memory"))
    memory.add_arguments(actions.add_parser("memory", help="whether a run's processes grow"))
    recipe.add_arguments(actions.add_parser("recipe", help="a checkpoint on the held-out rows of a recipe"))
    sandbox.add_arguments(actions.add_parser("sandbox", help="the policy's Python: ready, called, fifty at once, and their memory"))
    structure.add_arguments(actions.add_parser("structure", help="lines, cycles, keys and fan-out of a checkout"))
    judge.add_arguments(actions.add_parser("judge", help="what client and Ray Serve add to the judge's model"))


if __name__ == "__main__":
    from rayloop.cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
