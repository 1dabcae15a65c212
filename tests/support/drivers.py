"""A driver without its actor and without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.cluster.driver import Driver
from rayloop.cluster.loop.loggers import open_logger
from rayloop.cluster.services import TrainingServices
from rayloop.run.checkpoint import NOTHING
from rayloop.run.config import RunConfig
from rayloop.run.origin import Origin
from rayloop.run.reporter import Reporter


def made_driver(
    config: RunConfig,
    folder: Path,
    resume: str = "auto",
    hashes: Mapping[str, str] = NOTHING,
    services: Any = None,
    warnings: Sequence[str] = (),
) -> Driver:
    """As its actor makes it, with other ``services`` if they are given."""
    reporter = Reporter(config, folder, open_logger)
    given = services or TrainingServices(config, str(folder), reporter.event)
    nobody: Any = None
    origin = Origin.of(folder / "checkpoints", resume)
    return Driver(config, given, reporter, origin, nobody, hashes, warnings)
