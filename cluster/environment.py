"""Ray's settings that travel in environment variables. Ray reads them when it is imported, so they come before that."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX, LOCK = "rayloop-", "lock"
"""A private cluster's temporary folder, and the file in it that the owning process keeps locked."""


@contextmanager
def private_cluster() -> Iterator[str]:
    """For a cluster of this process's own: a token that nobody else has, and no orphaned grandchildren.

    Without a token every user of the machine could run code in the cluster; Ray's own default leaves a world-readable
    one behind in the home folder. Yields a temporary folder for the cluster's files.
    """
    sweep()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
        open(Path(folder) / LOCK, "w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield folder
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def sweep() -> None:
    """Remove the temporary folders of private clusters whose process was killed: nothing could do it then."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its process lives, or it is another user's
