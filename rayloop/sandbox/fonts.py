"""matplotlib's list of fonts, which takes seconds to make, made once for this user and machine instead of in each fork server."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

_MAKE = "import matplotlib, matplotlib.font_manager; print(matplotlib.get_cachedir())"


@functools.cache
def folder() -> str | None:
    """A folder with the list alone in it, or None: then each fork server makes its own, in some seconds."""
    try:
        made = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    place = Path(made.stdout.strip().splitlines()[-1])
    if not list(place.glob("fontlist-*.json")) or {found.suffix for found in place.iterdir()} - {".json", ".lock"}:
        return None
    return os.fspath(place)
