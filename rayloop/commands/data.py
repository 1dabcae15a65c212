"""``data prepare|validate|convert``: make rows, check them, write them in another language."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayloop import recipes
from rayloop.chat.rendering import Renderer
from rayloop.commands.arguments import add_overrides
from rayloop.config.settings import Component
from rayloop.config.yaml_source import parse_value
from rayloop.core.failures import ConfigError, DataFailure, RayloopError
from rayloop.core.files import write_whole
from rayloop.core.types import Task
from rayloop.data.dataset import ChatRows, Dataset
from rayloop.data.published import prepare
from rayloop.data.validation import Checked, Length, check, leaks
from rayloop.envs.grammar.family import ANY_MODEL
from rayloop.envs.grammar.screens import ScreenSettings
from rayloop.measure.controls import solved_tasks
from rayloop.run.config import RunConfig, read
from rayloop.run.export import recorded
from rayloop.run.folder import RunFolder
from rayloop.run.held_out import read_items
from rayloop.run.lifetime import right
from rayloop.run.preflight import Prepared, beyond_positions
from rayloop.run.preflight import prepare as prepare_run
from rayloop.sft.conversion import Converter, episodes
from rayloop.sft.translation import Translation

GENERIC = "generic"
SINGLE_TURN = "rayloop.envs.single_turn:SingleTurn"
"""The environment that reads no column of a row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``data``."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    making = actions.add_parser(
        "prepare", help="make a recipe's dataset, or write a published one as rows"
    )
    made = recipes.having("prepare")
    published = [*recipes.datasets(), *recipes.PREPARED]
    making.add_argument(
        "name",
        metavar="NAME",
        choices=sorted({*made, *published, GENERIC}),
        help=(
            f"a recipe, which makes its own rows ({', '.join(made)}), or a published data set"
            f" ({', '.join(published)}); {GENERIC}: one whose map of columns is yours"
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
    _add_convert(actions)


def _add_convert(actions: Any) -> None:
    converting = actions.add_parser(
        "convert", help="write demonstrations in another action language, as rows for sft"
    )
    source = "a run's folder, for its episodes on record (keep_rollouts), or a data file"
    converting.add_argument("source", type=Path, metavar="SOURCE", help=source)
    converting.add_argument(
        "--to",
        required=True,
        metavar="LANGUAGE",
        help=(
            "its name, or with the coordinates of its model:"
            " '{language: ui_tars, pointing: {coordinates: relative}}'"
        ),
    )
    converting.add_argument(
        "--from", dest="origin", metavar="LANGUAGE", help="default: the run's; of a file ui_tars"
    )
    converting.add_argument("--out", type=Path, required=True, metavar="DIR", help="for rows")
    reward = "with a run: only episodes with this reward or more"
    converting.add_argument("--least-reward", type=float, metavar="R", help=reward)
    converting.set_defaults(run=_convert)


def _prepare(arguments: argparse.Namespace) -> int:
    if {"-h", "--help"} & set(arguments.options):
        print(f"with any NAME: {OPTION}\n")
    solvable, options = solvable_options(arguments.options)
    if solvable.by is not None:
        _check_playable(solvable)
    code = _make(arguments.name, options)
    if solvable.by is not None and not code:
        keep_solvable(solvable)
    return code


def _make(name: str, options: list[str]) -> int:
    """Make the dataset; returns the exit code.

    Where a recipe and a published data set share a name (pyvision), the options decide: the
    published one is on the Hub or in a folder.
    """
    published = recipes.datasets()
    names_source = bool({word.partition("=")[0] for word in options} & {"--from", "--hub"})
    is_recipe = name in recipes.having("prepare")
    if name == GENERIC or (name in published and (names_source or not is_recipe)):
        return prepare.main(name, published, options)
    module = import_module(recipes.PREPARED.get(name, f"rayloop.recipes.{name}.prepare"))
    code: int = module.main(options)
    return code


def validate_run(config: RunConfig) -> int:
    """Check a run's rows with its reader, and that none is both trained on and held out.

    Held-out prompts may be as long as evaluations allow. Returns 0 or 1; raises as ``check``.
    """
    prepared = prepare_run(config)
    length = _length(prepared)
    results: list[Checked] = []
    for path, run in (
        (config.data.train, config),
        (config.data.eval, config.in_evaluation),
    ):
        if path is None:
            continue
        episode = run.environment.episode
        results.append(
            check(
                Path(path),
                config.data.reader,
                config.environment.kinds,
                length,
                episode.max_prompt_tokens,
                config.reward.compares,
                reads=episode.environment.use != SINGLE_TURN,
                anywhere=config.data.anywhere,
            )
        )
    leak_count = leaks(*results) if len(results) == 2 else 0
    warning = "" if length is None else beyond_positions(prepared)
    if warning:
        print(f"warning: {warning}")
    return 1 if leak_count or any(result.problems for result in results) else 0


def _length(prepared: Prepared) -> Length | None:
    """A counter of the tokens of a row's prompt for the run's model.

    None, with a printed reason, where its tokenizer is missing.
    """
    try:
        renderer = Renderer(prepared.config.model, folder=prepared.model.files.folder)
    except ConfigError as error:
        print(f"token lengths are not counted: {error}")
        return None
    return lambda task: len(renderer.prompt(task.messages, task.tools).token_ids)


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.file.suffix in (".yaml", ".yml"):
        return validate_run(read(arguments.file, arguments.overrides))
    if arguments.overrides:
        raise ConfigError(
            f"{arguments.overrides[0]}: {arguments.file} is not the YAML file of a run, which alone"
            " has keys to set"
        )
    result = check(arguments.file, Component(use=arguments.reader), anywhere=arguments.anywhere)
    return 1 if result.problems else 0


def _convert(arguments: argparse.Namespace) -> int:
    source = _language("--from", arguments.origin or ANY_MODEL)
    target = _language("--to", arguments.to)
    failures: list[DataFailure] = []
    tasks: Iterable[Task]
    if arguments.source.is_dir():
        folder = RunFolder.begun(arguments.source)
        config = recorded(folder.config)
        options = config.environment.episode.environment.options()
        if isinstance(options, ScreenSettings) and arguments.origin is None:
            source = options
        tasks = episodes(folder, config.model.position_tint, arguments.least_reward)
    else:
        tasks = Dataset(arguments.source, ChatRows(ChatRows.Settings()), False, failures.append)
    converter = Converter(Translation(source, target), arguments.out)
    converter.convert(tasks)
    for failure in failures:
        converter.leave_out(failure)
    print("\n".join(converter.written()))
    return 0 if converter.rows else 1


def _language(option: str, text: str) -> ScreenSettings:
    """A language, by its name or with settings as YAML. Raises ConfigError."""
    value = parse_value(text, option)
    settings = {"language": value} if isinstance(value, str) else value
    try:
        return ScreenSettings.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        reason = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{option} {text}: {key} {reason}".replace("  ", " ")) from error


ITEMS = "items.jsonl"
OPTION = """--solvable-by CHECKPOINT --config CONFIG [--attempts N] keeps the training rows
that a policy solves at least once; --solvable-by FOLDER uses an evaluation that exists"""


def solvable_options(options: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``--solvable-by``, and the preparation's own options.

    The former are ``by`` (None: keep all rows), ``config``, ``attempts`` and ``out``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--solvable-by", dest="by", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--attempts", type=int, default=4)
    if not any(word.partition("=")[0] == "--solvable-by" for word in options):
        return argparse.Namespace(by=None), list(options)
    solvable, rest = parser.parse_known_args(options)
    out_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    out_parser.add_argument("--out", type=Path, required=True)
    solvable.out = out_parser.parse_known_args(rest)[0].out
    return solvable, rest


def keep_solvable(chosen: argparse.Namespace) -> None:
    """Rewrite ``out/train.jsonl`` with the solvable rows, and the counts ``solved`` and ``played``.

    Unscored rows stay. Raises ConfigError, RayloopError.
    """
    file = chosen.out / "train.jsonl"
    if not file.is_file():
        raise ConfigError(
            f"--solvable-by: {file} is not there; it keeps the solvable ones of the training rows"
        )
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    folder = chosen.by if (chosen.by / ITEMS).is_file() else _evaluated(chosen, file)
    score, least = right(read(chosen.config, []).evaluation.solved if chosen.config else "success")
    counts = solved_tasks(read_items(folder / ITEMS), score, least)
    if not counts:
        raise ConfigError(
            f"--solvable-by: no answer of {folder} has the score {score}; evaluation.solved of"
            " --config names another"
        )
    solvable_rows = []
    unknown = 0
    for row in rows:
        if row["id"] not in counts:
            unknown += 1
            solvable_rows.append(row)
            continue
        solved, played = counts[row["id"]]
        if solved:
            solvable_rows.append({**row, "solved": solved, "played": played})
    if not solvable_rows:
        raise ConfigError(
            f"--solvable-by: {folder} solved none of the {len(rows)} rows of {file} ({score} >="
            f" {least:g})"
        )
    write_whole(file, "".join(json.dumps(row) + "\n" for row in solvable_rows).encode())
    count = len(solvable_rows)
    unknown_count = f", {unknown} unknown" if unknown else ""
    print(
        f"{file}: {count} of {len(rows)} rows are kept: {count - unknown} solved at least once"
        f"{unknown_count}"
    )


def _check_playable(chosen: argparse.Namespace) -> None:
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


def _evaluated(chosen: argparse.Namespace, file: Path) -> Path:
    """The folder of an evaluation of the checkpoint: ``attempts`` sampled answers a row.

    Raises RayloopError.
    """
    out = chosen.out / "solvable"
    options = [
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
    command = [sys.executable, "-m", "rayloop", "eval", *map(str, options)]
    command.append("evaluation.greedy=false")
    code = subprocess.run(command).returncode
    if code not in (0, 1) or not (out / ITEMS).is_file():
        raise RayloopError(f"{' '.join(command[1:])} ended with {code}; its output is above")
    return out
