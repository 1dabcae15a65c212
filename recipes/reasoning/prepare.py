"""Rows of reasoning-gym.

``python -m rayloop data prepare reasoning --out DIR`` makes train.jsonl and eval.jsonl in DIR.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.envs.adapters.packages import needs
from rayloop.recipes import preparer, write_rows

TASKS = (
    'word_sorting:{"min_words": 2, "max_words": 2, "min_word_length": 3, "max_word_length": 4}',
    'spell_backward:{"min_word_len": 3, "max_word_len": 3}',
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files.

    Returns exit code 0. Raises ConfigError for a task that the package does not make.
    """
    parser = preparer("reasoning", __doc__)
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=TASKS,
        metavar="NAME[:JSON]",
        help=f"the package's names and settings ({' '.join(TASKS)})",
    )
    parser.add_argument("--train", type=int, default=200, help="training rows of a task at most")
    parser.add_argument(
        "--eval",
        type=int,
        default=30,
        help="evaluation rows of a task, none of which is a training row",
    )
    parser.add_argument(
        "--shots",
        type=int,
        default=1,
        help="first items that are left out, for data.reader.with.shots",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train: list[Mapping[str, Any]] = []
    evaluation: list[Mapping[str, Any]] = []
    for task in options.tasks:
        name, _, config = task.partition(":")
        count = options.train + options.eval
        task_rows = rows(name, config or "{}", options.shots, count, options.seed)
        if len(task_rows) <= options.eval:
            raise ConfigError(
                f"{task} has only {len(task_rows)} different questions, --eval takes"
                f" {options.eval}: widen its settings"
            )
        evaluation += task_rows[: options.eval]
        train += task_rows[options.eval :]
    random.Random(options.seed).shuffle(train)
    write_rows(options.out, "train", train)
    write_rows(options.out, "eval", evaluation)
    return 0


def rows(name: str, config: str, shots: int, most: int, seed: int) -> list[dict[str, Any]]:
    """At most ``most`` rows of the reader ``ReasoningGymRows`` with different questions.

    ``config``: JSON. Raises ConfigError.
    """
    # Questions repeat and only different ones are kept, so more are made than asked for.
    size = 4 * (most + shots)
    try:
        needs("reasoning_gym", "reasoning-gym")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    import reasoning_gym

    try:
        settings = json.loads(config)
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym refuses {name} with {config}: {error}") from error
    first: dict[str, int] = {}
    for index in range(size):
        first.setdefault(dataset[index]["question"], index)
    indices = [index for index in first.values() if index >= shots][:most]
    return [
        {"task": name, "seed": seed, "index": index, "size": size, "config": settings}
        for index in indices
    ]
