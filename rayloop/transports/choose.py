"""From settings to a transport, which is made anew in every process that takes part."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError
from rayloop.transports.seam import Transport
from rayloop.transports.settings import TransportSettings


def transport(settings: TransportSettings, folder: str | Path) -> Transport[Any]:
    """The transport that ``settings`` names; it may write below ``folder`` (in the run folder), which every node should see.

    Raises ConfigError for a class that is no transport.
    """
    if not isinstance(settings, Component):
        shipped: Transport[Any] = pkgutil.resolve_name(settings.implementation)(settings, str(folder))
        return shipped
    own = settings.resolve()(settings.options(), str(folder))
    if isinstance(own, Transport):
        return own
    raise ConfigError(f"use: {settings.use!r} is no rayloop.transports.seam.Transport, but a {type(own).__name__}")
