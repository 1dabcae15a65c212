"""Settings of where a run's metrics go besides metrics.jsonl (cluster/loop/loggers.py opens them)."""

import importlib.util
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError


class PrometheusSettings(SettingsModel):
    """Always on: the metrics of the newest step at the metrics port of the driver's node."""

    kind: Literal["prometheus"] = "prometheus"


class TensorBoardSettings(SettingsModel):
    """Event files in the run folder, below ``tensorboard/``. Needs the extra ``tensorboard``."""

    kind: Literal["tensorboard"] = "tensorboard"


class WandbSettings(SettingsModel):
    """A run of Weights & Biases, continued by a resumed run; its id and files are below ``wandb/``. Needs the extra ``wandb``.

    It is set with W&B's own variables where the driver runs: ``WANDB_API_KEY`` (or a login there), ``WANDB_PROJECT`` (without it
    rayloop), ``WANDB_ENTITY`` when the project is a team's, ``WANDB_MODE=offline`` to write files only, for a later ``wandb sync``.
    """

    kind: Literal["wandb"] = "wandb"


def _once(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = [logger.kind for logger in chosen]
    if again := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"kind {', '.join(again)} is there more than once: a run has one such log")
    return chosen


LoggerSettings: TypeAlias = TensorBoardSettings | WandbSettings
AnySettings: TypeAlias = PrometheusSettings | LoggerSettings
LoggersSettings = Annotated[tuple[Annotated[LoggerSettings, Field(discriminator="kind")], ...], AfterValidator(_once)]


def installed(chosen: Iterable[LoggerSettings]) -> None:
    """Raises ConfigError for a logger whose package is missing here: kind, package and extra have one name."""
    for index, logger in enumerate(chosen):
        spec = importlib.util.find_spec(logger.kind)
        if spec is None or spec.origin is None:  # a folder of that name in the current directory has no origin
            raise ConfigError(
                f"loggers.{index}: kind {logger.kind} needs the package {logger.kind}, which is not installed. "
                f'Install it with: pip install "rayloop[{logger.kind}]"'
            )
