"""From settings to a generation engine, whose library is imported here, when it is chosen. The seam is ``GenerationEngine``."""

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
class Place:
    """What an engine is given besides settings: where it is."""

    weights: str = ""
    """A folder in the run folder, which all nodes see, for weights that a server is to load."""
    scratch: Callable[[], str] = tempfile.mkdtemp
    """Makes a folder for sockets and temporary files, which whoever made this place removes."""
    name: str | None = None
    """The actor's, when it is one of Ray's: metrics of the engine's own may then go to Ray's."""


def build_engine(model: ModelSettings, settings: EngineChoice, place: Place) -> GenerationEngine:
    """The engine that ``settings`` name: a class that is called with the model's settings, whose path is a folder of this machine,
    its own, and the place.

    Raises ConfigError when its library is missing, or the model's files.
    """
    model = model.here(weights=settings.holds_model)
    make: Callable[..., Any]
    if isinstance(settings, OwnEngine):
        make, own = settings.component.resolve(), settings.component.options()
    else:
        make, own = pkgutil.resolve_name(settings.implementation), settings
    engine: GenerationEngine = make(model, own, place)
    return engine
