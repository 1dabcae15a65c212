"""The files of a desktop's home: put there before the episode, read after it. Read in here, where no link leads out."""

from __future__ import annotations

import os
import stat
from typing import Any

SKIPPED = {".cache", ".config", ".local", ".dbus"}
"""What programs keep for themselves, at the top of the home."""
MOST_FILES = 2_000
MOST_BYTES = 8 << 20
MOST_OF_ONE = 1 << 20
"""What is returned of a home: entries, bytes of all files and of one. The rest is there without content."""


def put(home: str, path: str, content: bytes, mode: int) -> None:
    """Write a file and the folders above it. Raises ValueError for a path that is not below ``home``."""
    whole = os.path.normpath(os.path.join(home, path))
    if not whole.startswith(home + os.sep):
        raise ValueError(f"{path} is not below the home")
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    with open(whole, "wb") as file:
        file.write(content)
    os.chmod(whole, mode)


def contents(home: str) -> tuple[list[dict[str, Any]], bytes]:
    """What is in the home, and the contents of its files one after the other.

    Each entry has ``path`` and ``kind`` (file, folder, other), and ``size`` when its content is returned.
    """
    entries: list[dict[str, Any]] = []
    found: list[bytes] = []
    room = MOST_BYTES
    for folder, folders, files in os.walk(home):
        if folder == home:
            folders[:] = [name for name in folders if name not in SKIPPED]
        for name in sorted([*folders, *files]):
            if len(entries) == MOST_FILES:
                return entries, b"".join(found)
            whole = os.path.join(folder, name)
            entry: dict[str, Any] = {"path": os.path.relpath(whole, home), "kind": _kind(whole)}
            if entry["kind"] == "file" and (content := _read(whole, min(room, MOST_OF_ONE))) is not None:
                entry["size"] = len(content)
                found.append(content)
                room -= len(content)
            entries.append(entry)
    return entries, b"".join(found)


def _kind(path: str) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "other"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def _read(path: str, most: int) -> bytes | None:
    """None when it is larger, no file any more, or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = file.read(most + 1)
    return content if len(content) <= most else None
