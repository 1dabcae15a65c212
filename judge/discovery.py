"""Where the judge is: a file on a shared file system that it writes when it starts, and how a client finds it."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import ValidationError

from rayloop.core.config import Settings as _Settings
from rayloop.core.config import local_path
from rayloop.core.failures import ConfigError, InfrastructureFailure


class Address(_Settings):
    """Where to ask, and the file that holds the bearer key ("" for none): never the key itself."""

    url: str
    key_file: str = ""


Find = Callable[[], Awaitable[Address]]
"""Finds the judge's present address; asked again when requests fail. Raises InfrastructureFailure when there is none now."""


class FileDiscovery:
    """The address in a JSON file, for judges outside of the run's cluster."""

    class Settings(_Settings):
        path: str = "runs/judge.json"
        """The file that the judge writes; on a file system that both see."""

    def __init__(self, settings: FileDiscovery.Settings) -> None:
        self.path = local_path(settings.path)

    async def __call__(self) -> Address:
        try:
            return Address.model_validate_json(self.path.read_text())
        except (OSError, ValidationError) as error:
            raise InfrastructureFailure(f"no judge has written its address to {self.path}: {error}") from error


def announce(path: Path, address: Address) -> None:
    """Write the judge's address for others to find. Atomic: a reader sees the old address or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(address.model_dump_json())
    os.replace(fresh, path)


def withdraw(path: Path, address: Address) -> None:
    """Remove the file when it still holds this address: a successor's stays."""
    try:
        if Address.model_validate_json(path.read_text()) == address:
            path.unlink()
    except FileNotFoundError:
        return


def read_key(path: str) -> str:
    """The bearer key of a file that only its owner can read, "" for no file. Raises ConfigError."""
    if not path:
        return ""
    file = local_path(path)
    try:
        mode = stat.S_IMODE(os.stat(file).st_mode)
        key = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the judge's key file {file} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"the judge's key file {file} has mode {mode:o}; others must not read it: chmod 600 {file}")
    if not key or not key.isascii() or any(c.isspace() for c in key):
        raise ConfigError(f"the judge's key file {file} holds no key (one line of ASCII without spaces)")
    return key
