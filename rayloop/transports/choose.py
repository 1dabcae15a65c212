"""Makes a transport from settings. The driver, every rank and every rollout actor make one each."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError
from rayloop.transports.seam import WeightTransport
from rayloop.transports.settings import TransportSettings


def transport(settings: TransportSettings, folder: str | Path) -> WeightTransport[Any]:
    """Returns the transport of ``settings``; it may write below ``folder`` (in the run folder), which every node should see.

    Raises ConfigError for a class that is no transport.
    """
    if not isinstance(settings, Component):
        shipped: WeightTransport[Any] = pkgutil.resolve_name(settings.implementation)(settings, str(folder))
        return shipped
    own = settings.resolve()(settings.options(), str(folder))
    if isinstance(own, WeightTransport):
        return own
    raise ConfigError(f"use: {settings.use!r} is no rayloop.transports.seam.Transport, but a {type(own).__name__}")
