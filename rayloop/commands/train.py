"""``train``, ``try``, ``sft``, ``export`` and ``report``: train a policy and write its results.

``try`` shows one row first, ``export`` writes the model, ``report`` a page.
"""

import argparse
import sys
from pathlib import Path

from rayloop.commands.arguments import add_cluster, add_overrides, add_run, add_run_folder, cluster
from rayloop.config.settings import NotImported, check_components, dump, load, without_foreign_code
from rayloop.core.failures import ConfigError
from rayloop.launch.restarts import supervised
from rayloop.run.config import read
from rayloop.run.folder import RunFolder
from rayloop.run.place import from_start
from rayloop.run.preflight import idle_settings, preflight, prepare


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``."""
    add_run(parser, "steps=20 model.path=/models/qwen")
    add_cluster(parser)
    parser.add_argument(
        "--again",
        type=int,
        default=0,
        metavar="N",
        help="restart up to N times when machines fail (exit code 69)",
    )
    parser.add_argument(
        "--console",
        action="store_true",
        help="serve the run's console meanwhile, on loopback with a token",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show the expanded configuration and stop"
    )
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.print_config:
        return _print_config(arguments)
    if arguments.again:
        return supervised(
            [sys.executable, "-m", "rayloop", *sys.argv[1:], "--again=0"], arguments.again
        )
    with cluster(arguments) as (address, temporary):
        config = read(arguments.config, arguments.overrides)
        # The run may have begun in another folder, to which its relative paths refer.
        config = from_start(config, config.folder)
        prepared = preflight(prepare(config))
        if arguments.console:
            from rayloop.commands.console import serve_beside

            serve_beside(RunFolder.at(config.folder))
        from rayloop.cluster.stages.train import train  # imports ray, which reads the environment

        return train(prepared, address, temporary)


def _print_config(arguments: argparse.Namespace) -> int:
    """Print the configuration, and its settings that do nothing.

    Nothing that it names is imported, so that a stranger's configuration can be examined.
    """
    with without_foreign_code():
        config = read(arguments.config, arguments.overrides)
        print(dump(config), end="")
        try:
            print("".join(f"# {reason}\n" for reason in idle_settings(config)), end="")
        except NotImported as error:
            print(f"# which settings do nothing is not known: {error}")
    return 0


def add_try(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``try``, which shows one row, two answers, and the reward of each."""
    add_run(parser, "rollout.sampling.max_tokens=200")
    parser.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="row of data.train, counted from 1 (default: the first usable)",
    )
    parser.set_defaults(run=_try)


def _try(arguments: argparse.Namespace) -> int:
    config = read(arguments.config, arguments.overrides)
    config = from_start(config, config.folder)
    prepared = preflight(prepare(config), trains=False, reads=("train",))
    from rayloop.cluster.stages.dry_run import try_row  # imports torch

    return try_row(prepared.config, arguments.row)


def add_sft(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sft``: supervised steps on the answers of the training rows."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML file of the stage (docs/sft.md)"
    )
    add_overrides(parser, "values to change, for example steps=200 output=runs/models/mine")
    add_cluster(parser)
    parser.set_defaults(run=_sft)


def _sft(arguments: argparse.Namespace) -> int:
    from rayloop.envs.grammar.family import listeners
    from rayloop.sft.answers import try_first
    from rayloop.sft.stage import SftConfig

    with cluster(arguments) as (address, temporary):
        config = load(arguments.config, arguments.overrides, SftConfig)
        check_components(config)
        rows = config.data.rows(config.data.train, lambda failure: None)
        first = next(iter(rows), None)
        if first is not None:
            if first.bare or listeners(config):
                config = config.speaking()
            try_first(config.answers, first)
        from rayloop.cluster.stages.sft import sft  # imports ray, which reads the environment

        return sft(config, address, temporary)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``, which writes a checkpoint for plain transformers."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="run folder, checkpoint of a run, model folder, or folder of peft's adapters",
    )
    parser.add_argument("out", type=Path, help="new folder")
    dtype = "bfloat16 halves the folder and rounds the weights"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=dtype)
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from rayloop.run.export import export  # imports torch

    return export(arguments.checkpoint, arguments.out, arguments.dtype)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``, which writes a run as one HTML file."""
    add_run_folder(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    parser.add_argument(
        "--groups",
        type=int,
        default=200,
        metavar="N",
        help="recorded groups to show, evenly spread",
    )
    parser.add_argument(
        "--files",
        action="store_true",
        help="write training_metrics.json and task_results/ into RUN_DIR as well",
    )
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from rayloop.view.page import write_files, write_page

    if arguments.groups < 0:
        raise ConfigError(f"--groups {arguments.groups}: expected 0 or more")
    print(write_page(arguments.run_folder, arguments.out, arguments.groups))
    if arguments.files:
        for path in write_files(arguments.run_folder):
            print(path)
    return 0
