"""``data prepare|validate``: make the dataset of a recipe, and check a file before a run reads it."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rayloop import recipes
from rayloop.chat.rendering import Renderer
from rayloop.commands.arguments import add_overrides
from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.files import write_whole
from rayloop.data.published import prepare
from rayloop.data.validation import Length, check, leaks
from rayloop.measure.controls import solved_tasks
from rayloop.run.config import RunConfig, read
from rayloop.run.held_out import read_items
from rayloop.run.lifetime import right
from rayloop.run.preflight import beyond_positions

GENERIC = "generic"
SINGLE_TURN = "rayloop.envs.single_turn:SingleTurn"
"""The environment that reads no column of a row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``data``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    making = actions.add_parser(
        "prepare", help="make a recipe's dataset, or write a published one as rows"
    )
    drawn, published = recipes.having("prepare"), recipes.datasets()
    making.add_argument(
        "name",
        metavar="NAME",
        choices=sorted({*drawn, *published, *recipes.PREPARED, GENERIC}),
        help=(
            f"a recipe, which makes its own rows ({', '.join(drawn)}), or a published data set"
            f" ({', '.join([*published, *recipes.PREPARED])}); {GENERIC}: one whose map of columns"
            " is yours"
        ),
    )
    making.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its own options; --help names them",
    )
    making.set_defaults(run=_prepare)
    checking = actions.add_parser("validate", help="name the rows that a run could not use")
    file = "YAML file of a run (its data, read as the run would), JSONL, JSON array or parquet"
    checking.add_argument("file", type=Path, metavar="FILE", help=file)
    add_overrides(checking, "with a run: values to change")
    reader = "rayloop.data.dataset:ChatRows"
    checking.add_argument(
        "--reader",
        metavar="MODULE:CLASS",
        default=reader,
        help=f"with a data file (default: {reader})",
    )
    checking.add_argument(
        "--anywhere", action="store_true", help="with a data file: as data.anywhere=true"
    )
    checking.set_defaults(run=_validate)


def _prepare(arguments: argparse.Namespace) -> int:
    if {"-h", "--help"} & set(arguments.options):
        print(f"with any NAME: {OPTION}\n")
    solvable, options = solvable_options(arguments.options)
    if solvable.by is not None:
        _playable(solvable)
    code = _made(arguments.name, options)
    if solvable.by is not None and not code:
        keep_solvable(solvable)
    return code


def _made(name: str, options: list[str]) -> int:
    """Where a recipe and a published data set share a name (pyvision), the options say which: one
    is on the Hub or in a folder.
    """
    published = recipes.datasets()
    where = {word.partition("=")[0] for word in options} & {"--from", "--hub"}
    if name == GENERIC or (name in published and (where or name not in recipes.having("prepare"))):
        return prepare.main(name, published, options)
    code: int = import_module(recipes.PREPARED.get(name, f"rayloop.recipes.{name}.prepare")).main(
        options
    )
    return code


def validate_run(config: RunConfig) -> int:
    """Check a run's rows with its reader, and that none is both trained on and held out; held-out
    prompts may be as long as evaluations allow. Returns 0 or 1; raises as ``check``.
    """
    files = (config.data.train, config), (config.data.eval, config.in_evaluation)
    length, kinds, reward = _length(config), config.environment.kinds, config.reward
    found = [
        check(
            Path(path),
            config.data.reader,
            kinds,
            length,
            played.environment.episode.max_prompt_tokens,
            reward.compares,
            reads=played.environment.episode.environment.use != SINGLE_TURN,
            anywhere=config.data.anywhere,
        )
        for path, played in files
        if path is not None
    ]
    leaked = leaks(*found) if len(found) == 2 else 0
    if length is not None and (beyond := beyond_positions(config)):
        print(f"warning: {beyond}")
    return 1 if leaked or any(one.problems for one in found) else 0


