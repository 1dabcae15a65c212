"""Makes a generation engine (``GenerationEngine``) from settings, and imports its library only then."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayloop.config.model import ModelSettings
from rayloop.core.protocols import GenerationEngine
from rayloop.engines.settings import EngineChoice, OwnEngine


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What an engine gets besides settings: its place on the machine."""

    weights: str = ""
    """A folder in the run folder, which all nodes see, for weights that a server loads."""
    scratch: Callable[[], str] = tempfile.mkdtemp
    """Makes a folder for sockets and temporary files; the creator of this object removes it."""
    name: str | None = None
    """Name of the Ray actor, if the engine is in one: vLLM's own metrics then go to Ray's metrics."""


def build_engine(model: ModelSettings, settings: EngineChoice, place: EnginePlace) -> GenerationEngine:
    """Returns the engine of ``settings``, made from the model's settings (with a folder of this machine as path), its own, and
    ``place``.

    Raises ConfigError when its library or the model's files are missing.
    """
    model = model.here(weights=settings.holds_model)
    make: Callable[..., Any]
    if isinstance(settings, OwnEngine):
        make, own = settings.component.resolve(), settings.component.options()
    else:
        make, own = pkgutil.resolve_name(settings.implementation), settings
    engine: GenerationEngine = make(model, own, place)
    return engine
