"""Writes rows of OSWorld's task lists, JSON ``{domain: [id, ...]}`` with each task in
``examples/DOMAIN/ID.json``: ``python -m rayloop data prepare osworld --out DIR --from
evaluation_examples``. No real folder has been read here.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayloop.core.failures import ConfigError
from rayloop.envs.grammar.screens import UI_TARS_OR_FAIL
from rayloop.envs.osworld.environment import rows
from rayloop.recipes import write_rows
from rayloop.recipes.arpo.prepare import ORIGINAL, Prompt

PROMPTS = {"ui-tars": UI_TARS_OR_FAIL, "original": ORIGINAL}
NEEDED = {"id", "instruction", "evaluator"}
"""Keys of a task."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write train.jsonl.

    Returns exit code 0; raises ConfigError for a list or a task that is not there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rayloop data prepare osworld", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
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
        default="ui-tars",
        help="prompt of the rows (default: %(default)s)",
    )
    parser.add_argument(
        "--max-samples", type=int, metavar="N", help="tasks at most, drawn at random"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is drawn (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    made = tasks(chosen.folder, chosen.list, PROMPTS[chosen.prompt])
    if chosen.max_samples is not None and chosen.max_samples < len(made):
        keep = set(random.Random(chosen.seed).sample(range(len(made)), chosen.max_samples))
        made = [row for number, row in enumerate(made) if number in keep]
    write_rows(chosen.out, "train", made)
    return 0


def tasks(folder: Path, name: Path, prompt: Prompt = UI_TARS_OR_FAIL) -> list[dict[str, Any]]:
    """Rows {id, data_source (the domain), prompt, osworld} of a list beside or below ``folder``.

    Raises ConfigError.
    """
    file = next((path for path in (folder / name, name) if path.is_file()), None)
    if file is None:
        raise ConfigError(f"--list {name}: no such file, nor in {folder}")
    try:
        made = rows(file, prompt)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file} is no list of tasks, {{domain: [id, ...]}}: {error}") from error
    if not made:
        raise ConfigError(f"{file} names no task: expected {{domain: [id, ...]}}")
    for row in made:
        task = folder / "examples" / f"{row['osworld']}.json"
        try:
            lacking = NEEDED - json.loads(task.read_text(encoding="utf-8")).keys()
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{file} names {row['osworld']}, and {task} cannot be read: {error}"
            ) from error
        if lacking:
            raise ConfigError(
                f"{task} is no task of OSWorld: it has no {', '.join(sorted(lacking))}"
            )
    return [{**row, "data_source": str(row["osworld"]).partition("/")[0]} for row in made]