def _length(config: RunConfig) -> Length | None:
    """Counts the tokens of a row's prompt for the run's model; None, with a printed reason, where
    its tokenizer is missing.
    """
    try:
        renderer = Renderer(config.model)
    except ConfigError as error:
        print(f"token lengths are not counted: {error}")
        return None
    return lambda task: len(renderer.prompt(task.messages, task.tools).token_ids)


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.file.suffix in (".yaml", ".yml"):
        return validate_run(read(arguments.file, arguments.overrides))
    if arguments.overrides:
        raise ConfigError(
            f"{arguments.overrides[0]}: {arguments.file} is no YAML file of a run, which alone has"
            " keys to set"
        )
    return (
        1
        if check(
            arguments.file, Component(use=arguments.reader), anywhere=arguments.anywhere
        ).problems
        else 0
    )


ITEMS = "items.jsonl"
OPTION = """--solvable-by CHECKPOINT --config CONFIG [--attempts N] keeps the training rows that a policy solves at least once;
--solvable-by FOLDER asks an evaluation that is there"""


def solvable_options(options: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """``by`` (None: keep all rows), ``config``, ``attempts`` and ``out``; and the options that are
    the preparation's own.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--solvable-by", dest="by", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--attempts", type=int, default=4)
    if not any(word.partition("=")[0] == "--solvable-by" for word in options):
        return argparse.Namespace(by=None), list(options)
    chosen, rest = parser.parse_known_args(options)
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("--out", type=Path, required=True)
    chosen.out = where.parse_known_args(rest)[0].out
    return chosen, rest


def keep_solvable(chosen: argparse.Namespace) -> None:
    """Rewrite ``out/train.jsonl``: how often each row was ``solved`` and ``played``.

    Unscored rows stay. Raises ConfigError, RayloopError.
    """
    file = chosen.out / "train.jsonl"
    if not file.is_file():
        raise ConfigError(
            f"--solvable-by: {file} is not there; it keeps the solvable ones of the training rows"
        )
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    folder = chosen.by if (chosen.by / ITEMS).is_file() else _played(chosen, file)
    score, least = right(read(chosen.config, []).evaluation.solved if chosen.config else "success")
    counts = solved_tasks(read_items(folder / ITEMS), score, least)
    if not counts:
        raise ConfigError(
            f"--solvable-by: no answer of {folder} has the score {score}; evaluation.solved of"
            " --config names another"
        )
    kept = [
        {**row, **_counted(counts.get(row["id"]))}
        for row in rows
        if row["id"] not in counts or counts[row["id"]][0]
    ]
    if not kept:
        raise ConfigError(
            f"--solvable-by: {folder} solved none of the {len(rows)} rows of {file} ({score} >="
            f" {least:g})"
        )
    write_whole(file, "".join(json.dumps(row) + "\n" for row in kept).encode())
    unknown = sum(row["id"] not in counts for row in rows)
    solved = f"{len(kept) - unknown} solved at least once" + (
        f", {unknown} unknown" if unknown else ""
    )
    print(f"{file}: {len(kept)} of {len(rows)} rows are kept: {solved}")


def _counted(counts: tuple[int, int] | None) -> dict[str, int]:
    return {} if counts is None else {"solved": counts[0], "played": counts[1]}


def _playable(chosen: argparse.Namespace) -> None:
    """Raises ConfigError when the rows could not be played once they are written."""
    if not chosen.by.exists():
        raise ConfigError(
            f"--solvable-by: {chosen.by} is not there; name a checkpoint, or the folder of an"
            " evaluation"
        )
    if chosen.config is not None:
        read(chosen.config, [])
    elif not (chosen.by / ITEMS).is_file():
        raise ConfigError(
            f"--solvable-by: {chosen.by} has no {ITEMS}, so it is played: name the run's"
            " configuration with --config"
        )


def _played(chosen: argparse.Namespace, file: Path) -> Path:
    """The folder of an evaluation of the checkpoint: ``attempts`` sampled answers a row.

    Raises RayloopError.
    """
    out = chosen.out / "solvable"
    asked = [
        chosen.config,
        "--checkpoint",
        chosen.by,
        "--data",
        file,
        "--samples",
        chosen.attempts,
        "--out",
        out,
    ]
    command = [sys.executable, "-m", "rayloop", "eval", *map(str, asked), "evaluation.greedy=false"]
    code = subprocess.run(command).returncode
    if code not in (0, 1) or not (out / ITEMS).is_file():
        raise RayloopError(f"{' '.join(command[1:])} ended with {code}; its output is above")
    return out
