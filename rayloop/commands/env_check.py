"""``env check RUN``: starts and resets the environments of a run, and names the failures.

They are started as an evaluation or a step would start them.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from rayloop.commands.arguments import add_overrides
from rayloop.core.failures import ConfigError, DataFailure
from rayloop.core.protocols import Observation
from rayloop.core.threads import complete
from rayloop.core.types import Task
from rayloop.envs.instance import Environments
from rayloop.run.config import read
from rayloop.run.preflight import prepare
from rayloop.view.formatting import visible

MAX_REASON_CHARACTERS = 400
"""The most characters of a reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``env check``."""
    parser.add_argument("config", type=Path, metavar="RUN", help="the YAML file of a run")
    add_overrides(parser, "environment.episode.environment.with.machines=4")
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="environments at once on this machine (default: group_size)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="rounds, each of new environments on the next rows (default: %(default)s)",
    )
    parser.set_defaults(run=check)


def check(arguments: argparse.Namespace) -> int:
    """Print a line for each round.

    Returns 0, or 1 when an environment was not ready or not closed. Raises ConfigError.
    """
    config = prepare(read(arguments.config, arguments.overrides)).speaking().config
    count = config.algorithm.group_size if arguments.count is None else arguments.count
    if min(count, arguments.rounds) < 1:
        raise ConfigError("--count and --rounds: expected a number above 0")
    kinds = config.environment.kinds
    tasks = cycle(config.data.rows(config.data.train, _print_left_out, kinds))
    limit = config.environment.episode.step_timeout
    environments = Environments(config.environment.episode.environment, kinds)
    failures = 0
    try:
        for number in range(1, arguments.rounds + 1):
            batch = list(islice(tasks, count))
            failures += complete(_round(f"round {number}", limit, environments, batch))
    finally:
        environments.end()
    return 1 if failures else 0


def _print_left_out(failure: DataFailure) -> None:
    print(visible(f"left out: {failure}"), flush=True)


@dataclass
class _Check:
    """The result for one environment."""

    seconds: float | None = None
    """Seconds until it was ready; None when it was not."""
    not_ready: str = ""
    """Why it was not ready."""
    not_closed: str = ""
    """Why it could not be closed."""


async def _round(name: str, limit: float, environments: Environments, tasks: Sequence[Task]) -> int:
    """Make, reset and close an environment for each task at once; returns the failed ones.

    ``limit``: seconds for each of the three.
    """
    all_ready = asyncio.Event()
    settled_count = 0

    async def check_one(task: Task) -> _Check:
        """Check one environment, which stays open until all have settled."""
        nonlocal settled_count
        instance = environments.of(task)
        began = time.monotonic()
        result = _Check()
        try:
            await instance.make(limit)
            result.not_ready = _unusable(await instance.call("reset", task, timeout=limit))
            result.seconds = None if result.not_ready else time.monotonic() - began
        except Exception as error:  # an environment may be anybody's code
            result.not_ready = _reason(error)
        settled_count += 1
        if settled_count == len(tasks):
            all_ready.set()
        await all_ready.wait()
        try:
            await instance.close(limit)
        except Exception as error:
            result.not_closed = _reason(error)
        return result

    results = await asyncio.gather(*map(check_one, tasks))
    seconds = [result.seconds for result in results if result.seconds is not None]
    times = ""
    if seconds:
        times = f" in {median(seconds):.1f} s (median), {max(seconds):.1f} s (slowest)"
    print(f"{name}: {len(seconds)} of {len(tasks)} environments ready{times}", flush=True)
    _print_counts("not ready", [result.not_ready for result in results])
    _print_counts("not closed", [result.not_closed for result in results])
    return sum(bool(result.not_ready or result.not_closed) for result in results)


def _print_counts(label: str, reasons: Sequence[str]) -> None:
    """Print each reason with its number, the most frequent first."""
    for reason, count in Counter(filter(None, reasons)).most_common():
        print(f"  {count} {label}: {visible(reason)}", flush=True)


def _unusable(observation: object) -> str:
    """Why an episode cannot begin with the result of ``reset``; "" when it can."""
    if not isinstance(observation, Observation):
        return f"reset gave no Observation, but {type(observation).__name__}"
    return "" if observation.messages else "reset gave an Observation without a message"


def _reason(error: Exception) -> str:
    text = error.reason if isinstance(error, DataFailure) else str(error)
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS]
