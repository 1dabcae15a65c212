"""The loggers of a run, opened by their settings, and the Prometheus logger.

The gauges of the Prometheus logger are on Ray's metrics port.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from rayloop.config.settings import Component
from rayloop.core.deadlines import WAITS
from rayloop.loggers.settings import (
    AnySettings,
    PrometheusSettings,
    TensorBoardSettings,
    WandbSettings,
)
from rayloop.loggers.threads import Logger
from rayloop.loggers.writers import TensorBoard, Wandb
from rayloop.run.folder import RunFolder
from rayloop.run.records.metrics import prometheus
from rayloop.view.health import RunHealth

REPEAT_EVERY_S = 3.0
"""Seconds between two exports of the gauges.

Ray drops a gauge that was not set within its report period of 10 s.
"""


class Prometheus:
    """Gauges of ``ray.util.metrics`` with the label ``run``.

    ``rayloop.run.records.metrics.prometheus`` names them. A metric keeps its value until a step has
    a new one; the metrics of ``health`` are as old as the last export.
    """

    def __init__(self, run: str, health: RunHealth) -> None:
        from ray.util.metrics import Gauge

        self._run = run
        self._make = Gauge
        self._gauges: dict[str, Any] = {}
        self._health = health
        self._newest: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._repeat, daemon=True, name="prometheus-repeat").start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges of these metrics."""
        self._export(metrics)
        # A new mapping instead of an update in place: the thread may be iterating over the old one.
        self._newest = self._newest | dict(metrics)

    def close(self) -> None:
        """End the thread that repeats the exports."""
        self._closed.set()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT_EVERY_S):
            self._export(self._newest | alive(self._health))

    def _export(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            row, labels = prometheus(name)
            if row.prometheus not in self._gauges:
                self._gauges[row.prometheus] = self._make(
                    row.prometheus, row.meaning, ("run", *labels)
                )
            self._gauges[row.prometheus].set(value, {"run": self._run, **labels})


def alive(health: RunHealth) -> dict[str, float]:
    """The newest metrics of ``recovery/``; the end of a wait of the driver counts as progress."""
    try:
        health.update()
        metrics = health.metrics()
    except (OSError, ValueError):
        # The file server restarts.
        return {}
    quiet = time.monotonic() - WAITS.moved
    progress_age = min(quiet, metrics.get("recovery/progress_age", quiet))
    return {**metrics, "recovery/progress_age": progress_age}


def open_logger(
    settings: AnySettings, name: str, config: Mapping[str, Any], folder: RunFolder
) -> Logger:
    """The logger of the run ``name``; W&B shows ``config``. Raises what its package raises."""
    match settings:
        case PrometheusSettings():
            return Prometheus(name, RunHealth(folder, config))
        case TensorBoardSettings():
            return TensorBoard(folder.tensorboard)
        case WandbSettings():
            return Wandb(name, config, folder.wandb)
        case Component():
            logger: Logger = settings.resolve()(settings.options(), name, config, folder.path)
            return logger
