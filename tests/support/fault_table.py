"""What each fault cost, measured: printed at the end of the test session, and written as JSON on request."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """Seconds from the kill to the event that reports it, and to the one that says it is mended; trajectories excluded."""

    fault: str
    detected_s: float
    recovered_s: float
    trajectories_lost: int


ROWS: list[Row] = []


def record(fault: str, killed: float, detected: float, recovered: float, lost: int) -> None:
    """Add a row from wall-clock times. Raises AssertionError for an event before its cause."""
    assert killed - 0.005 <= detected <= recovered, (fault, killed, detected, recovered)
    ROWS.append(Row(fault, round(max(0.0, detected - killed), 3), round(recovered - killed, 3), lost))


def lines() -> list[str]:
    """The table as text."""
    width = max(len(row.fault) for row in ROWS)
    head = f"{'fault':{width}}  detected_s  recovered_s  trajectories_lost"
    return [head] + [
        f"{r.fault:{width}}  {r.detected_s:10.3f}  {r.recovered_s:11.3f}  {r.trajectories_lost:17d}" for r in ROWS
    ]


def write() -> None:
    """To the file named by RAYLOOP_FAULT_TABLE, when it is set."""
    if path := os.environ.get("RAYLOOP_FAULT_TABLE"):
        Path(path).write_text(json.dumps([asdict(row) for row in ROWS], indent=1) + "\n")
