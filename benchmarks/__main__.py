"""``python -m benchmarks``, from a checkout: measurements that print one JSON line each.

docs/performance.md has their figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import (
    histories,
    judge,
    latency,
    memory,
    multi_turn,
    rollout,
    scale,
    shares,
    start,
    step,
    structure,
    train,
    weight_sync,
)
from benchmarks.envs import agents, browser, desktop
from benchmarks.interpreter import sandbox
from benchmarks.trainer import saving
from rayloop.cli import main

ACTIONS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "step": (step.add_step, "GRPO steps through the real actors"),
    "compare": (step.add_compare, "GRPO steps of TRL and of rayloop, alternately"),
    "start": (start.add_arguments, "from the command to the first step, by process"),
    "rollout": (
        rollout.add_arguments,
        "generation through the actors and by bare vLLM, alternately",
    ),
    "weight_sync": (
        weight_sync.add_arguments,
        "weights from one actor to another, beside a plain copy",
    ),
    "train": (train.add_arguments, "the trainer's tokens per second, beside matrix products"),
    "saving": (
        saving.add_arguments,
        "how long a checkpoint holds up training, waited for and beside it",
    ),
    "scale": (scale.add_arguments, "the driver with simulated engines and environments"),
    "multi_turn": (
        multi_turn.add_arguments,
        "long episodes with large screenshots on simulated engines",
    ),
    "latency": (
        latency.add_arguments,
        "how busy engines are with slow environments, beside a turn barrier",
    ),
    "histories": (
        histories.add_arguments,
        "what a trainer computes under each history",
    ),
    "shares": (shares.add_arguments, "tokens per rank of a simulated trainer, beside the fewest"),
    "browser": (browser.add_arguments, "steps of MiniWoB++ pages in the real Chromium"),
    "desktop": (desktop.add_arguments, "local desktops: being up, screenshots, clicks, memory"),
    "memory": (memory.add_arguments, "whether a run's processes grow"),
    "sandbox": (
        sandbox.add_arguments,
        "the policy's Python: ready, called, fifty at once, and their memory",
    ),
    "structure": (structure.add_arguments, "lines, cycles, keys and fan-out of a checkout"),
    "agents": (agents.add_arguments, "what the endpoint of agents costs a call"),
    "judge": (judge.add_arguments, "what client and Ray Serve add to the judge's model"),
}


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all actions, whatever ``words`` are."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measurements of rayloop on this machine."
    )
    actions = top.add_subparsers(required=True, metavar="ACTION", dest="command")
    for word, (add, purpose) in ACTIONS.items():
        add(actions.add_parser(word, help=purpose))
    return top


if __name__ == "__main__":
    sys.exit(main(build=parser))
