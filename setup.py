"""What pyproject.toml cannot say: a checkout without symbolic links installs the whole product.

Folders of the repository's root are packages below ``rayloop``, through links. pip, Python's
zipfile and Git for Windows unpack a link as a text file that holds its target. The links are made
again before setuptools looks for packages.
"""

import shutil
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PLACES = ("rayloop/*", "rayloop/doctor/*.txt", "rayloop/launch/slurm_scripts/*")
"""Where the links of the repository are."""
LONGEST_TARGET = 200
"""Bytes. No link has a longer target, and no file of another kind is read whole to find out."""


def target_of(file: Path) -> Path | None:
    """The file or folder of this checkout that an unpacked link names.

    None for a file that was never a link.
    """
    if file.is_symlink() or not file.is_file() or file.stat().st_size > LONGEST_TARGET:
        return None
    text = file.read_bytes().decode(errors="replace")
    if not text.startswith("../") or "\n" in text:
        return None
    target = (file.parent / text).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def make_link(file: Path, target: Path) -> None:
    """Replace the text file by a link, or by a copy where the file system has no links."""
    text = file.read_text(encoding="utf-8")
    file.unlink()
    try:
        file.symlink_to(text)
    except OSError:
        copy = shutil.copytree if target.is_dir() else shutil.copy
        copy(target, file)


for place in PLACES:
    for path in ROOT.glob(place):
        found = target_of(path)
        if found is not None:
            make_link(path, found)

setup()
