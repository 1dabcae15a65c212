"""Installing with make where something lacks: one sentence says what to do, and the same command
works afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
PIP = """#!/bin/sh
case "$*" in
*--version*) echo pip 26 ;;
*install*) echo "$@" >> {log}; test ! -e {broken} ;;
*) echo ran "$@" ;;
esac
"""
"""A virtual environment's Python, whose pip fails while a file ``broken`` is there."""


class Checkout:
    """A folder with our Makefile, and a stand-in for its virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.broken = folder, folder / "installs", folder / "broken"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        self.script(folder / ".venv/bin/python", PIP.format(log=self.log, broken=self.broken))

    def script(self, file: Path, text: str) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
        return file

    def make(self, *words: str) -> tuple[int, str, str]:
        """Exit code, what it printed, and what it said on stderr without make's own lines."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "MFLAGS"))
        }
        done = subprocess.run(
            ["make", "quickstart", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        return done.returncode, done.stdout, "\n".join(said)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_python_that_is_too_old_is_named(checkout: Checkout) -> None:
    old = checkout.script(
        checkout.folder / "old", '#!/bin/sh\ntest "$1" = --version && echo Python 3.10.13\n'
    )
    code, _, said = checkout.make(f"PYTHON={old}")
    assert (code, said) == (
        2,
        (
            "rayloop: Python 3.10.13 is too old, 3.11 is the oldest that works: make"
            " PYTHON=python3.11 quickstart"
        ),
    )
    assert not checkout.log.exists()
    assert checkout.make()[0] == 0


def test_a_python_without_venv_says_what_to_install(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".venv")
    bare = checkout.script(checkout.folder / "bare", '#!/bin/sh\ntest "$1" = -c\n')
    code, _, said = checkout.make(f"PYTHON={bare}")
    assert (code, said) == (
        2,
        "rayloop: no virtual environment could be made. On Debian: apt-get install python3-venv",
    )


@pytest.mark.parametrize("installed", [0, 1])
def test_an_installation_that_breaks_off_is_continued(checkout: Checkout, installed: int) -> None:
    """Before torch or behind it."""
    if installed:
        assert checkout.make(".venv/.torch")[0] == 0
        (checkout.folder / ".venv/.run").unlink()
    checkout.broken.touch()
    code, ran, said = checkout.make()
    assert code == 2
    assert said.startswith(
        "rayloop: pip failed, see above: a network that is gone, a full disk, or a package without"
    )
    assert "build-essential" in said
    assert "ran" not in ran
    checkout.broken.unlink()
    code, ran, said = checkout.make()
    assert (code, said) == (0, "")
    assert "ran -m rayloop train recipes/arc_vision/quickstart.yaml --console" in ran
    assert (
        sum("torch==" in line for line in checkout.log.read_text(encoding="utf-8").splitlines())
        == 2 - installed
    )
