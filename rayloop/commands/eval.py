"""``eval``: measure a checkpoint on held-out rows, with controls.

With ``--protocol`` the number is published in a file, which ``--like`` measures again.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rayloop import recipes
from rayloop.chat.template import CLOCK
from rayloop.commands.arguments import add_cluster, add_run, cluster
from rayloop.config.model import ModelSettings
from rayloop.core.failures import ConfigError
from rayloop.core.files import unused
from rayloop.measure import protocol
from rayloop.measure.protocol import Measurement, Published
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
    parser.add_argument(
        "--protocol",
        type=Path,
        metavar="FILE",
        help=(
            "file of the number with all that it depends on; one that exists must have the same"
            " protocol, and is compared with"
        ),
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FILE",
        action=_Like,
        help="measure the number in FILE again, in place of CONFIG, and compare task by task",
    )
    add_cluster(parser)
    parser.set_defaults(run=run)


class _Like(argparse.Action):
    """Takes the file of ``--like``, with which no CONFIG is needed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        for action in parser._actions:
            if action.dest == "config":
                action.required = False


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


def _read_again(published: Published, overrides: list[str]) -> RunConfig:
    """The configuration of a published number, with overrides. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        # YAML reads JSON, so that overrides and errors are those of any configuration.
        file = Path(folder) / f"{published.file.name}.yaml"
        file.write_text(json.dumps(published.then.measured.config), encoding="utf-8")
        try:
            return read(file, overrides)
        except ConfigError as error:
            raise ConfigError(f"the configuration in {published.file}: {error}") from error


def _published(arguments: argparse.Namespace) -> Published | None:
    """The number to compare with, if any. Raises ConfigError."""
    if arguments.like is not None:
        if arguments.benchmark:
            raise ConfigError("--like FILE names the rows: leave out --benchmark")
        # Rows that are named may be others; those of the file must not have changed.
        fixed = () if arguments.data else ("tasks.rows",)
        return Published(arguments.like, protocol.read(arguments.like), fixed)
    if arguments.protocol is not None and arguments.protocol.exists():
        return Published(arguments.protocol, protocol.read(arguments.protocol), ("",))
    return None


def _measurement(arguments: argparse.Namespace, published: Published | None) -> Measurement:
    """What is measured: as the arguments say, and else CONFIG or the published number."""
    if arguments.like is not None and published is not None:
        # Without CONFIG, the first key=value is in its place.
        words = [arguments.config, *arguments.overrides]
        config = _read_again(published, [str(word) for word in words if word])
        measured = published.then.measured
    else:
        name = arguments.benchmark or ""
        layers = [recipes.benchmarks()[name]] if name else []
        config = read(arguments.config, arguments.overrides, layers)
        measured = Measurement(
            config={},
            checkpoint=None,
            data=config.data.eval or "",
            samples=0,
            retries=3 if name else 0,
            benchmark=name,
        )
    named = {
        "checkpoint": arguments.checkpoint and str(arguments.checkpoint),
        "data": arguments.data,
        "samples": arguments.samples,
        "retries": arguments.retries,
    }
    changes = {key: value for key, value in named.items() if value is not None}
    configured = {
        "samples": config.evaluation.samples,
        "config": config.model_dump(mode="json", by_alias=True),
    }
    measured = measured.model_copy(update={**configured, **changes})
    if not measured.data:
        raise ConfigError("data.eval names no rows, and --data was not given")
    return measured


def run(arguments: argparse.Namespace) -> int:
    """Evaluate. Returns the exit code; raises RayloopError."""
    with cluster(arguments) as (address, temporary):
        published = _published(arguments)
        measured = _measurement(arguments, published)
        config = RunConfig.model_validate(measured.config)
        name = measured.benchmark
        checkpoint = Path(measured.checkpoint) if measured.checkpoint else None
        out = arguments.out or evaluation_folder(config, checkpoint, name or "eval")
        if arguments.like is not None and arguments.out is None:
            # What was measured before must not count as measured again.
            out = unused(out.with_name(f"{out.name}-again"))
        if name and not Path(measured.data).is_file():
            raise ConfigError(
                f"{measured.data} is not there. {recipes.benchmarks()[name]} says in its first line"
                " how it is made"
            )
        if checkpoint is not None:
            model = as_asked(config.model, checkpoint, out / "models")
            if run_of(checkpoint):
                # The exported model has lost the name by which `auto` may know its language.
                config = prepare(config).speaking().config
            config = config.model_copy(update={"model": model})
        eval_data = config.data.model_copy(update={"eval": measured.data})
        evaluated = prepare(config).with_sections(data=eval_data)
        files = ("train", "eval") if arguments.controls else ("eval",)
        prepared = preflight(evaluated, trains=False, reads=files)
        # It imports ray, which reads the environment.
        from rayloop.cluster.stages.evaluate import evaluate

        return evaluate(
            prepared.with_sections(data=config.data),
            measured,
            out,
            controls=arguments.controls,
            published=published,
            file=arguments.protocol,
            address=address,
            temporary=temporary,
        )
