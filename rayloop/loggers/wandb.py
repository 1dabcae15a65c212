"""Metrics for Weights & Biases. Needs the extra ``wandb``, imported when a run asks for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Wandb:
    """One run of Weights & Biases for all drivers of a rayloop run. After a restore W&B shows the repeated steps twice.

    ``folder``: its id; W&B's own files go to ``wandb`` beside it. ``config`` is what W&B shows as the run's configuration.
    """

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        import wandb

        folder.mkdir(exist_ok=True)
        known = folder / "id"
        if not known.exists():
            known.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rayloop"), name=name, config=dict(config),
            id=known.read_text(encoding="utf-8"), resume="allow", dir=str(folder.parent),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log({**metrics, "step": step})  # W&B's own step only counts up: it would refuse a repeated one

    def close(self) -> None:
        """Finish W&B's run."""
        self._run.finish()
