"""Writes rows of OSWorld's task lists.

A list is JSON ``{domain: [id, ...]}`` with each task in ``examples/DOMAIN/ID.json``: ``python -m
rayloop data prepare osworld --out DIR --from evaluation_examples``. It was tested without a real
folder.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.envs.grammar.family import BARE
from rayloop.envs.osworld.environment import rows
from rayloop.recipes import preparer, write_rows
from rayloop.recipes.arpo.prepare import ORIGINAL, Prompt

PROMPTS: Mapping[str, Prompt] = {"language": BARE, "original": ORIGINAL}
NEEDED = {"id", "instruction", "evaluator"}
"""Keys of a task."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write train.jsonl.

    Returns exit code 0; raises ConfigError for a list or a task that is missing.
    """
    parser = preparer("osworld", __doc__)
    parser.add_argument(
        "--from", dest="folder", type=Path, required=True, help="OSWorld's evaluation_examples"
    )
    parser.add_argument(
        "--list",
        type=Path,
        default=Path("test_all.json"),
        help="list of tasks (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        choices=PROMPTS,
        default="language",
        help="prompt of the rows (default: %(default)s)",
    )
    parser.add_argument(
        "--max-samples", type=int, metavar="N", help="tasks at most, drawn at random"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is drawn (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    task_rows = tasks(options.folder, options.list, PROMPTS[options.prompt])
    if options.max_samples is not None and options.max_samples < len(task_rows):
        generator = random.Random(options.seed)
        numbers = generator.sample(range(len(task_rows)), options.max_samples)
        task_rows = [task_rows[number] for number in sorted(numbers)]
    write_rows(options.out, "train", task_rows)
    return 0


def tasks(folder: Path, name: Path, prompt: Prompt = BARE) -> list[dict[str, Any]]:
    """Rows {id, data_source (the domain), prompt, osworld} of a list.

    ``name`` is a path, or is relative to ``folder``.

    Raises ConfigError.
    """
    file = next((path for path in (folder / name, name) if path.is_file()), None)
    if file is None:
        raise ConfigError(f"--list {name}: no such file, nor in {folder}")
    try:
        task_rows = rows(file, prompt)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{file} is not a list of tasks, {{domain: [id, ...]}}: {error}"
        ) from error
    if not task_rows:
        raise ConfigError(f"{file} names no task: expected {{domain: [id, ...]}}")
    for row in task_rows:
        task = folder / "examples" / f"{row['osworld']}.json"
        try:
            missing = NEEDED - json.loads(task.read_text(encoding="utf-8")).keys()
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{file} names {row['osworld']}, and {task} cannot be read: {error}"
            ) from error
        if missing:
            keys = ", ".join(sorted(missing))
            raise ConfigError(f"{task} is not a task of OSWorld: it has no {keys}")
    return [{**row, "data_source": str(row["osworld"]).partition("/")[0]} for row in task_rows]
