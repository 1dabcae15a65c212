"""Writes desktop tasks as rows.

``data prepare desktop --out DIR`` makes train.jsonl and val.jsonl (every fourth task).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayloop.core.failures import ConfigError
from rayloop.envs.desktop.tasks import PROMPT, SHIPPED, rows
from rayloop.envs.grammar.family import BARE
from rayloop.recipes import preparer, write_rows

PROMPTS: Mapping[str, object] = {"bare": PROMPT, "language": BARE}
HELD_OUT = 4
"""Every fourth task is held out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files.

    Returns exit code 0; raises ConfigError for a file of tasks that cannot be used.
    """
    parser = preparer("desktop", __doc__)
    parser.add_argument(
        "--tasks",
        type=Path,
        default=SHIPPED,
        help="a file of desktop tasks (default: the shipped one)",
    )
    parser.add_argument(
        "--prompt",
        choices=PROMPTS,
        default="bare",
        help="prompt of the rows (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        task_rows = rows(options.tasks.absolute(), PROMPTS[options.prompt])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tasks: {error}") from error
    held_out = task_rows[HELD_OUT - 1 :: HELD_OUT]
    write_rows(options.out, "train", [row for row in task_rows if row not in held_out])
    write_rows(options.out, "val", held_out)
    return 0
