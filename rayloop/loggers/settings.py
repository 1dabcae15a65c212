"""Settings of where a run's metrics go besides metrics.jsonl (cluster/loop/loggers.py opens them)."""

import importlib.util
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Tag

from rayloop.config.settings import OWN, Component, SettingsModel, by_kind
from rayloop.core.failures import ConfigError


class PrometheusSettings(SettingsModel):
    """Always on: the metrics of the newest step at the metrics port of the driver's node."""

    kind: Literal["prometheus"] = "prometheus"


class TensorBoardSettings(SettingsModel):
    """Event files in the run folder, below ``tensorboard/``. Needs the extra ``tensorboard``."""

    kind: Literal["tensorboard"] = "tensorboard"


class WandbSettings(SettingsModel):
    """A run of Weights & Biases, continued by a resumed run; its id and files are below ``wandb/``.

    Needs the extra ``wandb``.

    It is set with W&B's own variables where the driver runs: ``WANDB_API_KEY`` (or a login there),
    ``WANDB_PROJECT`` (without it rayloop), ``WANDB_ENTITY`` when the project is a team's,
    ``WANDB_MODE=offline`` to write files only, for a later ``wandb sync``.
    """

    kind: Literal["wandb"] = "wandb"


LoggerSettings: TypeAlias = TensorBoardSettings | WandbSettings | Component
AnySettings: TypeAlias = PrometheusSettings | LoggerSettings


def name_of(logger: AnySettings) -> str:
    """``kind``, or ``use`` of one of your own."""
    return logger.use if isinstance(logger, Component) else logger.kind


def _once(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = [name_of(logger) for logger in chosen]
    if again := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"kind {', '.join(again)} is there more than once: a run has one such log")
    return chosen


_Chosen = Annotated[
    Annotated[TensorBoardSettings, Tag("tensorboard")]
    | Annotated[WandbSettings, Tag("wandb")]
    | Annotated[Component, Tag(OWN)],
    by_kind(""),
]
LoggersSettings = Annotated[tuple[_Chosen, ...], AfterValidator(_once)]


def installed(chosen: Iterable[LoggerSettings]) -> None:
    """Raises ConfigError for a logger whose package is missing here: kind, package and extra have
    one name.
    """
    for index, logger in enumerate(chosen):
        if isinstance(logger, Component):
            continue
        spec = importlib.util.find_spec(logger.kind)
        if (
            spec is None or spec.origin is None
        ):  # a folder of that name in the current directory has no origin
            raise ConfigError(
                f"loggers.{index}: kind {logger.kind} needs the package {logger.kind}, which is not"
                " installed. "
                f'Install it with: pip install "rayloop[{logger.kind}]"'
            )
