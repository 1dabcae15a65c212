"""Marks that environments and graders of a run leave when they begin to work, so that a victim is
killed at work.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from tests.support.runs import Run


class Marks:
    """The marks that a run's environments and graders leave when they begin to work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def since(self, kind: str, moment: float) -> list[Path]:
        return [
            path
            for path in self.folder.glob(f"{kind}-*")
            if int(path.name.split("-")[1]) / 1e9 >= moment
        ]


def marked(config: dict[str, Any], marks: Marks) -> dict[str, Any]:
    config["environment"]["episode"]["environment"]["with"]["marks"] = str(marks.folder)
    config["reward"]["source"]["with"]["marks"] = str(marks.folder)
    return config


def next_mark(
    made: Run, marks: Marks, kind: str, count: int = 1, since: float | None = None
) -> None:
    """Wait for marks that were left after ``since``, a ``time.time()``; after this call if None."""
    moment = time.time() if since is None else since
    made.until(lambda: len(marks.since(kind, moment)) >= count, f"{count} marks {kind}")


def kill(process: psutil.Process) -> float:
    now = time.time()
    process.kill()
    return now
