"""Files that nobody else may have made, changed or read: keys, tokens, and what says where to send them."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rayloop.core.failures import ConfigError

ROOT = 0


def trusted(path: Path, what: str, others: int = 0o022) -> None:
    """Raises ConfigError when a file or folder is another user's (root's are everybody's), or when its mode allows others
    one of ``others``: 0o022 to write it, 0o077 to read it as well. OSError when it is not there.
    """
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), ROOT):
        raise ConfigError(
            f"{what} {path} belongs to user {found.st_uid}, and only your own is believed (you are {os.geteuid()})"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & others:
        verb, right = ("read", "go-rwx") if others & 0o044 else ("write", "go-w")
        raise ConfigError(f"{what} {path} has mode {mode:o}; others must not {verb} it: chmod {right} {path}")


def new_secret(path: Path, what: str) -> Path:
    """Write a secret that nobody else has, readable by its owner only. One that is there already is kept when it is ``trusted``.

    Raises ConfigError. An empty file is what a crash left, and is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        trusted(path, what, 0o077)
        if path.stat().st_size:
            return path
        path.unlink(missing_ok=True)
    with suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, secrets.token_urlsafe(32).encode())
        finally:
            os.close(file)
    return path
