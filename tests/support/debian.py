"""Debian's packages that tests need, installed by root without their daemons being started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def install(lane: str, programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install ``packages`` unless all ``programs`` are there.

    Raises SystemExit, with the name of the ``lane``.
    """
    if all(map(shutil.which, programs)):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SystemExit(
            f"{lane} cannot run here: installing {' '.join(packages)} needs root and apt-get"
        )
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
        policy.chmod(0o755)
    try:
        for command in (
            ["update", "-qq"],
            ["install", "-y", "-qq", "--no-install-recommends", *packages],
        ):
            quietly = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(
                ["apt-get", *command], check=True, env=quietly, stdout=subprocess.DEVNULL
            )
    finally:
        if ours:
            policy.unlink()
