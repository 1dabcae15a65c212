"""``eval``: measure a checkpoint on held-out rows, with controls."""

import argparse
from pathlib import Path

from rayloop import recipes
from rayloop.chat.template import CLOCK
from rayloop.commands.arguments import add_cluster, add_run, cluster
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError
from rayloop.run.config import RunConfig, read
from rayloop.run.folder import RunFolder
from rayloop.run.preflight import preflight, prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``eval``."""
    benchmarks = recipes.benchmarks()
    add_run(parser, "evaluation.limit=100")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="run folder, checkpoint, model or peft adapters (default: model.path)",
    )
    parser.add_argument(
        "--benchmark",
        metavar="NAME",
        choices=benchmarks,
        help=f"rows, reader and measure of a benchmark, laid over CONFIG: {', '.join(benchmarks)}",
    )
    parser.add_argument("--data", help="rows to evaluate on (default: data.eval)")
    parser.add_argument(
        "--controls",
        action="store_true",
        help="also wrong images, and the best answers without one",
    )
    parser.add_argument(
        "--samples",
        type=int,
        help="sampled answers per row, besides the greedy one (default: evaluation.samples)",
    )
    parser.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help=(
            "times that an answer cut by sampling.max_tokens is played again with twice the room"
            " (default: 3 with --benchmark, else 0)"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the items, continued when it exists (default: <run>-eval)",
    )
    add_cluster(parser)
    parser.set_defaults(run=run)


def evaluation_folder(config: RunConfig, checkpoint: Path | None, benchmark: str = "eval") -> Path:
    """The folder of an evaluation's items, named after the checkpoint's run and next to it.

    For a model folder, or without a checkpoint, it is below ``output``.
    """
    if checkpoint is None:
        return Path(config.output) / f"{config.name}-{benchmark}"
    run = run_of(checkpoint)
    if run is None:
        return Path(config.output) / f"{checkpoint.resolve().name}-{benchmark}"
    return run.with_name(f"{run.name}-{benchmark}")


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that the checkpoint is of; None for a model folder."""
    path = checkpoint.resolve()
    for folder in (path, *path.parents[:2]):
        if (folder / "config.yaml").is_file():
            return folder
    return None


def as_asked(model: ModelSettings, checkpoint: Path, folder: Path) -> ModelSettings:
    """The model of a checkpoint, exported below ``folder``.

    A date in its prompts is that of its run.
    """
    from rayloop.run.export import model_of  # imports torch

    run = run_of(checkpoint)
    run_model = RunFolder.at(run).configuration.get("model", {}) if run else {}
    run_variables = run_model.get("chat_template_kwargs") or {}
    variables = dict(model.chat_template_kwargs)
    if CLOCK in run_variables:
        variables = {CLOCK: run_variables[CLOCK], **variables}
    path = str(model_of(checkpoint, folder))
    return model.model_copy(
        update={"path": path, "revision": None, "chat_template_kwargs": variables}
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate. Returns the exit code; raises RayloopError."""
    with cluster(arguments) as (address, temporary):
        name = arguments.benchmark
        layers = [recipes.benchmarks()[name]] if name else []
        config = read(arguments.config, arguments.overrides, layers)
        out = arguments.out or evaluation_folder(config, arguments.checkpoint, name or "eval")
        data = arguments.data or config.data.eval
        if data is None:
            raise ConfigError("data.eval names no rows, and --data was not given")
        if name and not Path(data).is_file():
            raise ConfigError(
                f"{data} is not there. {recipes.benchmarks()[name]} says in its first line how it"
                " is made"
            )
        if arguments.checkpoint is not None:
            model = as_asked(config.model, arguments.checkpoint, out / "models")
            if run_of(arguments.checkpoint):
                # The exported model has lost the name by which `auto` may know its language.
                config = prepare(config).speaking().config
            config = config.model_copy(update={"model": model})
        eval_data = config.data.model_copy(update={"eval": data})
        evaluated = prepare(config).with_sections(data=eval_data)
        files = ("train", "eval") if arguments.controls else ("eval",)
        prepared = preflight(evaluated, trains=False, reads=files)
        # It imports ray, which reads the environment.
        from rayloop.cluster.stages.evaluate import evaluate

        return evaluate(
            prepared.with_sections(data=config.data),
            data,
            out,
            controls=arguments.controls,
            samples=config.evaluation.samples if arguments.samples is None else arguments.samples,
            retries=(3 if name else 0) if arguments.retries is None else arguments.retries,
            benchmark=name or "",
            address=address,
            temporary=temporary,
        )
