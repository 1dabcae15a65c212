"""The address of an application. Light: imported before Ray is."""

from __future__ import annotations

from pydantic import Field

from rayloop.config.settings import SettingsModel

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class HttpOptions(SettingsModel):
    """Host and port."""

    host: str = "127.0.0.1"
    """The interface to listen on; 0.0.0.0 to be reached from other machines, which needs ``key_file``."""
    port: int = Field(8000, ge=0, le=65535)
    """Change it when the port is taken. 0: a free one (the ``serve`` commands only)."""
