"""``env list|play``: which environments there are, and one of them by hand."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from rayloop.commands.arguments import add_overrides
from rayloop.core.failures import ConfigError
from rayloop.core.types import Task
from rayloop.data.dataset import Dataset
from rayloop.envs.catalog import FAMILIES, family, playable
from rayloop.envs.settings import EnvironmentKind
from rayloop.run.config import read

PLAYED = Path("runs/play")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``env`` and their options."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="the environments to try by name")
    listed.add_argument("family", nargs="?", metavar="FAMILY", help="name all of one family")
    listed.set_defaults(run=_list)
    play = actions.add_parser("play", help="play an episode by hand, seeing what the policy sees")
    play.add_argument("name", metavar="NAME", help="family:task, such as miniwob:click-color, or the YAML file of a run")
    add_overrides(play, "with a run: values to change")
    play.add_argument("--seed", type=int, default=0, help="of the task; equal seeds give equal ones (default: 0)")
    play.add_argument("--row", type=int, default=1, help="with a run: row of data.train, counted from 1 (default: 1)")
    play.add_argument("--pictures", type=Path, metavar="DIR", help="write pictures there, also in a colour terminal")
    play.set_defaults(run=_play)


def _list(arguments: argparse.Namespace) -> int:
    for word in [arguments.family] if arguments.family else FAMILIES:
        try:
            found = family(word)
        except ConfigError as error:
            if arguments.family:
                raise
            print(f"{word}: {error}")
            continue
        print(f"{word}: {found.about}")
        shown = found.names if arguments.family else found.names[:4]
        print("".join(f"  {word}:{name}\n" for name in shown), end="")
        if more := len(found.names) - len(shown):
            print(f"  and {more} more: python -m rayloop env list {word}")
    return 0


def _play(arguments: argparse.Namespace) -> int:
    from rayloop.commands.env import QUIT, PictureView, keyboard, play, shown_as

    turn: Callable[[str], str] = str
    example = ""
    if Path(arguments.name).suffix in (".yaml", ".yml"):
        kind, task = _of_run(Path(arguments.name), arguments.overrides, arguments.row)
    elif arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]}: {arguments.name} is no YAML file of a run, which alone has keys to set")
    else:
        found, kind, task = playable(arguments.name, arguments.seed)
        example, turn = found.example, found.turn
    colours = None if arguments.pictures else shown_as()
    pictures = PictureView(arguments.pictures or PLAYED / f"{task.id}".replace("/", "-"), colours, print)
    typed = sys.stdin.isatty()

    def ask() -> str | None:
        line = keyboard(echo=not typed)
        return line if line is None or not line.strip() or line.strip() in QUIT else turn(line)

    asyncio.run(play(kind, task, ask, print, pictures, example))
    return 0


def _of_run(file: Path, overrides: list[str], row: int) -> tuple[EnvironmentKind, Task]:
    """The environment and the task of a usable row of a run. Raises ConfigError."""
    config = read(file, overrides)
    kinds, default = config.environment.kinds, config.environment.episode.environment
    dataset = Dataset(config.data.train, config.data.reader.build(), config.data.strict, lambda failure: None, kinds)
    if not 1 <= row <= len(dataset):
        raise ConfigError(f"--row {row}: {config.data.train} has {len(dataset)} usable rows")
    task = dataset[row - 1]
    return kinds.get(task.environment, default), task
