"""``env check RUN``: starts the environments of a run as an evaluation or a step would, resets each, and says what failed."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from rayloop.commands.arguments import add_overrides
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.protocols import Observation
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset
from rayloop.envs.instance import Environments
from rayloop.run.config import RunConfig, read

SHOWN = 200
"""Characters of a reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``env check``."""
    parser.add_argument("config", type=Path, metavar="RUN", help="the YAML file of a run")
    add_overrides(parser, "environment.episode.environment.with.machines=4")
    parser.add_argument("--count", type=int, metavar="N", help="environments at once on this machine (default: a group's)")
    parser.add_argument("--rounds", type=int, default=2, help="resets of each, on further rows (default: %(default)s)")
    parser.set_defaults(run=check)


def check(arguments: argparse.Namespace) -> int:
    """Print a line for each round. Returns 0, or 1 when an environment was not ready. Raises ConfigError."""
    config = read(arguments.config, arguments.overrides)
    count = config.algorithm.group_size if arguments.count is None else arguments.count
    if min(count, arguments.rounds) < 1:
        raise ConfigError("--count and --rounds: expected a number above 0")
    kinds, episode = config.environment.kinds, config.environment.episode
    rows = [*Dataset(config.data.train, config.data.reader.build(), config.data.strict, lambda failure: None, kinds)]
    environments, tasks = Environments(episode.environment, kinds), cycle(rows)
    failed = 0
    try:
        for number in range(1, arguments.rounds + 1):
            failed += asyncio.run(_round(f"round {number}", config, environments, list(islice(tasks, count))))
    finally:
        environments.end()
    return 1 if failed else 0


async def _round(name: str, config: RunConfig, environments: Environments, tasks: Sequence[Task]) -> int:
    """All at once: made, reset on a task, closed. Returns how many failed."""
    limit = config.environment.episode.reset_timeout
    waits = asyncio.Event()
    done = 0

    async def one(task: Task) -> float | str:
        """Seconds until it was ready, or why it is not. It stays open until all are, as in a step."""
        nonlocal done
        instance, began = environments.of(task), time.monotonic()
        found: float | str
        try:
            await instance.make(limit)
            seen = await instance.call("reset", task, timeout=limit)
            ready = isinstance(seen, Observation) and bool(seen.messages)
            found = time.monotonic() - began if ready else f"reset gave no observation, but {type(seen).__name__}"
        except Exception as error:  # of an environment that somebody else wrote
            found = f"{type(error).__name__}: {error.reason if isinstance(error, DataFailure) else error}"[:SHOWN]
        done += 1
        if done == len(tasks):
            waits.set()
        await waits.wait()
        try:
            await instance.close(limit)
        except Exception as error:
            return f"close raised {type(error).__name__}: {error}"[:SHOWN]
        return found

    results = await asyncio.gather(*map(one, tasks))
    seconds = [found for found in results if isinstance(found, float)]
    took = f" in {median(seconds):.1f} s (median), {max(seconds):.1f} s (slowest)" if seconds else ""
    print(f"{name}: {len(seconds)} of {len(tasks)} environments ready{took}", flush=True)
    for reason, times in Counter(found for found in results if isinstance(found, str)).most_common():
        print(f"  {times} not ready: {reason}", flush=True)
    return len(tasks) - len(seconds)
