"""An engine that computes with other weights than it got, while a file says so: no check of the
weight sync sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Manifest
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.settings import EnginePlace, ModelSettings, TransformersEngineSettings


class DriftingEngine(TransformersEngine):
    """Adds noise to the weights that it loads."""

    class Settings(SettingsModel):
        drift: Path
        """While this file exists."""

    def __init__(self, model: ModelSettings, settings: Settings, place: EnginePlace) -> None:
        super().__init__(model, TransformersEngineSettings(threads=1), place)
        self._drift = settings.drift

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        await super().load(manifest, tensors)
        if self._drift.exists():
            for tensor in self._parameters.values():
                tensor.add_(0.2 * torch.randn_like(tensor))
