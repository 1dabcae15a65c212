"""What each fault cost, measured: printed at the end of the test session, and written as JSON on
request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """Seconds from the kill to the event that reports it, and to the one that says it is mended;
    trajectories excluded.

    When several faults hit one run, each row carries what all of them together lost.
    """

    fault: str
    detected_s: float
    recovered_s: float
    trajectories_lost: int


ROWS: list[Row] = []


@dataclass(frozen=True)
class Times:
    """Wall-clock times of a fault, its detection and its repair."""

    fault: str
    killed: float
    detected: float
    recovered: float


def record(times: Iterable[Times], counts: Mapping[str, int]) -> None:
    """Add the rows of a run whose ledger ended with ``counts``.

    Raises AssertionError for an event before its cause.
    """
    lost = sum(
        number for name, number in counts.items() if name.startswith(("excluded", "cancelled"))
    )
    for t in times:
        assert t.killed - 0.005 <= t.detected <= t.recovered, t
        detected = max(0.0, t.detected - t.killed)
        ROWS.append(Row(t.fault, round(detected, 3), round(t.recovered - t.killed, 3), lost))


def lines() -> list[str]:
    """The table as text."""
    width = max(len(row.fault) for row in ROWS)
    head = f"{'fault':{width}}  detected_s  recovered_s  trajectories_lost"
    return [head] + [
        f"{r.fault:{width}}  {r.detected_s:10.3f}  {r.recovered_s:11.3f}  {r.trajectories_lost:17d}"
        for r in ROWS
    ]


def write() -> None:
    """To the file named by RAYLOOP_FAULT_TABLE, when it is set."""
    if path := os.environ.get("RAYLOOP_FAULT_TABLE"):
        Path(path).write_text(
            json.dumps([asdict(row) for row in ROWS], indent=1) + "\n", encoding="utf-8"
        )
