"""``env check RUN``: starts the environments of a run as an evaluation or a step would, resets
each, and says what failed.
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
from rayloop.data.dataset import Dataset
from rayloop.envs.instance import Environments
from rayloop.run.config import RunConfig, read
from rayloop.view.words import visible

SHOWN = 400
"""Characters of a reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``env check``."""
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
    config = read(arguments.config, arguments.overrides)
    count = config.algorithm.group_size if arguments.count is None else arguments.count
    if min(count, arguments.rounds) < 1:
        raise ConfigError("--count and --rounds: expected a number above 0")
    kinds, episode = config.environment.kinds, config.environment.episode
    rows = [
        *Dataset(
            config.data.train,
            config.data.reader.build(),
            False,
            _left_out,
            kinds,
            anywhere=config.data.anywhere,
        )
    ]
    environments, tasks = Environments(episode.environment, kinds), cycle(rows)
    failed = 0
    try:
        for number in range(1, arguments.rounds + 1):
            failed += complete(
                _round(f"round {number}", config, environments, list(islice(tasks, count)))
            )
    finally:
        environments.end()
    return 1 if failed else 0


def _left_out(failure: DataFailure) -> None:
    print(visible(f"left out: {failure}"), flush=True)


@dataclass
class _Found:
    """Of one environment: ``seconds`` until it was ready; else why not; and why it could not be
    closed.
    """

    seconds: float | None = None
    not_ready: str = ""
    not_closed: str = ""


async def _round(
    name: str, config: RunConfig, environments: Environments, tasks: Sequence[Task]
) -> int:
    """All at once: made, reset on a task, closed. Returns how many failed."""
    limit = config.environment.episode.step_timeout
    waits = asyncio.Event()
    done = 0

    async def one(task: Task) -> _Found:
        """It stays open until all are ready or have failed, as in a step."""
        nonlocal done
        instance, began, found = environments.of(task), time.monotonic(), _Found()
        try:
            await instance.make(limit)
            found.not_ready = _unusable(await instance.call("reset", task, timeout=limit))
            found.seconds = None if found.not_ready else time.monotonic() - began
        except Exception as error:  # of an environment that somebody else wrote
            found.not_ready = _reason(error)
        done += 1
        if done == len(tasks):
            waits.set()
        await waits.wait()
        try:
            await instance.close(limit)
        except Exception as error:
            found.not_closed = _reason(error)
        return found

    results = await asyncio.gather(*map(one, tasks))
    seconds = [found.seconds for found in results if found.seconds is not None]
    took = (
        f" in {median(seconds):.1f} s (median), {max(seconds):.1f} s (slowest)" if seconds else ""
    )
    print(f"{name}: {len(seconds)} of {len(tasks)} environments ready{took}", flush=True)
    for what, reasons in {
        "not ready": [found.not_ready for found in results],
        "not closed": [found.not_closed for found in results],
    }.items():
        for reason, times in Counter(filter(None, reasons)).most_common():
            print(f"  {times} {what}: {visible(reason)}", flush=True)
    return sum(bool(found.not_ready or found.not_closed) for found in results)


def _unusable(seen: object) -> str:
    """Why an episode cannot begin with what ``reset`` returned; else ""."""
    if not isinstance(seen, Observation):
        return f"reset gave no Observation, but {type(seen).__name__}"
    return "" if seen.messages else "reset gave an Observation without a message"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error.reason if isinstance(error, DataFailure) else error}"[
        :SHOWN
    ]
