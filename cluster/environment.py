"""Ray's settings that travel in environment variables. Ray reads them when it is imported, so they come before that."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def private_cluster() -> Iterator[None]:
    """For a cluster of this process's own: a token that nobody else has, and no orphaned grandchildren.

    Without a token every user of the machine could run code in the cluster; Ray's own default leaves a world-readable
    one behind in the home folder.
    """
    with tempfile.TemporaryDirectory(prefix="rayloop-") as folder:
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
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
