"""Settings of a run's loggers, which get its metrics in addition to metrics.jsonl.

cluster/loop/loggers.py opens them.
"""

import importlib.util
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Tag

from rayloop.config.settings import CUSTOM, Component, SettingsModel, by_kind
from rayloop.core.failures import ConfigError


class PrometheusSettings(SettingsModel):
    """The metrics of the newest step at the metrics port of the driver's node; always on."""

    kind: Literal["prometheus"] = "prometheus"


class TensorBoardSettings(SettingsModel):
    """Event files in the run folder, below ``tensorboard/``. Needs the extra ``tensorboard``."""

    kind: Literal["tensorboard"] = "tensorboard"


class WandbSettings(SettingsModel):
    """A run of Weights & Biases, which a resumed run continues.

    Its id and files are below ``wandb/``. Needs the extra ``wandb``.

    It is configured by W&B's own variables where the driver runs: ``WANDB_API_KEY`` (or a login
    there), ``WANDB_PROJECT`` (by default rayloop), ``WANDB_ENTITY`` when the project is a team's,
    ``WANDB_MODE=offline`` to write files only, for a later ``wandb sync``.
    """

    kind: Literal["wandb"] = "wandb"


LoggerSettings: TypeAlias = TensorBoardSettings | WandbSettings | Component
AnySettings: TypeAlias = PrometheusSettings | LoggerSettings


def name_of(logger: AnySettings) -> str:
    """The ``kind`` of a logger, or the ``use`` of a custom one."""
    return logger.use if isinstance(logger, Component) else logger.kind


def _without_repetition(chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = [name_of(logger) for logger in chosen]
    repeated = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    if repeated:
        raise ValueError(
            f"kind {', '.join(repeated)} is listed more than once: a run has one such log"
        )
    return chosen


_AnyLogger = Annotated[
    Annotated[TensorBoardSettings, Tag("tensorboard")]
    | Annotated[WandbSettings, Tag("wandb")]
    | Annotated[Component, Tag(CUSTOM)],
    by_kind(""),
]
LoggersSettings = Annotated[tuple[_AnyLogger, ...], AfterValidator(_without_repetition)]


def installed(chosen: Iterable[LoggerSettings]) -> None:
    """Raise ConfigError for a logger whose package is missing here.

    Kind, package and extra have the same name.
    """
    for index, logger in enumerate(chosen):
        if isinstance(logger, Component):
            continue
        spec = importlib.util.find_spec(logger.kind)
        # A folder of that name in the current directory has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"loggers.{index}: kind {logger.kind} needs the package {logger.kind}, which is not"
                f' installed. Install it with: pip install "rayloop[{logger.kind}]"'
            )
