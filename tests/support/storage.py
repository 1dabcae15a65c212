"""Storage that refuses what is written to it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full(bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, as on a disk that is full within a
    line.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def keeps_folders(patch: pytest.MonkeyPatch) -> None:
    """No folder can be removed, as on NFS while another process has a file of it open."""

    def refuse(path: str | Path, **_: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    patch.setattr(os, "rmdir", refuse)
