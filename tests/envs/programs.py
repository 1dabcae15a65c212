"""The programs that environments need: what is missing here, and how Debian installs it.

    python -m tests.envs.programs install [PROGRAM...]

Tests name what they need: ``pytestmark = [pytest.mark.env, needs("bwrap", "Xvfb")]``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest

PACKAGES = {
    "chromium-headless-shell": "chromium-headless-shell fonts-dejavu-core",
    "bwrap": "bubblewrap",
    "Xvfb": "xvfb",
    "openbox": "openbox",
    "xterm": "xterm",
    "mousepad": "mousepad",
    "pcmanfm": "pcmanfm",
}
"""Program -> the Debian packages that bring it."""


def missing(programs: Iterable[str]) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where one of the programs is missing, and says which."""
    lacking = missing(programs)
    return pytest.mark.skipif(
        bool(lacking),
        reason=f"missing here: {', '.join(lacking)} (python -m tests.envs.programs install)",
    )


def install(programs: Iterable[str]) -> None:
    """Install what is missing.

    Where that needs rights that we lack, say so: tests that need it skip.
    """
    lacking = missing(programs)
    if not lacking:
        return
    packages = " ".join(PACKAGES[program] for program in lacking).split()
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"missing here: {', '.join(lacking)}; as root: apt-get install {' '.join(packages)}")
        return
    quietly = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", *packages],
    ):
        subprocess.run(["apt-get", *command], check=True, env=quietly, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:2] != ["install"] or set(sys.argv[2:]) - set(PACKAGES):
        raise SystemExit(__doc__)
    install(sys.argv[2:] or PACKAGES)
